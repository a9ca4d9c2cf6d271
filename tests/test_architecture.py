"""The house rules that a program can check: who imports whom, and what an import does."""

import ast
import os
import pathlib
import subprocess
import sys

import pytest

import gdn_jax

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = ("gdn_jax", "pallas_kernels")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# Arrows point to lower ranks only. A new module gets its rank here.
RANK = {
    "gdn_jax.shapes": 0,
    "gdn_jax.gates": 1,
    "gdn_jax.packing": 1,
    "gdn_jax.chunk_decay": 1,
    "gdn_jax.stages": 1.3,
    "gdn_jax.chunk_recurrence": 1.6,
    "gdn_jax.reference": 2,
    "gdn_jax.chunked": 2,
    "gdn_jax.conv": 2,
    "pallas_kernels": 2,
    "gdn_jax.ops": 3,
    "gdn_jax.serving": 4,
    "gdn_jax.parallel": 4,
    "gdn_jax.rules": 3.5,
    "gdn_jax.analysis": 4,
    "gdn_jax.blocks": 4,
    "gdn_jax.small_layer": 4,
    "gdn_jax.layers": 4.5,
    "gdn_jax.models": 5,
    "gdn_jax.plots": 5,
    "gdn_jax.hf": 6,
    "gdn_jax.experiments": 7,
}
STANDARD = {*sys.stdlib_module_names}
# What the library may import from outside, by rank; experiments are free.
OUTSIDE = {"jax", "numpy", "jaxtyping"}
KERNELS_OUTSIDE = {
    "jaxlib.mlir",
    "jaxlib.mlir.dialects",
}  # dialects that jax.extend.mlir does not export (llvm)


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module):
    """The entry of RANK a module belongs to."""
    for name in RANK:
        if module == name or module.startswith(name + "."):
            return name
    return None


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
    """shapes <- gates, reference, chunked, pallas_kernels <- ops <- serving, layers <- models <- experiments."""
    module = module_name(path)
    if module == "gdn_jax":
        return
    mine = room(module)
    assert mine is not None, f"{module} has no rank: enter it in RANK"
    for imported, line, in_function in imports(path):
        where = f"{path.relative_to(ROOT)}:{line}: {module} imports {imported}"
        top = imported.split(".")[0]
        if top not in PACKAGES:
            known = top in STANDARD | OUTSIDE or (mine == "pallas_kernels" and imported in KERNELS_OUTSIDE)
            known |= mine == "gdn_jax.plots" and top == "matplotlib" and in_function  # behind an extra
            if mine != "gdn_jax.experiments" and not known:
                assert top in ("flax", "safetensors", "huggingface_hub") and RANK[mine] >= 4, where
            continue
        other = room(imported)
        if other == mine or (imported == "gdn_jax" and mine == "gdn_jax.experiments"):
            continue  # experiments may use the public names like any user
        assert other is not None, f"{where}: import the module that defines the name"
        assert RANK[other] < RANK[mine], where
        if mine == "pallas_kernels":
            assert other == "gdn_jax.shapes", f"{where}: kernels know arrays and configs only"
        if other == "pallas_kernels" and mine == "gdn_jax.ops":
            assert in_function, f"{where}: kernels are imported inside the call"


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
            assert not names & {"ImportError", "ModuleNotFoundError"} or "experiments" in path.parts, (
                f"{where}: silent fallback"
            )
    if path.parent.name in PACKAGES:
        assert "jax.config.update" not in path.read_text(), f"{path.name} changes jax.config"


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
