"""Registers, spills and warnings of every kernel configuration, on a machine without a GPU.

    python -m pallas_kernels.ptxas_report [--only TEXT]

Each kernel is lowered for compute capability 9.0 and compiled by the plugin that JAX itself would use, whose
assembler's messages are collected. Needs gcc and ptxas (CUDA 13) on the path; the plugin's wheel, jax-cuda13-pjrt
of the installed jax version, is fetched through pip once, into a cache folder. The plugin asks the driver for the
device; a library that answers "compute capability 9.0" takes its place. Loading the result fails, after the
messages are out.

Columns: registers at entry, bytes spilled (stores, loads), and warnings: wgmma serialised for want of registers
(C7512), set_max_registers ignored.
"""

import argparse
import ctypes
import functools
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir

from pallas_kernels import recurrence as rec
from pallas_kernels import state_adjoints as chains
from pallas_kernels.chunk_gates import chunk_gates
from pallas_kernels.gradients import gradients
from pallas_kernels.recurrence import Split, Tables, recurrence
from pallas_kernels.segment_states import segment_states
from pallas_kernels.spans import VisitTables
from pallas_kernels.tril_inverse import tril_inverse

DRIVER = """
int cuInit(unsigned f) { return 0; }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuCtxGetDevice(int *d) { *d = 0; return 0; }
int cuDeviceGet(int *d, int i) { *d = 0; return 0; }
int cuDeviceGetCount(int *n) { *n = 0; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? 9 : 0; return 0; }
"""
"""Attribute 75 is the major number of the compute capability."""

PLUGIN = "GDN_PLUGIN"
"""Environment variable with the path of JAX's compiler plugin, in processes that compile."""


def _shape(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def inverse_case(K=128, group=2, packed=False, normalize=False, dtype=jnp.bfloat16):
    """A function and its argument shapes: tril_inverse."""
    first = _shape(256, dtype=jnp.int32) if packed else None
    function = functools.partial(tril_inverse, normalize=normalize)
    return function, (_shape(1, 256, 2, K, dtype=dtype), *[_shape(1, 2 * group, 256)] * 2, first)


def recurrence_case(
    K=128,
    V=128,
    warpgroups=2,
    s0=True,
    packed=None,
    transition=False,
    normalize=False,
    dtype=jnp.bfloat16,
    **options,
):
    """A function and its argument shapes: recurrence. packed: None, "sequences" or "segments"."""
    Hk, HO, T = 2, 4, 1024
    tables, split = None, Split(1, None)
    i32: Any = functools.partial(_shape, dtype=jnp.int32)
    if transition:
        split = Split(4, 4)
    if packed == "sequences":
        tables, split = Tables(i32(4), None, None), Split(4, None)
    elif packed == "segments":
        tables, split = Tables(i32(4), i32(12), i32(5)), Split(12, 4)
    config = options.pop("config", None)
    config = config or rec.Config.default(K, V, not transition, warpgroups)
    function = functools.partial(
        recurrence, split=split, scale=0.1, write_transition=transition, config=config, **options
    )
    kv = options.get("s0_kv_layout", False)
    state = _shape(split.num_items, HO, *((K, V) if kv else (V, K))) if s0 and not transition else None
    x = functools.partial(_shape, dtype=dtype)
    rstd = (_shape(1, Hk, T), _shape(1, Hk, T)) if normalize else None

    def run(*arguments):
        return function(*arguments[:-1], rstd=arguments[-1])

    arguments = (
        x(1, T, Hk, K),
        x(1, T, Hk, K),
        x(1, T, HO, V),
        _shape(1, HO, T),
        x(1, HO, T, 64),
        state,
        tables,
        rstd,
    )
    return run, arguments


def segment_case(K=128, V=128, backwards=False):
    """A function and its argument shapes: segment_states."""
    function = functools.partial(segment_states, num_sequences=2, backwards=backwards)
    n, m_t = _shape(8, 4, V, K), _shape(8, 4, K, K, dtype=jnp.bfloat16)
    return function, (n, m_t, _shape(2, 4, V, K), None)


def visit_tables_case(packed):
    """Visits of 1024 tokens, and the tables of three packed sequences."""
    i32: Any = functools.partial(_shape, dtype=jnp.int32)
    return (19, VisitTables(i32(4), i32(5), i32(19))) if packed else (16, None)


def chains_case(
    K=128,
    V=128,
    warpgroups=1,
    packed=False,
    segments=False,
    both=True,
    dtype: Any = jnp.bfloat16,
    states=True,
    **options,
):
    """A function and its argument shapes: state_adjoints, or segment_adjoints (not both)."""
    Hk, HO, T = 2, 4, 1024
    i32: Any = functools.partial(_shape, dtype=jnp.int32)
    x: Any = functools.partial(_shape, dtype=dtype)
    beta = {"beta": _shape(1, HO, T)} if both and dtype == jnp.float16 else {}
    _, tables = visit_tables_case(packed)
    item_tables = Tables(i32(4), i32(12), i32(5)) if packed and segments else None
    split, N = Split(12 if packed else 4, 4), 3 if packed else 1
    config = chains.Config.default(K, warpgroups)

    def run(item_tables, beta, *arguments):
        items = chains.Items(split, item_tables) if segments else None
        function: Any = chains.state_adjoints if both else chains.segment_adjoints
        return function(*arguments, **beta, scale=0.1, items=items, config=config, **options)

    state = _shape(split.num_items if segments and both else N, HO, V, K) if states else None
    q, v, a = x(1, T, Hk, K), x(1, T, HO, V), x(1, HO, T, 64)
    if both:
        return run, (item_tables, beta, q, q, v, v, _shape(1, HO, T), a, state, state, tables)
    return run, (item_tables, beta, q, q, v, _shape(1, HO, T), a, state, tables)


def gradients_case(K=128, V=128, group=2, packed=False, dtype: Any = jnp.bfloat16):
    """A function and its argument shapes: gradients."""
    Hk, HO, T = 2, 2 * group, 1024
    x: Any = functools.partial(_shape, dtype=dtype)
    visits, tables = visit_tables_case(packed)
    float16 = {"beta": _shape(1, HO, T), "lift": _shape(visits, HO)} if dtype == jnp.float16 else {}
    q, v, u, state = x(1, T, Hk, K), x(1, T, HO, V), x(visits, HO, 64, V), x(visits, HO, V, K)

    def run(float16, *arguments):
        return gradients(*arguments, **float16, scale=0.1)

    return run, (float16, q, q, v, u, v, state, state, _shape(1, HO, T), tables)


def gates_case(packed=False):
    """A function and its argument shapes: chunk_gates."""
    g = _shape(1, 256, 16)
    return chunk_gates, (g, g, _shape(256, dtype=jnp.int32) if packed else None)


CASES = {
    "gates": gates_case,
    "gates packed": functools.partial(gates_case, packed=True),
    "inverse": inverse_case,
    "inverse, 1 head": functools.partial(inverse_case, group=1),
    "inverse, packed": functools.partial(inverse_case, packed=True),
    "inverse, K 256": functools.partial(inverse_case, K=256),
    "full head": recurrence_case,
    "full head, kv": functools.partial(recurrence_case, kv_layout=True, s0_kv_layout=True),
    "full head, normalised": functools.partial(recurrence_case, normalize=True),
    "half, normalised": functools.partial(recurrence_case, warpgroups=1, normalize=True),
    "inverse, normalised": functools.partial(inverse_case, normalize=True),
    "full head, packed": functools.partial(recurrence_case, packed="sequences"),
    "full head, packed segments": functools.partial(recurrence_case, packed="segments"),
    "half": functools.partial(recurrence_case, warpgroups=1),
    "half, packed": functools.partial(recurrence_case, warpgroups=1, packed="sequences"),
    "transition": functools.partial(recurrence_case, transition=True),
    "transition, half": functools.partial(recurrence_case, transition=True, warpgroups=1),
    "transition, packed": functools.partial(recurrence_case, transition=True, packed="segments"),
    "K 64": functools.partial(recurrence_case, K=64),
    "K 192": functools.partial(recurrence_case, K=192, warpgroups=1),
    "K 256": functools.partial(recurrence_case, K=256, warpgroups=1),
    "K 256, transition": functools.partial(recurrence_case, K=256, warpgroups=1, transition=True),
    "segment states": segment_case,
    "segment states, K 256": functools.partial(segment_case, K=256),
    "segment states, backwards": functools.partial(segment_case, backwards=True),
    "chains": chains_case,
    "chains, packed": functools.partial(chains_case, packed=True),
    "chains, full head": functools.partial(chains_case, warpgroups=2),
    "chains, K 64": functools.partial(chains_case, K=64, V=64),
    "chains, segments": functools.partial(chains_case, segments=True),
    "chains, packed segments": functools.partial(chains_case, segments=True, packed=True),
    "segment adjoints": functools.partial(chains_case, segments=True, both=False),
    "segment adjoints, full head": functools.partial(chains_case, segments=True, both=False, warpgroups=2),
    "chains, full head, packed": functools.partial(chains_case, warpgroups=2, packed=True),
    "segment adjoints, packed": functools.partial(chains_case, segments=True, packed=True, both=False),
    "chains, K 256": functools.partial(chains_case, K=256),
    "chains, float16": functools.partial(chains_case, dtype=jnp.float16),
    "chains, float16 packed": functools.partial(chains_case, packed=True, dtype=jnp.float16),
    "segment adjoints, float16": functools.partial(chains_case, segments=True, both=False, dtype=jnp.float16),
    "gradients": gradients_case,
    "gradients, 1 head": functools.partial(gradients_case, group=1),
    "gradients, packed": functools.partial(gradients_case, packed=True),
    "gradients, K 64": functools.partial(gradients_case, K=64, V=64),
    "gradients, K 256": functools.partial(gradients_case, K=256),
    "gradients, V 256": functools.partial(gradients_case, V=256),
    "gradients, float16": functools.partial(gradients_case, dtype=jnp.float16),
    "gradients, float16 packed": functools.partial(gradients_case, packed=True, dtype=jnp.float16),
    "inverse, float16": functools.partial(inverse_case, dtype=jnp.float16),
    "inverse, normalised, packed": functools.partial(inverse_case, normalize=True, packed=True),
    "full head, float16": functools.partial(recurrence_case, dtype=jnp.float16),
    "full head, no state": functools.partial(recurrence_case, s0=False),
    "full head, normalised, packed": functools.partial(recurrence_case, normalize=True, packed="sequences"),
    "K 256, packed": functools.partial(recurrence_case, K=256, warpgroups=1, packed="sequences"),
    "transition, normalised, packed": functools.partial(
        recurrence_case, transition=True, normalize=True, packed="segments"
    ),
    "chains, kv, no states": functools.partial(chains_case, states=False, kv_layout=True),
    "chains, K 256, packed": functools.partial(chains_case, K=256, packed=True),
    "gradients, K 256, packed": functools.partial(gradients_case, K=256, packed=True),
}
"""Name -> a function without arguments that returns (function, argument shapes)."""


def lower(function, arguments) -> jax.stages.Lowered:
    """The function lowered for an NVIDIA GPU; without one JAX assumes compute capability 9.0."""
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))


def _plugin() -> tuple[Path, Path]:
    """Paths of the compiler plugin and of the folder that holds the driver's stand-in; fetched and built once."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gdn-ptxas" / jax.__version__
    plugin = cache / "jax_plugins" / "xla_cuda13" / "xla_cuda_plugin.so"
    cache.mkdir(parents=True, exist_ok=True)
    if not plugin.exists():
        wheel = f"jax-cuda13-pjrt=={jax.__version__}"
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(cache), wheel]
        subprocess.run(command, check=True)
        (file,) = cache.glob("*.whl")
        zipfile.ZipFile(file).extractall(cache)
        file.unlink()
    driver = cache / "libcuda.so.1"
    if not driver.exists():
        command = ["gcc", "-shared", "-fPIC", "-o", str(driver), "-Wl,-soname,libcuda.so.1", "-x", "c", "-"]
        subprocess.run(command, input=DRIVER.encode(), check=True)
    return plugin, cache


def compile_environment() -> dict[str, str]:
    """Environment of a process that may call `compiler`."""
    plugin, cache = _plugin()
    libraries = f"{cache}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    return dict(os.environ, LD_LIBRARY_PATH=libraries, JAX_PLATFORMS="cpu") | {PLUGIN: str(plugin)}


def compiler() -> ctypes.CDLL:
    """JAX's compiler plugin, whose MosaicGpuCompile(module, length) prints what the environment asks for."""
    library = ctypes.CDLL(os.environ[PLUGIN])
    library.MosaicGpuCompile.restype = ctypes.c_void_p
    library.MosaicGpuCompile.argtypes = [ctypes.c_char_p, ctypes.c_int]
    return library


def modules(lowered: jax.stages.Lowered) -> list[bytes]:
    """The kernels of a lowered function, as the compiler takes them."""
    found = []

    def visit(op):
        if op.name == "stablehlo.custom_call" and "mosaic_gpu" in str(op.attributes["call_target_name"]):
            config = ir.DictAttr(op.attributes["mhlo.backend_config"])
            found.append(ir.StringAttr(config["module"]).value_bytes)
        return ir.WalkResult.ADVANCE

    module: Any = lowered.compiler_ir("stablehlo")
    module.operation.walk(visit)
    return found


def _compile(name: str) -> None:
    """Runs in a process of its own: the assembler writes straight to the standard streams."""
    library = compiler()
    for module in modules(lower(*CASES[name]())):
        library.MosaicGpuCompile(module, len(module))


def _report(name: str, environment: dict[str, str]) -> str:
    command = [sys.executable, "-m", "pallas_kernels.ptxas_report", "--compile", name]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    text = result.stdout + result.stderr
    registers = re.findall(r"Used (\d+) registers", text)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    notes = [code for code in ("C7512", "setmaxnreg ignored", "Traceback") if code in text]
    stores, loads = max((tuple(map(int, pair)) for pair in spills), default=("?", "?"))
    return f"{name:30} {registers[0] if registers else '?':>5} {stores:>6} {loads:>6}  {' '.join(notes)}"


def main() -> None:
    """Prints one line for each configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="configurations whose name contains this")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        return _compile(options.compile)
    environment = compile_environment() | {"MOSAIC_GPU_DUMP_PTXAS": "1"}
    print(f"{'jax ' + jax.__version__:30} {'regs':>5} {'spill':>6} {'reload':>6}")
    for name in CASES:
        if options.only in name:
            print(_report(name, environment), flush=True)


if __name__ == "__main__":
    main()
