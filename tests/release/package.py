"""What the wheel must hold, and its description."""

import email
import re
import shutil
import subprocess
import zipfile
from email.message import Message
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("gdn_jax", "pallas_kernels")
MODULE = "gdn_command.py"


def tracked() -> list[str]:
    """Paths of the files of the repository that are there."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def copy_tracked(folder: Path, *tops: str) -> Path:
    """Copies the tracked files under `tops` (none: all); so nothing of an earlier build gets into a package."""
    for name in tracked():
        if not tops or name.split("/")[0] in tops:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def expected() -> set[str]:
    """Paths in the wheel of all code: the tracked files of the packages, and the module of the command."""
    return {name for name in tracked() if name.split("/")[0] in PACKAGES} | {MODULE}


def contents(wheel: Path) -> tuple[set[str], Message, set[str]]:
    """Returns the paths of a wheel's code, its metadata, and the names in its .dist-info."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [info] = {top for name in names if (top := name.split("/")[0]).endswith(".dist-info")}
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
    beside = {name.removeprefix(f"{info}/") for name in names if name.startswith(f"{info}/")}
    return {name for name in names if not name.startswith(f"{info}/")}, metadata, beside


def description(metadata: Message) -> str:
    """Returns the long description."""
    payload = metadata.get_payload(decode=True)
    assert isinstance(payload, bytes)
    return payload.decode()


def paths_in(page: str) -> list[str]:
    """Targets of links and pictures of a Markdown page that are neither URLs nor places on the page."""
    return re.findall(r"\]\((?!https?://|#)([^)]*)\)", page)
