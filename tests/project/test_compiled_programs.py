"""The folder of compiled programs: another run finds what is in it, and damage to it changes no result."""

import os
import subprocess
import sys
import types

import compiled_programs
import pytest

CHILD = """
import warnings
import compiled_programs, jax, numpy as np
x = np.arange(12.0, dtype=np.float32).reshape(3, 4)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    y = jax.jit(lambda x: x @ x.T + 1)(x)
np.testing.assert_array_equal(y, x @ x.T + 1)
print(compiled_programs.count.programs, compiled_programs.count.found, len(seen))
"""


def run(folder) -> tuple[int, int, int]:
    """Programs, programs found and warnings of a process that calls one program and checks what it returns."""
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(folder), "JAX_PLATFORMS": "cpu"}
    environment |= {"PYTHONPATH": os.path.dirname(compiled_programs.__file__)}
    done = subprocess.run([sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    programs, found, warned = map(int, done.stdout.split())
    return programs, found, warned


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A folder with the child's program, which it did not find there."""
    folder = tmp_path_factory.mktemp("compiled")
    assert run(folder) == (1, 0, 0)
    assert len(list(folder.glob("*-cache"))) == 1
    return folder


def test_another_process_finds_the_program(filled):
    assert run(filled) == (1, 1, 0)


@pytest.mark.parametrize("damage", ["half", "nothing", "a bit"])
def test_a_damaged_program_is_compiled_again(filled, tmp_path, damage):
    (entry,) = filled.glob("*-cache")
    whole = entry.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 16]) + whole[middle + 1 :]
    (tmp_path / entry.name).write_bytes({"half": whole[:middle], "nothing": b"", "a bit": flipped}[damage])
    assert run(tmp_path) == (1, 0, 1)


def test_the_folder_does_not_grow_for_ever(tmp_path):
    """The oldest programs go first, and what is no program stays."""
    for i in range(8):
        path = tmp_path / f"{i}-cache"
        path.write_bytes(bytes(100))
        os.utime(path, (i, i))
    (tmp_path / "note").write_bytes(bytes(1000))
    compiled_programs.discard_old(tmp_path, most=800)
    assert len(list(tmp_path.iterdir())) == 9
    compiled_programs.discard_old(tmp_path, most=799)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["5-cache", "6-cache", "7-cache", "note"]


def test_the_name_of_the_folder(monkeypatch, tmp_path):
    """Another processor or another jaxlib has another folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = compiled_programs.folder()
    assert here.is_relative_to(tmp_path)
    monkeypatch.setattr(compiled_programs, "_processor", lambda: "another")
    elsewhere = compiled_programs.folder()
    monkeypatch.setattr(compiled_programs.jaxlib, "__version__", "0.1")
    assert len({here, elsewhere, compiled_programs.folder()}) == 3


def test_tests_outside_the_gate_have_no_limit(request):
    """Nor the other tests of their file, in a run that has both."""

    def item(path, *markers):
        return types.SimpleNamespace(
            path=path, get_closest_marker=lambda name: name if name in markers else None
        )

    here, there = request.path, request.path.with_name("another.py")
    items = [item(here, "slow"), item(there, "crossed")]
    assert not compiled_programs.has_crossed(items, here)
    assert compiled_programs.has_crossed(items, there)
    assert not compiled_programs.has_crossed(request.session.items, here)
