"""What is kept of the notebooks: small, in full colour, of the code as it is; prose and claims follow from it."""

import base64
import importlib
import io
import itertools
import json
import pathlib
import re
import socket

import nbformat
import numpy as np
import pytest
from notebook_cells import (
    alike,
    claims,
    code_cells,
    digest,
    printed,
    small_png,
    unfiltered_png,
    visible_text,
)

FOLDER = pathlib.Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
FAST, OTHER_SEEDS = "GDN_NOTEBOOK_FAST", FOLDER / "other_seeds.json"
MAX_BYTES = 640 * 1024
# A path from the root of a file system, but not the path of a URL, a closing tag or a fraction.
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/<)\]}*])/(?:[\w.+-]+/)+[\w.+-]*|\b[A-Z]:\\\\?\w+\\")


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


WITH_CLAIMS = [path for path in NOTEBOOKS if "import FAST" in path.read_text()]


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


@pytest.mark.parametrize(
    "path", [path for path in NOTEBOOKS if "other_seeds(" in path.read_text()], ids=lambda path: path.stem[:2]
)
def test_claims_with_other_seeds_are_those_that_are_kept(path, monkeypatch, capsys):
    """They are of the code as it is, every claim among them, and the notebook shows them."""
    monkeypatch.syspath_prepend(FOLDER)
    notebook, kept = nbformat.read(path, as_version=4), json.loads(OTHER_SEEDS.read_text())[path.stem]
    again = f"run python tests/project/test_notebooks.py --seeds {path.stem[:2]}, then without --seeds"
    assert kept["code"] == digest(notebook), f"its code has changed: {again}"
    patterns = [pattern for cell in code_cells(notebook) for pattern in claims(cell)]
    for said in kept["seeds"].values():
        assert len(said) == len(patterns)
        assert all(re.search(pattern, line) for pattern, line in zip(patterns, said, strict=True))
    [cell] = [cell for cell in code_cells(notebook) if "other_seeds(" in cell.source]
    name, words = re.findall(r'"([^"]+)"', cell.source)
    assert name == path.stem
    importlib.import_module("course").other_seeds(name, words)
    assert capsys.readouterr().out == printed(cell), again


def test_a_claim_that_does_not_hold(monkeypatch, capsys):
    """It ends the run that is kept, and is told of a model with another seed."""
    monkeypatch.syspath_prepend(FOLDER)
    course = importlib.import_module("course")
    with pytest.raises(AssertionError, match="x is 3"):
        course.claim("x is 3", np.bool_(False))
    monkeypatch.setattr(course, "SEED", 1)
    course.claim("x is 3", np.bool_(False))
    course.claim("x is 4", np.bool_(True))
    assert capsys.readouterr().out.splitlines()[1:] == [f"{course.FAILED}x is 3", "x is 4"]


def test_a_claim_that_was_not_printed_is_found():
    new = nbformat.v4
    source = 'def claim(text, holds): ...\nclaim(f"{x:.1f} of", x > 3)\nif x:\n    claim("so (it) is", x)'
    cell = new.new_code_cell(source, outputs=[new.new_output("stream", text="3.5 of\nso (it) is\n")])
    assert len(claims(cell)) == 2
    assert re.search(".*?".join(claims(cell)), printed(cell), re.DOTALL)
    cell.outputs[0].text = "3.5 of\n"
    assert not re.search(".*?".join(claims(cell)), printed(cell), re.DOTALL)
    assert digest(new.new_notebook(cells=[cell])) != digest(new.new_notebook(cells=[]))
