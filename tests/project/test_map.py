"""docs/map.md: every file that it names is there, and it leaves out no public name and no room."""

import pathlib
import re
from itertools import pairwise

import pytest
from test_architecture import ROOMS

import gdn_jax
from gdn_jax import hf, layers, models, rules, serving

ROOT = pathlib.Path(__file__).parents[2]
MAP = (ROOT / "docs" / "map.md").read_text()
FOLDERS = {"kernel": ("pallas_kernels",), "test": ("tests",)}
"""Folder of a column's files; `gdn_jax` for all others."""
ANYWHERE = ("gdn_jax", "pallas_kernels", ".")
"""Folders of files that the text between the tables names."""
QUOTED = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w./]+\.(py|md)")


def named_files():
    """(line number, path, folders in which it may be) of every file that the map names."""
    header = []
    for number, line in enumerate(MAP.splitlines(), 1):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            header = []
        elif not header:
            header = cells
        for i, cell in enumerate(cells):
            folders = (*FOLDERS.get(header[i], ("gdn_jax",)), ".") if header else ANYWHERE
            yield from ((number, name, folders) for name in QUOTED.findall(cell) if FILE.fullmatch(name))


def test_files_are_there():
    found = [*named_files()]
    assert len(found) > 100
    missing = [
        f"docs/map.md:{number}: {name}"
        for number, name, folders in found
        if not any((ROOT / folder / name).exists() for folder in folders)
    ]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize(
    "package", [gdn_jax, serving, rules, layers, models, hf], ids=lambda package: package.__name__
)
def test_public_names_are_in_it(package):
    names = {name for quoted in QUOTED.findall(MAP) for name in re.findall(r"\w+", quoted)}
    assert set(package.__all__) <= names, f"{package.__name__}: {set(package.__all__) - names}"


def test_rooms_are_in_it():
    quoted = set(QUOTED.findall(MAP))
    assert not ROOMS.keys() - quoted - {"pallas_kernels"}, ROOMS.keys() - quoted


def test_arrows_of_contributing():
    """Where CONTRIBUTING.md says "a, b <- c", the test of the architecture lets c import a and b."""
    block = (ROOT / "CONTRIBUTING.md").read_text().split("from the leaves up:")[1].split("```")[1]
    for line in block.strip().splitlines():
        groups = [group.split(", ") for group in line.split(" <- ")]
        assert len(groups) > 1, line
        for below, above in pairwise(groups):
            wrong = [(name, other) for name in above for other in below if other not in ROOMS[name]]
            assert not wrong, f"{line}: {wrong}"
