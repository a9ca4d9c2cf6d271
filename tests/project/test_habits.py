"""The house rules of a file by itself: what it does not do, how long it is, what it calls a question."""

import ast
import os
import re
import subprocess
import sys

import pytest
from test_architecture import FILES, PACKAGES, ROOT, imports, module_name

import gdn_jax


def test_folders_hold_no_names():
    """Names come from the file that defines them: the __init__.py of a folder is its docstring, but for the six
    rooms whose names users import."""
    exporting = [
        ROOT / "gdn_jax",
        *(ROOT / "gdn_jax" / name for name in ("rules", "layers", "models", "hf", "serving")),
    ]
    for path in FILES:
        if path.name == "__init__.py" and path.parent not in exporting:
            assert all(isinstance(node, ast.Expr) for node in ast.parse(path.read_text()).body), path


def test_layers_and_models_know_no_kernel_of_a_token():
    """The copy for single tokens alone imports operations that have no derivative, or modules that have them."""
    operations = set()
    for path in FILES:
        found = re.findall(r"@token_op\ndef (\w+)|(\w+) = token_op\(", path.read_text())
        operations |= {f"{module_name(path)}.{a or b}" for a, b in found}
    assert {"gdn_jax.parts.delta_layer.delta_layer", "gdn_jax.parts.routing.routed_stream"} <= operations
    modules = {name.rpartition(".")[0] for name in operations}
    for path in FILES:
        package, *folders = path.relative_to(ROOT).parent.parts
        if package == "gdn_jax" and folders in (["layers"], ["models"]):
            names = {imported for imported, _, _ in imports(path)}
            assert not names & (operations | modules), path.relative_to(ROOT)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_habits(path):
    """No private part of JAX, no swallowed import, no global configuration, no hidden repair of values."""
    tree = ast.parse(path.read_text(), str(path))
    for imported, line, _ in imports(path):
        assert "._src" not in imported, f"{path.name}:{line}: jax._src is private"
    for node in ast.walk(tree):
        where = f"{path.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute):
            assert node.attr not in ("_src", "nan_to_num"), f"{where}: {node.attr}"
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            names = {getattr(n, "id", "") for n in ast.walk(node.type)}
            assert not names & {"ImportError", "ModuleNotFoundError"}, f"{where}: silent fallback"
    # Settings of a process are its user's; `gdn train` is the process, and this is its folder of compiled programs.
    changes = "jax.config.update" in path.read_text() and module_name(path) != "gdn_jax.training.compiled"
    assert not changes, f"{path.name} changes jax.config"


QUESTIONS = {
    "check_supported": "why a kernel refuses shapes and dtypes",
    "device_reason": "why the default device lacks what a kernel needs",
    "reason": "why an implementation, a pool, a peer refuses a call",
    "usable": "whether kernels run for a caller who lets them, with a warning where they were named",
    "takes": "whether the operation of a module, or an object, runs a call",
    "is_whole": "whether arrays lie on one device",
    "fits": "whether shared memory has room for a division of a kernel's work",
    "supported_implementations": "which implementations of the rule run a call",
    "can_be_served": "whether a layer runs over pools",
    "splits_tokens": "whether a layer runs where a mesh splits the tokens of rows",
}
"""The names of all functions that ask whether something can run, and what each asks. There are ten at most."""
ANSWERS = {"bool", "str | None", "dict[str, str | None]"}
ASKS_BY_NAME = re.compile(
    r"takes|usable|support|reason|refus|can_|has_kernel|kernels_run|is_whole|is_split|fits"
)
ASKS_IN_WORDS = re.compile(
    r"(Returns )?[Ww]hy\b.*\b(can|cannot|take|no kernel)\b"
    r"|.*[Ww]hether\b.*\b(takes?\b(?! less)|can run|kernels? (run|make)|one device|served|may (be )?split)\b"
)


def test_questions_have_names():
    """Who asks whether something can run asks it by one of a few names; an eleventh is a second name for one of them,
    or a question that the operation itself should answer."""
    found = set()
    for node in (node for path in FILES for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.FunctionDef) and node.returns and ast.unparse(node.returns) in ANSWERS:
            words = (ast.get_docstring(node) or "").partition("\n\n")[0].replace("\n", " ")
            if ASKS_BY_NAME.search(node.name) or ASKS_IN_WORDS.match(words):
                found.add(node.name.removeprefix("_"))
    assert found == QUESTIONS.keys() and len(found) <= 10, found ^ QUESTIONS.keys()


LONGEST_FILE, LONGEST_BODY = 450, 120
POOLS = ("ring.py",)
"""Files of calls for one kind of pools, which may ask whether arrays are of that kind."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sizes_and_speech(path):
    """A file has one job and a function fits a screen or two; a docstring's first sentence has a subject of its own;
    nobody outside the pools asks which kind of pool he holds."""
    text = path.read_text()
    assert text.count("\n") <= LONGEST_FILE, f"{path.name}: {text.count(chr(10))} lines"
    fragment = re.search(r'"""(Of|That|Those|As|What) .*', text)
    assert fragment is None, f"{path.name}: no sentence with a subject: {fragment.group(0)}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            body = [x for x in node.body if not isinstance(getattr(x, "value", None), ast.Constant)]
            lines = node.end_lineno - body[0].lineno + 1 if body else 0
            assert lines <= LONGEST_BODY, f"{path.name}: {node.name} has a body of {lines} lines"
    if path.name not in POOLS:
        assert not re.search(r"isinstance\([^)]*RingPool", text), f"{path.name} asks for the kind of a pool"


def test_leaf():
    assert not [m for m, *_ in imports(ROOT / "gdn_jax" / "shapes.py") if m.split(".")[0] in PACKAGES]


def test_sizes_of_tests_and_pages():
    """A file of tests has one subject, and so has a script of the results."""
    for path in (*(ROOT / "tests").rglob("*.py"), *(ROOT / "results").rglob("*.py")):
        assert path.read_text().count("\n") <= LONGEST_FILE, path.relative_to(ROOT)


def test_public_names():
    """gdn_jax/__init__.py re-exports, and nothing else; every public function is documented."""
    tree = ast.parse((ROOT / "gdn_jax" / "__init__.py").read_text())
    exported = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            exported += [alias.asname or alias.name for alias in node.names]
        else:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            names = isinstance(node, ast.Assign) and node.targets[0].id in ("__all__", "__version__")
            assert docstring or names, ast.unparse(node)
    assert sorted(exported) == sorted(gdn_jax.__all__)
    assert not [name for name in gdn_jax.__all__ if name.startswith("_")]
    assert not [name for name in gdn_jax.__all__ if not getattr(gdn_jax, name).__doc__]


def test_importing_asks_no_device_and_changes_no_configuration():
    """In a fresh process whose only platform does not exist: any look for a device would raise."""
    program = """
import jax
before = dict(jax.config.values)
import gdn_jax, pallas_kernels
after = dict(jax.config.values)
changed = {k for k in after if k in before and before[k] != after[k]}
assert not changed, changed
try:
    jax.devices()
except RuntimeError:
    print("imported")
"""
    environment = {**os.environ, "JAX_PLATFORMS": "no_such_platform"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout.strip() == "imported", done.stderr
