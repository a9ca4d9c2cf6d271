"""Every notebook runs from top to bottom without a warning, and what is committed is what it shows.

`python tests/test_notebooks.py [NAME ...]` runs the named notebooks (all of them by default) at full length and keeps
their outputs; the tests run them with GDN_NOTEBOOK_FAST=1, which shortens training, and compile less.
"""

import base64
import copy
import io
import os
import pathlib
import re
import socket
import sys
import tempfile

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

FOLDER = pathlib.Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
FAST = "GDN_NOTEBOOK_FAST"
# A cell that hangs ends the run. Now and then the reply of a cell that has ended is not noticed before this time is
# over (nbclient 0.11, ipykernel 7.4, pyzmq 27.3); the run goes on then, so the time is short where cells are.
CELL_SECONDS, FAST_CELL_SECONDS = 300, 100
MAX_BYTES = 300 * 1024
# Live widgets need a kernel. A line of text takes their place in what is kept.
WIDGET = "application/vnd.jupyter.widget-view+json"
# A path from the root of a file system, but not the path of a URL, a closing tag or a fraction.
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/<)\]}*])/(?:[\w.+-]+/)+[\w.+-]*|\b[A-Z]:\\\\?\w+\\")


def run(notebook: nbformat.NotebookNode, fast: bool) -> nbformat.NotebookNode:
    """A copy of the notebook, executed in a kernel of its own that inherits no settings of this process."""
    notebook = copy.deepcopy(notebook)
    with tempfile.TemporaryDirectory() as home:
        environment = {name: os.environ[name] for name in ("PATH", "LANG", "TZ") if name in os.environ}
        environment |= {name: home for name in ("HOME", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "MPLCONFIGDIR")}
        environment |= {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        if fast:
            environment |= {FAST: "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # see conftest.py
        client = NotebookClient(
            notebook,
            timeout=FAST_CELL_SECONDS if fast else CELL_SECONDS,
            kernel_name="python3",
            resources={"metadata": {"path": str(FOLDER)}},
            coalesce_streams=True,
            record_timing=False,
        )
        client.execute(env=environment)
    return notebook


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def small_png(encoded: str) -> str:
    """The same picture with a palette of 256 colours, a third of the size."""
    from PIL import Image

    picture = Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGB")
    out = io.BytesIO()
    picture.quantize(256, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return base64.b64encode(out.getvalue()).decode()


def tidy(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """An executed notebook, small, without what differs from machine to machine or needs a live kernel."""
    notebook.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    }
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i:02d}"
        cell.metadata = {}
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if WIDGET in data:
                output.data = {"text/plain": "Run this notebook to use what belongs here."}
            if "image/png" in data:
                data["image/png"] = small_png(data["image/png"])
    return notebook


def kinds(cell) -> list[tuple]:
    """What a cell shows: the stream or the types of data of each output."""
    return [
        (output.output_type, output.get("name"), *sorted(set(output.get("data", {})) - {WIDGET}))
        for output in cell.outputs
    ]


def visible_text(notebook) -> str:
    """Sources and textual outputs, without images."""
    parts = [cell.source for cell in notebook.cells]
    for cell in code_cells(notebook):
        for output in cell.outputs:
            parts.append(output.get("text", ""))
            parts += [str(data) for kind, data in output.get("data", {}).items() if kind != "image/png"]
    return "\n".join(parts)


def test_every_notebook_is_listed():
    listed = re.findall(r"\]\((\w+\.ipynb)\)", (FOLDER / "README.md").read_text())
    assert listed == [path.name for path in NOTEBOOKS] != []
    in_one_click = re.findall(r"\]\(notebooks/(\w+\.ipynb)\)", (FOLDER.parent / "README.md").read_text())
    assert in_one_click == listed


@pytest.mark.parametrize(
    "text, is_path",
    [
        ("saved to /home/someone/x.png", True),
        ('File "/usr/lib/python3/site.py"', True),
        (r"C:\Users\someone", True),
        ("see https://arxiv.org/abs/2412.06464", False),
        ("gdn_jax/chunked.py, Q/K and 1/2", False),
        ("<td>a</td>/<br/>", False),
    ],
)
def test_absolute_paths_are_recognised(text, is_path):
    assert bool(ABSOLUTE_PATH.search(text)) == is_path


def test_a_warning_and_an_error_do_not_pass():
    """What the other tests rely on: a warning is a stderr output, an exception ends the run."""
    new = nbformat.v4
    warns = new.new_notebook(cells=[new.new_code_cell("import warnings; warnings.warn('careful')")])
    [cell] = code_cells(run(warns, fast=True))
    assert [output.get("name") for output in cell.outputs] == ["stderr"]
    raises = new.new_notebook(cells=[new.new_code_cell("assert 1 + 1 == 3")])
    with pytest.raises(CellExecutionError, match="AssertionError"):
        run(raises, fast=True)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed(path):
    """Small, valid, run once from top to bottom, with nothing of the machine it ran on."""
    assert path.stat().st_size < MAX_BYTES, f"{path.stat().st_size} bytes, allowed {MAX_BYTES}"
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)
    text = visible_text(notebook)
    assert FAST in "".join(cell.source for cell in notebook.cells[:2]), f"does not say what {FAST} does"
    assert not (found := ABSOLUTE_PATH.search(text)), f"absolute path {found.group()!r}"
    host = socket.gethostname()
    assert host == "localhost" or not re.search(rf"\b{re.escape(host)}\b", text), "name of this machine"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path):
    """No exception, nothing on stderr, and the same kinds of output in every cell as are committed."""
    committed = nbformat.read(path, as_version=4)
    fresh = run(committed, fast=True)
    for i, (before, after) in enumerate(zip(code_cells(committed), code_cells(fresh), strict=True)):
        where = f"{path.name}, code cell {i + 1}:\n{after.source}\n"
        for output in after.outputs:
            assert output.get("name") != "stderr", where + output.text
        assert kinds(before) == kinds(after), where + "shows something else than what is committed"


if __name__ == "__main__":
    for path in NOTEBOOKS:
        if len(sys.argv) == 1 or path.stem in sys.argv[1:] or path.stem[:2] in sys.argv[1:]:
            executed = tidy(run(nbformat.read(path, as_version=4), fast=False))
            temporary = path.with_suffix(".tmp")
            nbformat.write(executed, temporary)
            os.replace(temporary, path)
            print(path.name, path.stat().st_size // 1024, "KiB")
