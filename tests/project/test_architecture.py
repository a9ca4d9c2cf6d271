"""The house rules that a program can check: who imports whom, and what an import does."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest
from faults.faults import FAULTS

import gdn_jax

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ("gdn_jax", "pallas_kernels")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

KERNEL_PARTS = ("pallas_kernels.device", "pallas_kernels.work", "pallas_kernels.chunks")
KERNELS = (
    "pallas_kernels.forward",
    "pallas_kernels.backward",
    "pallas_kernels.layer",
    "pallas_kernels.decode",
    "pallas_kernels.token",
    "pallas_kernels.ampere",
)
# Each room, a file or a folder, with the rooms that it may import, and the rooms in these, from the leaves up. Names
# are inside gdn_jax, and "gdn_jax" itself stands for the public names.
ROOMS: dict[str, set[str]] = {
    "shapes": set(),
    "styles": set(),
    "gates": {"shapes"},
    "rule.packing": {"shapes"},
    "rule.segments": {"shapes"},
    "partitioning": {"shapes"},
    "parts.conv": {"shapes", "partitioning"},
    "parts.attention": set(),
    "rule.chunks": {"shapes", "rule.packing"},
    "pallas_kernels": set(),
    "pallas_kernels.device": set(),
    "pallas_kernels.work": {"shapes", "pallas_kernels.device"},
    "pallas_kernels.chunks": {"pallas_kernels.device", "pallas_kernels.work"},
    "pallas_kernels.forward": {"shapes", *KERNEL_PARTS},
    "pallas_kernels.backward": {"shapes", *KERNEL_PARTS},
    "pallas_kernels.ampere": {"shapes", *KERNEL_PARTS, "pallas_kernels.backward"},
    "pallas_kernels.layer": {"shapes", "pallas_kernels.device"},
    "pallas_kernels.decode": {"pallas_kernels.device", "pallas_kernels.work"},
    "pallas_kernels.token": {
        "shapes",
        "pallas_kernels.device",
        "pallas_kernels.work",
        "pallas_kernels.decode",
        "pallas_kernels.layer",
    },
    "pallas_kernels.tools": {"shapes", *KERNEL_PARTS, *KERNELS},
    "parts.products": {"shapes", "partitioning", "pallas_kernels.device", "pallas_kernels.layer"},
    "rule": set(),
    "rule.call": {"shapes", "partitioning"},
    "rule.definition": {"shapes"},
    "rule.chunked": {"shapes", "rule.chunks"},
    "rule.products": {"rule.chunks"},
    "rule.channels": {"rule.packing", "rule.chunks", "rule.products"},
    "rule.plain": {
        "shapes",
        "gates",
        "rule.segments",
        "rule.call",
        "rule.definition",
        "rule.chunked",
        "rule.channels",
    },
    "rule.state_passing": {"rule.call", "rule.plain"},
    "rule.kernels": {
        "shapes",
        "gates",
        "rule.chunks",
        "rule.call",
        "rule.state_passing",
        "pallas_kernels.device",
        "pallas_kernels.work",
        *KERNELS,
    },
    "rule.seam": {
        "shapes",
        "gates",
        "partitioning",
        "rule.call",
        "rule.plain",
        "rule.kernels",
        "pallas_kernels.forward",
        "pallas_kernels.backward",
    },
    "rule.implementations": {
        "shapes",
        "partitioning",
        "rule.call",
        "rule.state_passing",
        "rule.plain",
        "rule.kernels",
        "rule.seam",
    },
    "rule.arguments": {"shapes", "partitioning", "rule.call"},
    "rule.ops": {
        "shapes",
        "partitioning",
        "rule.call",
        "rule.plain",
        "rule.implementations",
        "rule.arguments",
    },
    "rule.product": {"shapes", "rule.arguments", "rule.ops"},
    "parts": {
        "shapes",
        "parts.products",
        "parts.attention",
        "gates",
        "partitioning",
        "parts.conv",
        "rule.definition",
        "pallas_kernels.device",
        "pallas_kernels.layer",
        "pallas_kernels.decode",
        "pallas_kernels.token",
    },
    "losses": {"shapes", "partitioning", "parts", "pallas_kernels.layer"},
    "parallel": {
        "shapes",
        "parts.products",
        "gates",
        "losses",
        "partitioning",
        "parts.conv",
        "parts",
        "rule.call",
        "rule.state_passing",
        "rule.implementations",
        "rule.arguments",
        "rule.ops",
        "rule.product",
        *KERNELS,
    },
    "gdn_jax": {"gates", "parts.conv", "rule.chunks", "rule.arguments", "rule.ops", "rule.product"},
    "serving": {
        "shapes",
        "gates",
        "rule.packing",
        "partitioning",
        "parts.conv",
        "rule.call",
        "rule.definition",
        "rule.arguments",
        "rule.ops",
        "pallas_kernels.device",
        "pallas_kernels.work",
        "pallas_kernels.forward",
        "pallas_kernels.decode",
    },
    "adapters": {"shapes", "gdn_jax", "parallel", "serving"},
    "layers.blocks": {"shapes", "parts.products", "parts", "parallel"},
    "rules": {
        "shapes",
        "styles",
        "gates",
        "rule.packing",
        "rule.segments",
        "parts.attention",
        "rule.chunks",
        "parts",
        "rule.ops",
        "parallel",
    },
    "inspect.analysis": {"shapes", "gates", "rule.definition", "rule.chunks", "rules"},
    "layers": {
        "shapes",
        "styles",
        "parts.products",
        "gates",
        "parts.conv",
        "parts",
        "rule.implementations",
        "rule.ops",
        "parallel",
        "rules",
        "layers.blocks",
    },
    "models.config": {"shapes", "parts.products", "rules", "layers"},
    "models.attention": {
        "shapes",
        "parts.attention",
        "parts",
        "parallel",
        "layers.blocks",
        "layers",
        "models.config",
    },
    "models.window": {"parts.attention", "models.attention"},
    "models.latent": {"parts", "layers.blocks", "models.config", "models.attention"},
    "models.experts": {"shapes", "parts.products", "parts", "layers.blocks", "models.config"},
    "models.block": {
        "parts.products",
        "parts",
        "layers.blocks",
        "models.config",
        "models.attention",
        "models.window",
        "models.latent",
        "models.experts",
    },
    "models.alike": {"models.config", "models.block"},
    "models.decoder": {
        "shapes",
        "parts.products",
        "rule.chunks",
        "parts",
        "rule.seam",
        "layers.blocks",
        "models.config",
        "models.attention",
        "models.block",
        "models.alike",
    },
    "models.lora": {"parts.products", "models.decoder"},
    "models.inference": {
        "parts.products",
        "parts",
        "parallel",
        "layers.blocks",
        "layers",
        "models.attention",
        "models.window",
        "models.latent",
        "models.experts",
        "models.block",
        "models.decoder",
        "models.lora",
    },
    "models": {
        "shapes",
        "parts.products",
        "gates",
        "parts.attention",
        "parts",
        "serving",
        "rules",
        "layers.blocks",
        "layers",
        "models.config",
        "models.attention",
        "models.latent",
        "models.experts",
        "models.block",
        "models.decoder",
        "models.lora",
        "models.inference",
    },
    "commands": set(),
    "hf": {"layers", "models", "commands"},
    "checks": {"gdn_jax", "commands"},
    "training.tasks": {"rules", "models", "hf", "commands"},
    "training": {
        "styles",
        "shapes",
        "parts.products",
        "parts",
        "gdn_jax",
        "rule.implementations",
        "parallel",
        "rules",
        "layers.blocks",
        "layers",
        "models",
        "hf",
        "commands",
        "training.tasks",
    },
    "inspect.plots": {"inspect.analysis", "styles", "training"},
    "sweeps": {"styles", "gdn_jax", "models", "commands", "training.tasks", "training"},
    "inspect": {
        "inspect.analysis",
        "gates",
        "layers",
        "models",
        "hf",
        "commands",
        "training.tasks",
        "training",
        "parallel",
    },
    "bench": {
        "gdn_jax",
        "rule.implementations",
        "shapes",
        "rules",
        "serving",
        "parallel",
        "parts",
        "losses",
        "models",
        "inspect.plots",
        "commands",
        "checks",
        "training.tasks",
        "training",
        *KERNELS,
    },
    "commands.cli": {"commands", "checks", "training.tasks", "training", "sweeps", "inspect", "bench"},
}
STANDARD = {*sys.stdlib_module_names}
# Packages from outside: those that every room may import, and what some may import beside them.
EVERYWHERE = {"jax", "numpy", "jaxtyping"}
OUTSIDE: dict[str, set[str]] = {
    "pallas_kernels.device": {
        "jaxlib.mlir",
        "jaxlib.mlir.dialects",
    },  # dialects that jax.extend.mlir lacks (llvm)
    "pallas_kernels.tools": {"jaxlib.mlir"},
    "parallel": {"optax"},
    "inspect.plots": {"matplotlib"},
    "layers.blocks": {"flax"},
    "layers": {"flax"},
    "models": {"flax"},
    "models.attention": {"flax"},
    "models.latent": {"flax"},
    "models.experts": {"flax"},
    "models.block": {"flax"},
    "models.alike": {"flax"},
    "models.decoder": {"flax"},
    "models.lora": {"flax"},
    "models.inference": {"flax"},
    "hf": {"flax", "tokenizers"},
    "commands": {"filelock", "rich", "tyro"},
    "checks": {"ml_dtypes", "rich"},
    "training": {"flax", "matplotlib", "optax", "orbax", "rich"},
    "sweeps": {"flax", "matplotlib", "rich", "scipy"},
    "training.tasks": {"flax"},
    "inspect": {"flax", "rich"},
    "bench": {"flax", "matplotlib", "ml_dtypes", "rich", "tyro"},
    "commands.cli": {"gdn_command", "rich"},
}
CALLERS = ("rule.kernels", "rule.seam", "parts.products", "parts", "losses", "parallel", "serving")
"""Rooms that call kernels."""
DERIVATIVES = {"rule.seam", "parts", "losses", "parallel", "parts.products"}
"""Rooms with derivatives of their own: over kernels, what is sent between devices, and products in 8 bits."""
# Imported inside functions only: kernels inside the call; what is behind an extra, or slow, where it is needed.
INSIDE_FUNCTIONS = {
    *((name, part) for name in CALLERS for part in (*KERNEL_PARTS, *KERNELS)),
    ("inspect.plots", "matplotlib"),
    ("commands", "tyro"),
    ("hf", "tokenizers"),
    *(("commands.cli", name) for name in ("checks", "training.tasks", "training", "sweeps")),
    *(("commands.cli", name) for name in ("inspect", "bench", "rich")),
}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module):
    """The room a module belongs to, the innermost of nested ones; "gdn_jax" only for the package itself."""
    if module in ("gdn_jax", "pallas_kernels"):
        return module
    parts = module.removeprefix("gdn_jax.").split(".")
    names = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((name for name in names if name in ROOMS), None)


def imports(path):
    """(imported module, line, inside a function) of every import statement."""
    tree = ast.parse(path.read_text(), str(path))
    inside = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside |= {id(child) for child in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, id(node) in inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import, say the full name"
            found = node.module or ""
            for alias in node.names:
                whole = f"{found}.{alias.name}"
                yield (whole if room(whole) else found), node.lineno, id(node) in inside


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows(path):
    """Every import of a file is one that ROOMS or OUTSIDE allows its room."""
    module = module_name(path)
    mine = room(module)
    assert mine is not None, f"{module} has no room: enter it in ROOMS"
    for imported, line, in_function in imports(path):
        where = f"{path.relative_to(ROOT)}:{line}: {module} imports {imported}"
        top = imported.split(".")[0]
        if top in PACKAGES:
            other = room(imported)
            assert other is not None, f"{where}: import the module that defines the name"
            assert other == mine or {other, other.rpartition(".")[0]} & ROOMS[mine], where
        else:
            other = top
            assert {top, imported} & (STANDARD | EVERYWHERE | OUTSIDE.get(mine, set())), where
        assert in_function or (mine, other) not in INSIDE_FUNCTIONS, f"{where}: import it inside a function"


def test_rooms():
    """Rooms exist, and are entered in an order in which every arrow points back."""
    rooms = {room(module_name(path)) for path in FILES}
    entered = set()
    for name, below in ROOMS.items():
        assert name in rooms, f"ROOMS: {name} has no file"
        assert below <= entered, f"ROOMS: {name} comes before {below - entered}"
        entered.add(name)
    assert OUTSIDE.keys() <= ROOMS.keys() and {name for name, _ in INSIDE_FUNCTIONS} <= ROOMS.keys()


def test_who_calls_kernels_and_who_owns_a_derivative():
    """Kernels are called from CALLERS, inside functions (INSIDE_FUNCTIONS), and timed by `bench`. The kernels
    themselves have no derivative; those over them are in DERIVATIVES."""
    below = {name: rooms for name, rooms in ROOMS.items() if not name.startswith("pallas_kernels")}
    callers = {name for name, rooms in below.items() if any(x.startswith("pallas_kernels.") for x in rooms)}
    assert callers == {*CALLERS, "bench"}
    owners = {room(module_name(path)) for path in FILES if "jax.custom_vjp" in path.read_text()}
    assert owners == DERIVATIVES


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
    assert "jax.config.update" not in path.read_text(), f"{path.name} changes jax.config"


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


def test_each_fault_has_a_place_and_a_test():
    """What `tests/faults/run.py` would say after minutes."""
    places = [
        *FILES,
        ROOT / "README.md",
        ROOT / "docs" / "accuracy.md",
        *(ROOT / "notebooks").glob("*.ipynb"),
        *(ROOT / "results" / "pages").glob("*.py"),
    ]
    source = "\n".join(path.read_text() for path in places)
    for fault in FAULTS:
        assert source.count(fault.find) == 1, fault.name
        file, _, test = fault.test.partition("::")
        assert f"def {test.partition('[')[0]}" in (ROOT / file).read_text(), fault.name
