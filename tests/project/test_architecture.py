"""The house rules that a program can check: who imports whom, and what an import does."""

import ast
import functools
import pathlib
import sys

import pytest
from faults.faults import FAULTS

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ("gdn_jax", "pallas_kernels")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

KERNEL_PARTS = ("pallas_kernels.device", "pallas_kernels.work", "pallas_kernels.chunks")
KERNELS = (
    "pallas_kernels.forward",
    "pallas_kernels.backward",
    "pallas_kernels.layer",
    "pallas_kernels.decode",
    "pallas_kernels.rows",
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
    "parallel.mesh": set(),
    "partitioning": {"shapes", "parallel.mesh"},
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
    "pallas_kernels.rows": {
        *("shapes", "pallas_kernels.device", "pallas_kernels.work"),
        *("pallas_kernels.decode", "pallas_kernels.layer"),
    },
    "pallas_kernels.tools": {"shapes", *KERNEL_PARTS, *KERNELS},
    "parts.products": {
        *("shapes", "partitioning", "parallel.mesh"),
        *("pallas_kernels.device", "pallas_kernels.layer"),
    },
    "rule": set(),
    "rule.call": {"shapes", "partitioning"},
    "rule.halves": {"rule.call"},
    "rule.definition": {"shapes"},
    "rule.chunked": {"shapes", "rule.chunks"},
    "rule.products": {"rule.chunks"},
    "rule.channels": {"rule.packing", "rule.chunks", "rule.products"},
    "rule.plain": {
        "shapes",
        "gates",
        "rule.segments",
        *("rule.call", "rule.halves"),
        "rule.definition",
        "rule.chunked",
        "rule.channels",
    },
    "rule.state_passing": {"rule.call", "rule.plain"},
    "rule.kernels": {
        "shapes",
        "gates",
        "rule.chunks",
        *("rule.call", "rule.halves"),
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
        *("rule.call", "rule.plain"),
        "rule.implementations",
        "rule.arguments",
    },
    "rule.product": {"shapes", "rule.call", "rule.arguments", "rule.ops"},
    "rule.erase_then_delta": {
        *("shapes", "rule.call", "rule.halves", "rule.arguments", "rule.ops", "rule.product"),
    },
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
        "pallas_kernels.rows",
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
        *("rule.call", "rule.state_passing", "rule.implementations", "rule.arguments"),
        *("rule.ops", "rule.product", "rule.erase_then_delta"),
        "parallel.mesh",
        *KERNELS,
    },
    "gdn_jax": {
        *("gates", "parts.conv", "rule.chunks", "rule.arguments"),
        *("rule.ops", "rule.product", "rule.erase_then_delta"),
    },
    "serving": {
        "shapes",
        "gates",
        "rule.packing",
        "partitioning",
        "parts.conv",
        "rule.call",
        "rule.definition",
        "rule.arguments",
        *("rule.halves", "rule.ops", "rule.erase_then_delta"),
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
        "rule.erase_then_delta",
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
    "models.experts": {"shapes", "parts.products", "parts", "layers.blocks", "layers", "models.config"},
    "models.block": {
        "parts.products",
        "parts",
        *("layers.blocks", "layers"),
        "models.config",
        "models.attention",
        "models.window",
        "models.latent",
        "models.experts",
    },
    "models.alike": {"models.config", "models.block"},
    "models.decoder": {
        *("shapes", "parallel"),
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
        "shapes",
        "parts.products",
        "parts",
        "parallel",
        *("serving", "rules"),
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


def statements(node, inside=False):
    """(statement or clause of one, inside a function) of everything below a node but expressions."""
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, part, ()):
            yield child, inside
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from statements(child, inside or function)


@functools.cache
def imports(path):
    """(imported module, line, inside a function) of every import statement."""
    found = []
    for node, inside in statements(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno, inside) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import, say the full name"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.append((whole if room(whole) else node.module, node.lineno, inside))
    return found


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
