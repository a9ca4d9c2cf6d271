"""Every notebook runs from top to bottom without a warning, and shows what is committed.

`python tests/project/test_notebooks.py [NAME ...]` runs the named notebooks (all by default) at full length and keeps
their outputs; with --seeds it runs them with other seeds and keeps what their claims print, which has to come first,
because a notebook shows it. The tests run them with GDN_NOTEBOOK_FAST=1, which shortens training, and compile less.
The quick tests run the first half of the first one.
"""

import contextlib
import copy
import json
import os
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from queue import Empty

import nbformat
import pytest
from jupyter_client import KernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))  # run by itself, too
import compiled_programs
from notebook_cells import alike, claims, code_cells, digest, kinds, printed, tidy

FOLDER = pathlib.Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
FAST, SEED = "GDN_NOTEBOOK_FAST", "GDN_NOTEBOOK_SEED"
OTHER_SEEDS = FOLDER / "other_seeds.json"
CELL_SECONDS = 300  # of a cell that hangs
LOOK_AGAIN_SECONDS = 1


def look_again(channel) -> None:
    """Makes a channel look for messages every second.

    Now and then a message that is there already is not noticed by a wait that is under way (nbclient 0.11, ipykernel
    7.4, pyzmq 27.3), and a cell that has ended would go on until its time is over.
    """
    get_msg = channel.get_msg

    async def get(timeout: float | None = None):
        end = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            try:
                return await get_msg(timeout=LOOK_AGAIN_SECONDS)
            except Empty:
                if time.monotonic() > end:
                    raise

    channel.get_msg = get


@contextlib.contextmanager
def kernel(fast: bool, seed: int = 0) -> Iterator[KernelManager]:
    """A process for notebooks, which inherits no settings of this one."""
    with tempfile.TemporaryDirectory() as home:
        environment = {name: os.environ[name] for name in ("PATH", "LANG", "TZ") if name in os.environ}
        environment |= {name: home for name in ("HOME", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "MPLCONFIGDIR")}
        environment |= {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment |= compiled_programs.environment()
        environment |= {"PYTHONPATH": str(FOLDER.parent)}  # this project, whichever is installed
        environment |= {SEED: str(seed)}
        if fast:
            environment |= {FAST: "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # see conftest.py
        waits = "jupyter_client.asynchronous.AsyncKernelClient"  # as nbclient's own does
        manager = KernelManager(kernel_name="python3", client_class=waits)
        manager.start_kernel(env=environment, cwd=str(FOLDER))
        try:
            yield manager
        finally:
            manager.shutdown_kernel(now=True)


AFRESH = """
import builtins, jax
from matplotlib import pyplot
builtins.first_settings = getattr(builtins, "first_settings", dict(jax.config.values))
for name, value in first_settings.items():
    if jax.config.values[name] != value:
        jax.config.update(name, value)
pyplot.close("all")
pyplot.rcdefaults()
get_ipython().run_line_magic("reset", "-f")
__import__("gc").collect()
__import__("gc").freeze()
"""
"""Leaves to a notebook no name, figure or setting of those before it in the same process. What outlives the
collection belongs to the libraries: later ones need not look at it again."""


def run(notebook: nbformat.NotebookNode, process: KernelManager) -> nbformat.NotebookNode:
    """A copy of the notebook, executed from an empty namespace."""
    notebook = copy.deepcopy(notebook)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(AFRESH))
    client = NotebookClient(
        notebook, km=process, timeout=CELL_SECONDS, coalesce_streams=True, record_timing=False
    )

    def on_cell_start(cell_index, **_):
        if cell_index == 0:
            look_again(client.kc.shell_channel)
            look_again(client.kc.iopub_channel)

    client.on_cell_start = on_cell_start
    try:
        client.execute()
    finally:
        client.kc.stop_channels()
    del notebook.cells[0]
    return notebook


@pytest.fixture(scope="module")
def process():
    """One for all notebooks of the tests: it imports once, and what the library compiles for one serves the next."""
    with kernel(fast=True) as manager:
        yield manager


def test_a_warning_and_an_error_do_not_pass(process):
    """What the other tests rely on: a warning is a stderr output, an exception ends the run."""
    new = nbformat.v4
    warns = new.new_notebook(cells=[new.new_code_cell("import warnings; warnings.warn('careful')")])
    [cell] = code_cells(run(warns, process))
    assert [output.get("name") for output in cell.outputs] == ["stderr"]
    raises = new.new_notebook(cells=[new.new_code_cell("assert 1 + 1 == 3")])
    with pytest.raises(CellExecutionError, match="AssertionError"):
        run(raises, process)


# What they print hangs on the clock, or on how long a model was trained.
VARIES = (
    "03_gating_explorer",
    "04_recall_being_learned",
    "05_gates_of_a_language_model",
    "06_inside_a_hybrid",
    "09_cost",
    "13_where_memory_stops",
)


def check(path: pathlib.Path, part: float, process: KernelManager) -> None:
    """Runs the first part of a notebook: no exception, nothing on stderr, and in every cell what is committed."""
    committed = nbformat.read(path, as_version=4)
    committed.cells = committed.cells[: round(part * len(committed.cells))]
    fresh = run(committed, process)
    for i, (before, after) in enumerate(zip(code_cells(committed), code_cells(fresh), strict=True)):
        where = f"{path.name}, code cell {i + 1}:\n{after.source}\n"
        for output in after.outputs:
            assert output.get("name") != "stderr", where + output.text
        assert kinds(before) == kinds(after), where + "shows something else than what is committed"
        if path.stem not in VARIES:
            old, new = printed(before), printed(after)
            assert alike(old, new), f"{where}prints\n{new}instead of\n{old}"


def test_first_half_runs(process):
    """Of one notebook, quickly; whole ones are slow."""
    check(NOTEBOOKS[0], 0.5, process)


def test_a_notebook_begins_afresh(process):
    """No name, setting or figure of the one before is left."""
    imports = "import jax\nfrom matplotlib import pyplot as plt\n"
    spoil = "left = 1; jax.config.update('jax_enable_x64', True); plt.figure(); plt.rcParams['lines.linewidth'] = 7"
    find = "print('left' in globals(), jax.config.jax_enable_x64, plt.get_fignums(), plt.rcParams['lines.linewidth'])"
    before, after = (nbformat.v4.new_code_cell(imports + code) for code in (spoil, find))
    run(nbformat.v4.new_notebook(cells=[before]), process)
    [cell] = code_cells(run(nbformat.v4.new_notebook(cells=[after]), process))
    assert printed(cell) == "False False [] 1.5\n"


def of_seeds(path: pathlib.Path) -> dict:
    """What the claims of a notebook print with other seeds, with `course.FAILED` before those that do not hold."""
    notebook, said = nbformat.read(path, as_version=4), {}
    for seed in (1, 2):
        with kernel(fast=False, seed=seed) as alone:
            cells = code_cells(run(notebook, alone))
        said[str(seed)] = [
            line
            for cell in cells
            for line in printed(cell).splitlines()
            if any(re.fullmatch(f"(does not hold: )?{pattern}", line) for pattern in claims(cell))
        ]
    return {"code": digest(notebook), "seeds": said}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, process):
    check(path, 1, process)


def keep(path: pathlib.Path, text: str) -> None:
    """Puts a file in the place of the one that is there."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


if __name__ == "__main__":
    names = [x for x in sys.argv[1:] if x != "--seeds"]
    for path in NOTEBOOKS:
        if names and not {path.stem, path.stem[:2]} & {*names}:
            continue
        if "--seeds" in sys.argv:
            kept = json.loads(OTHER_SEEDS.read_text()) | {path.stem: of_seeds(path)}
            keep(OTHER_SEEDS, json.dumps(kept, indent=2, ensure_ascii=False) + "\n")
            print(
                path.name,
                *(f"seed {seed}: {len(said)} claims" for seed, said in kept[path.stem]["seeds"].items()),
            )
            continue
        begin = time.monotonic()
        with kernel(fast=False) as alone:
            executed = tidy(run(nbformat.read(path, as_version=4), alone))
        keep(path, nbformat.writes(executed) + "\n")
        print(path.name, path.stat().st_size // 1024, "KiB", f"{time.monotonic() - begin:.0f} s")
