"""Set-up shared by all tests: run-time shape checks, two CPU devices, and tests that need a GPU."""

import importlib.util
import os

os.environ.setdefault(
    "NPROC", "16"
)  # threads of XLA on the CPU: Pallas' interpreter blocks one per warpgroup

import jax
import jaxtyping
import pytest

# Every jaxtyping annotation of the packages is checked at run time. Must come before their first import.
CHECKS_SHAPES = importlib.util.find_spec("beartype") is not None
if CHECKS_SHAPES:
    jaxtyping.install_import_hook(["gdn_jax", "pallas_kernels"], "beartype.beartype")

jax.config.update("jax_num_cpu_devices", 2)  # for meshes; the first one is used unless a test says otherwise


def pytest_report_header():
    """Says so where shapes go unchecked."""
    return None if CHECKS_SHAPES else "beartype is not installed: annotations are NOT checked at run time"


def _no_hopper() -> str | None:
    """Why this machine can't run the GPU kernels, or None."""
    try:
        gpu = jax.devices("gpu")[0]
    except RuntimeError:
        return "needs an NVIDIA GPU of compute capability 9.0, JAX sees none"
    capability = getattr(gpu, "compute_capability", None)
    return (
        None if capability == "9.0" else f"needs an NVIDIA GPU of compute capability 9.0, found {capability}"
    )


def pytest_collection_modifyitems(items):
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and (reason := _no_hopper()):
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def no_type_checks():
    """What a user sees: the test run's type checks would report a wrong shape before the library does."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
