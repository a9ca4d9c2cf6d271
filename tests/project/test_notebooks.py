"""Every notebook runs from top to bottom without a warning, and what is committed is what it shows.

`python tests/project/test_notebooks.py [NAME ...]` runs the named notebooks (all by default) at full length and keeps
their outputs; the tests run them with GDN_NOTEBOOK_FAST=1, which shortens training, and compile less. The quick
tests run the first half of the first one.
"""

import base64
import contextlib
import copy
import importlib
import io
import itertools
import os
import pathlib
import re
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from queue import Empty

import nbformat
import numpy as np
import pytest
from jupyter_client import KernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))  # run by itself, too
import compiled_programs
from notebook_cells import (
    alike,
    claims,
    code_cells,
    digest,
    kinds,
    printed,
    small_png,
    tidy,
    unfiltered_png,
    visible_text,
)

FOLDER = pathlib.Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
FAST = "GDN_NOTEBOOK_FAST"
CELL_SECONDS = 300  # of a cell that hangs
LOOK_AGAIN_SECONDS = 1
MAX_BYTES = 640 * 1024
# A path from the root of a file system, but not the path of a URL, a closing tag or a fraction.
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/<)\]}*])/(?:[\w.+-]+/)+[\w.+-]*|\b[A-Z]:\\\\?\w+\\")


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
def kernel(fast: bool) -> Iterator[KernelManager]:
    """A process for notebooks, which inherits no settings of this one."""
    with tempfile.TemporaryDirectory() as home:
        environment = {name: os.environ[name] for name in ("PATH", "LANG", "TZ") if name in os.environ}
        environment |= {name: home for name in ("HOME", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "MPLCONFIGDIR")}
        environment |= {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment |= compiled_programs.environment()
        environment |= {"PYTHONPATH": str(FOLDER.parent)}  # this project, whichever is installed
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


def test_every_notebook_is_listed():
    listed = re.findall(r"\]\((\w+\.ipynb)\)", (FOLDER / "README.md").read_text())
    assert listed == [path.name for path in NOTEBOOKS] != []
    assert "](notebooks/README.md)" in (FOLDER.parent / "README.md").read_text()


# In prose: a percentage or a decimal, but not the number of a preprint.
PROSE_NUMBER = re.compile(r"(?<![\w.])(\d+(?:\.\d+)? ?%|(?!\d{4}\.\d{4})\d+\.\d+)(?!\w)")
ANY_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?")
NOT_PROSE = re.compile(r"\$\$.*?\$\$|\$[^$]*\$|`[^`]*`|\]\([^)]*\)", re.DOTALL)


def unsaid_numbers(notebook) -> list[str]:
    """Percentages and decimals of the prose that no code of their section has or prints, as a number or a share."""
    sections, unsaid = [[]], []
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and cell.source.startswith("## "):
            sections.append([])
        sections[-1].append(cell)
    for section in sections:
        code = [cell.source + printed(cell) for cell in section if cell.cell_type == "code"]
        known = {float(x.replace(",", "")) for text in code for x in ANY_NUMBER.findall(text)}
        for cell in section:
            prose = NOT_PROSE.sub(" ", cell.source) if cell.cell_type == "markdown" else ""
            for said in PROSE_NUMBER.findall(prose):
                digits = said.rstrip(" %")
                step, factors = 10.0 ** -len(digits.partition(".")[2]), (1, 100) if "%" in said else (1,)
                close = (abs(factor * x - float(digits)) < 0.6 * step for x in known for factor in factors)
                if not any(close):
                    unsaid.append(f"{said} in {cell.source[:60]!r}")
    return unsaid


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem[:2])
def test_numbers_of_prose_are_computed(path):
    assert not unsaid_numbers(nbformat.read(path, 4))


def test_numbers_of_prose_that_nothing_computes_are_found():
    new = nbformat.v4
    code = new.new_code_cell(
        "print(f'{0.7071:.3f}')", outputs=[new.new_output("stream", text="0.707, 512\n")]
    )
    for text, wrong in (
        ("of 71 %, or 0.71", 0),
        ("of 70 %", 1),
        ("is 0.72", 1),
        ("$x = 0.9$, `0.9`, 2412.06464", 0),
    ):
        cells = [new.new_markdown_cell("## 1\n" + text), code, new.new_markdown_cell("## 2\n" + text)]
        assert len(unsaid_numbers(new.new_notebook(cells=cells[:2]))) == wrong
    assert len(unsaid_numbers(new.new_notebook(cells=cells))) == 0


@pytest.mark.parametrize(
    "text, is_path",
    [
        ("saved to /home/someone/x.png", True),
        ('File "/usr/lib/python3/site.py"', True),
        (r"C:\Users\someone", True),
        ("see https://arxiv.org/abs/2412.06464", False),
        ("gdn_jax/rule/chunked.py, Q/K and 1/2", False),
        ("<td>a</td>/<br/>", False),
    ],
)
def test_absolute_paths_are_recognised(text, is_path):
    assert bool(ABSOLUTE_PATH.search(text)) == is_path


def exercises_of(notebook) -> dict[str, str]:
    """The solution of every exercise, by its name: the code that unfolds in the cell behind it."""
    found = {}
    for cell, after in itertools.pairwise(notebook.cells):
        for name in re.findall(r'exercises\.check\("([^"]+)", \w+\)', cell.source):
            folded = re.match(
                r"<details><summary>Solution</summary>\n(.*?)</details>", after.source, re.DOTALL
            )
            [found[name]] = re.findall(r"```python\n(.*?)```", folded[1], re.DOTALL)
    return found


def test_solutions_of_exercises(monkeypatch):
    """They are right, nothing is taken for an answer that is another one, and a student begins without one."""
    monkeypatch.syspath_prepend(FOLDER)
    exercises = importlib.import_module("exercises")
    solutions = {}
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        said = "".join(printed(cell) for cell in code_cells(notebook))
        for name, solution in exercises_of(notebook).items():
            assert f"{name}: no answer yet" in said
            solutions[name] = solution
        if path.stem[:2] <= "06":
            assert exercises_of(notebook), f"{path.name} has no exercise"
    assert solutions.keys() == exercises.EXERCISES.keys()
    for name, solution in solutions.items():
        scope = {"np": np}
        exec(solution, scope)
        [answer] = (x for key, x in scope.items() if key not in ("np", "__builtins__"))
        assert exercises.judge(name, answer) == "right", name

        def nearly(*arguments, answer=answer):
            wrong = np.array(answer(*arguments), float)
            wrong.flat[-1] = np.nan if np.isinf(wrong.flat[-1]) else 1.001 * wrong.flat[-1] + 0.001
            return wrong

        assert exercises.judge(name, nearly).startswith("not yet"), name
        assert exercises.judge(name, lambda *_: np.zeros((2, 3, 4))).startswith("not yet"), name
        assert exercises.judge(name, lambda *_: None) == "no answer yet"


def test_a_warning_and_an_error_do_not_pass(process):
    """What the other tests rely on: a warning is a stderr output, an exception ends the run."""
    new = nbformat.v4
    warns = new.new_notebook(cells=[new.new_code_cell("import warnings; warnings.warn('careful')")])
    [cell] = code_cells(run(warns, process))
    assert [output.get("name") for output in cell.outputs] == ["stderr"]
    raises = new.new_notebook(cells=[new.new_code_cell("assert 1 + 1 == 3")])
    with pytest.raises(CellExecutionError, match="AssertionError"):
        run(raises, process)


def pictures(notebook) -> list[bytes]:
    """The PNG files that are kept."""
    data = [output.get("data", {}) for cell in code_cells(notebook) for output in cell.outputs]
    return [base64.b64decode(x["image/png"]) for x in data if "image/png" in x]


def test_a_kept_picture_has_every_colour_of_the_drawn_one():
    """A colour bar and scattered points: more colours than a palette has room for, in both kinds of files."""
    from PIL import Image

    x, y = np.meshgrid(np.arange(96), np.arange(64))
    bar = np.stack([2 * x, 255 - 2 * y, x + y], -1).astype(np.uint8)
    points = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    lines = np.where((x + 7 * y)[..., None] % 31 == 0, bar, 255).astype(np.uint8)
    for drawn in (bar, points, lines):
        opaque = np.pad(drawn, ((0, 0), (0, 0), (0, 1)), constant_values=255)
        out = io.BytesIO()
        Image.fromarray(opaque).save(out, "PNG")
        kept = base64.b64decode(small_png(base64.b64encode(out.getvalue()).decode()))
        assert len(kept) <= len(unfiltered_png(drawn))
        for file in (kept, unfiltered_png(drawn)):
            picture = Image.open(io.BytesIO(file))
            assert picture.mode == "RGB" and np.array_equal(picture, drawn)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed(path):
    """Small, in full colour, valid, run once from top to bottom, with nothing of the machine it ran on."""
    assert path.stat().st_size < MAX_BYTES, f"{path.stat().st_size} bytes, allowed {MAX_BYTES}"
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    kinds = [file[25] for file in pictures(notebook)]  # of the pixels: 2 is RGB, 3 a palette
    assert kinds and set(kinds) == {2}, (
        "a picture has not all of its colours: run python tests/project/test_notebooks.py"
    )
    text = visible_text(notebook)
    assert FAST in "".join(cell.source for cell in notebook.cells[:2]), f"does not say what {FAST} does"
    assert not (found := ABSOLUTE_PATH.search(text)), f"absolute path {found.group()!r}"
    host = socket.gethostname()
    assert host == "localhost" or not re.search(rf"\b{re.escape(host)}\b", text), "name of this machine"


@pytest.mark.parametrize(
    "committed, fresh, same",
    [
        ("off by 1.1e-16", "off by 9.0e-16", True),
        ("off by 0.0e+00", "off by 2.2e-16", True),
        ("off by 2.2e-16", "off by 0.0e+00", True),
        ("off by 1.1e-16", "off by 3.1e-14", False),
        ("o 1.3e-07 1.7e-03", "o 3.0e-07 1.6e-03", True),
        ("o 1.3e-07 1.7e-03", "o 3.0e-07 3.6e-03", False),
        ("series 3e+11", "series 2e+11", True),
        ("delta 0.77 of 1,024.0", "delta 0.78 of 1,030.1", True),
        ("delta 0.77", "delta 0.80", False),
        ("99.8% of 64", "99.9%  of 64", True),
        ("99.8% of 64", "99.8% of 63", False),
        ("state -1", "state 1", False),
        ("no race", "race", False),
        ("0.1 0.2", "0.1", False),
    ],
)
def test_what_counts_as_the_same_output(committed, fresh, same):
    assert alike(committed, fresh) == same


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


WITH_CLAIMS = [path for path in NOTEBOOKS if '"def claim(' in path.read_text()]


@pytest.mark.parametrize("path", WITH_CLAIMS, ids=lambda path: path.stem[:2])
def test_claims_held_in_the_run_that_is_kept(path):
    """The kept outputs are of a full run of the code as it is. Such a run insists on every claim, and prints it."""
    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata.get("full_run") == digest(notebook), (
        f"its code has changed: run python tests/project/test_notebooks.py {path.stem[:2]}"
    )
    count = 0
    for cell in code_cells(notebook):
        patterns = claims(cell)
        assert re.search(".*?".join(patterns), printed(cell), re.DOTALL), cell.source
        count += len(patterns)
    assert count > 2


def test_a_claim_that_was_not_printed_is_found():
    new = nbformat.v4
    source = 'def claim(text, holds): ...\nclaim(f"{x:.1f} of", x > 3)\nif x:\n    claim("so (it) is", x)'
    cell = new.new_code_cell(source, outputs=[new.new_output("stream", text="3.5 of\nso (it) is\n")])
    assert len(claims(cell)) == 2
    assert re.search(".*?".join(claims(cell)), printed(cell), re.DOTALL)
    cell.outputs[0].text = "3.5 of\n"
    assert not re.search(".*?".join(claims(cell)), printed(cell), re.DOTALL)
    assert digest(new.new_notebook(cells=[cell])) != digest(new.new_notebook(cells=[]))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, process):
    check(path, 1, process)


if __name__ == "__main__":
    for path in NOTEBOOKS:
        if len(sys.argv) == 1 or path.stem in sys.argv[1:] or path.stem[:2] in sys.argv[1:]:
            with kernel(fast=False) as alone:
                executed = tidy(run(nbformat.read(path, as_version=4), alone))
            temporary = path.with_suffix(".tmp")
            nbformat.write(executed, temporary)
            os.replace(temporary, path)
            print(path.name, path.stat().st_size // 1024, "KiB")
