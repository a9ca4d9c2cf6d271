"""What users install and read first: the wheel, the citation, the README."""

import re
import subprocess
import sys
import tomllib

import pytest
from release import package

import gdn_jax
from gdn_jax.commands import cli

ROOT = package.ROOT
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()
SHELL = "\n".join(re.findall(r"(?ms)^```sh\n(.*?)^```$", README))
"""The README's commands."""
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = package.copy_tracked(
        folder / "source",
        *package.PACKAGES,
        package.MODULE,
        "pyproject.toml",
        "setup.py",
        "README.md",
        "LICENSE",
    )
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)], cwd=source, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return package.contents(folder / done.stdout.split()[-1])


def test_the_wheel_holds_the_tracked_code_and_nothing_else(wheel):
    files, _, beside = wheel
    assert files == package.expected()
    assert {"gdn_jax/py.typed", "pallas_kernels/py.typed", "gdn_command.py"} <= files
    assert {"METADATA", "entry_points.txt", "licenses/LICENSE"} <= beside


def test_the_description_reaches_nothing_that_only_the_repository_has(wheel):
    page = package.description(wheel[1])
    assert package.paths_in(README) and not package.paths_in(page)
    assert re.findall(r"https?://[^)\s]+", page) == re.findall(r"https?://[^)\s]+", README)
    assert page.count("```") == README.count("```") and "docs/map.md" in page
    assert wheel[1]["Description-Content-Type"] == "text/markdown"


def test_pip_says_that_python_is_too_old():
    """Of a requirement without the marker, an old pip says instead that no version of it fits."""
    extras = PROJECT["optional-dependencies"]
    needed = [*PROJECT["dependencies"], *extras["experiments"], *extras["cuda"]]
    python = PROJECT["requires-python"].removeprefix(">=")
    assert all(each.endswith(f"; python_version >= '{python}'") for each in needed)


def test_the_citation_is_of_this_version():
    version = re.findall(r"(?m)^version: (\S+)$", (ROOT / "CITATION.cff").read_text())
    assert version == [gdn_jax.__version__]
    assert f"\n## {gdn_jax.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_readme_is_short_and_names_what_there_is():
    assert len(README.splitlines()) <= 140
    targets = set(re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text()))
    assert (made := set(re.findall(r"\bmake ([a-z][\w-]*)", SHELL))) and made <= targets
    extras = {extra for found in re.findall(r"\[([\w,]+)\]'", SHELL) for extra in found.split(",")}
    assert extras and extras <= PROJECT["optional-dependencies"].keys()
    commands = set(re.findall(r"(?:^|`)gdn ([a-z]+)", README, re.MULTILINE))
    assert commands == cli._COMMANDS.keys()


def test_the_first_hour_names_commands_that_are_there():
    """`make release` runs the page's lines."""
    install, *blocks = re.findall(r"(?ms)^```sh\n(.*?)^```$", (ROOT / "docs" / "first_hour.md").read_text())
    assert f"gdn_jax-{gdn_jax.__version__}-py3-none-any.whl[experiments]" in install
    commands = set(re.findall(r"(?m)^gdn (?!--)([a-z]+)", "".join(blocks)))
    assert {"train", "generate"} <= commands <= cli._COMMANDS.keys()


@pytest.mark.parametrize("path", [*ROOT.glob("*.md"), *ROOT.glob("*/*.md")], ids=lambda path: path.name)
def test_links_of_pages_lead_somewhere(path):
    broken = [
        to for to in package.paths_in(path.read_text()) if not (path.parent / to.split("#")[0]).exists()
    ]
    assert not broken
