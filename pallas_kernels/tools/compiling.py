"""Compiles the kernels of the calls on a machine without a GPU, and gives what the compiler prints.

Each kernel is lowered for a compute capability and compiled by the plugin that JAX itself would use. Needs gcc and
ptxas (CUDA 13) on the path; the plugin's wheel, jax-cuda13-pjrt of the installed jax version, is fetched through pip
once, into a cache folder. The plugin asks the driver for the device; a library that answers with the compute
capability takes its place. Loading the result fails, after the messages are out.
"""

import contextlib
import ctypes
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir

from pallas_kernels.device.needs import HAS
from pallas_kernels.tools.calls import CALLS

CAPABILITY = "GDN_CAPABILITY"
"""Environment variable with the compute capability, such as 8.9, in processes that compile."""

DRIVER = """
#include <stdlib.h>
#include <string.h>
static int major() { return atoi(getenv("GDN_CAPABILITY")); }
static int minor() { return atoi(strchr(getenv("GDN_CAPABILITY"), '.') + 1); }
int cuInit(unsigned f) { return 0; }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuCtxGetDevice(int *d) { *d = 0; return 0; }
int cuDeviceGet(int *d, int i) { *d = 0; return 0; }
int cuDeviceGetCount(int *n) { *n = 0; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? major() : a == 76 ? minor() : 0; return 0; }
"""
"""Attributes 75 and 76 are the numbers of the compute capability."""

PLUGIN = "GDN_PLUGIN"
"""Environment variable with the path of JAX's compiler plugin, in processes that compile."""


@contextlib.contextmanager
def lowering_for(capability: str) -> Iterator[None]:
    """Kernels are lowered for a compute capability such as "8.9", whatever the device is.

    JAX has no public switch for it. Code that is lowered for 8.0 runs on later GPUs too.
    """
    own = utils._infer_arch
    major, minor = map(int, capability.split("."))
    utils._infer_arch = lambda: (major, minor)
    try:
        yield
    finally:
        utils._infer_arch = own


def in_process_of_compiler(program: str, *variables: str) -> bool:
    """Whether this process may call `compiler`. If not, runs the program in one that may, with the same arguments.

    Args:
      program: name of the module.
      variables: environment variables that are set, by which the plugin prints what is wanted.
    """
    if PLUGIN in os.environ:
        return True
    plugin, driver = _plugin()
    libraries = f"{driver}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    environment = dict(os.environ, LD_LIBRARY_PATH=libraries, JAX_PLATFORMS="cpu")
    environment |= {PLUGIN: str(plugin), **dict.fromkeys(variables, "1")}
    subprocess.run([sys.executable, "-m", program, *sys.argv[1:]], env=environment, check=True)
    return False


def printed(only: str, capability: str) -> Iterator[tuple[str, str]]:
    """The name of each kernel of the calls whose name contains a text, and what the compiler prints for it.

    A kernel of an earlier call is left out.

    Args:
      capability: what is compiled for. Calls of kernels that do not compile for it are left out.
    """
    os.environ[CAPABILITY] = capability
    library, seen = _compiler(), set()
    for name, call in CALLS.items():
        if only not in name or call.needs not in HAS[capability]:
            continue
        with lowering_for(capability):
            lowered = call.lower()
        for label, module in _labelled(name, lowered):
            if module not in seen:
                seen.add(module)
                yield label, _printed(library, module)


def _plugin() -> tuple[Path, Path]:
    """Paths of the compiler plugin and of the folder that holds the driver's stand-in; fetched and built once."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gdn-ptxas" / jax.__version__
    plugin = cache / "jax_plugins" / "xla_cuda13" / "xla_cuda_plugin.so"
    cache.mkdir(parents=True, exist_ok=True)
    if not plugin.exists():
        wheel = f"jax-cuda13-pjrt=={jax.__version__}"
        print(f"fetching {wheel} through pip, once, into {cache}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, wheel]
            subprocess.run(command, check=True)
            (file,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(file) as archive:
                archive.extractall(folder)
            Path(folder, "jax_plugins").rename(cache / "jax_plugins")
    driver = cache / f"driver-{hashlib.sha256(DRIVER.encode()).hexdigest()[:8]}" / "libcuda.so.1"
    if not driver.exists():
        driver.parent.mkdir(exist_ok=True)
        made = driver.with_name(f"{os.getpid()}.so")
        command = ["gcc", "-shared", "-fPIC", "-o", str(made), "-Wl,-soname,libcuda.so.1", "-x", "c", "-"]
        subprocess.run(command, input=DRIVER.encode(), check=True)
        made.rename(driver)
    return plugin, driver.parent


def _compiler() -> ctypes.CDLL:
    """JAX's compiler plugin, whose MosaicGpuCompile(module, length) prints what the environment asks for."""
    library = ctypes.CDLL(os.environ[PLUGIN])
    library.MosaicGpuCompile.restype = ctypes.c_void_p
    library.MosaicGpuCompile.argtypes = [ctypes.c_char_p, ctypes.c_int]
    return library


def _modules(lowered: jax.stages.Lowered) -> list[bytes]:
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


def _labelled(name: str, lowered: jax.stages.Lowered) -> list[tuple[str, bytes]]:
    """The kernels of a call with their names, which are the call's where it has but one."""
    modules = _modules(lowered)
    if len(modules) == 1:
        return [(name, modules[0])]
    kernels: list[str] = []
    for module in modules:
        kernel = next(x for x in re.findall(rb"\x00(\w+)_mosaic_gpu\x00", module) if x != b"stable").decode()
        count = sum(other.split(" ")[0] == kernel for other in kernels)
        kernels.append(f"{kernel} {count + 1}" if count else kernel)
    return [(f"{name}: {kernel}", module) for kernel, module in zip(kernels, modules, strict=True)]


def _printed(library: ctypes.CDLL, module: bytes) -> str:
    """The compiler's output for a kernel: it writes straight to the standard streams."""
    sys.stdout.flush()
    libc, saved = ctypes.CDLL(None), [os.dup(stream) for stream in (1, 2)]
    with tempfile.TemporaryFile() as file:
        try:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
            library.MosaicGpuCompile(module, len(module))
            libc.fflush(None)
        finally:
            for stream, old in zip((1, 2), saved, strict=True):
                os.dup2(old, stream)
                os.close(old)
        file.seek(0)
        return file.read().decode(errors="replace")
