"""Registers, spills and warnings of every kernel configuration, on a machine without a GPU.

    python -m pallas_kernels.tools.ptxas_report [--only TEXT]

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
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import jax
from jaxlib.mlir import ir

from pallas_kernels.tools.configurations import CASES

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
    command = [sys.executable, "-m", "pallas_kernels.tools.ptxas_report", "--compile", name]
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
