"""Set-up shared by all tests: run-time shape checks, eight CPU devices, and tests that need a GPU."""

import gc
import itertools
import os
import types

os.environ.setdefault(
    "NPROC", "16"
)  # threads of XLA on the CPU: Pallas' interpreter blocks one per warpgroup

# A process of `make gpu-test` uses one card, before JAX has looked for any.
if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and (
    cards := int(os.environ.get("GDN_TEST_CARDS", "0"))
):
    os.environ["CUDA_VISIBLE_DEVICES"] = str(int(worker.removeprefix("gw")) % cards)

import jax
import jaxtyping
import pytest

pytest.register_assert_rewrite("compiled_programs")
import compiled_programs  # noqa: E402 - its asserts are rewritten from here on
import shape_checks  # noqa: E402

# Every jaxtyping annotation of the packages is checked at run time. Must come before their first import.
if shape_checks.ARE_ON:
    shape_checks.install()

jax.config.update("jax_num_cpu_devices", 8)  # for meshes; the first one is used unless a test says otherwise
# On a CPU the same operations of XLA without LLVM's optimisations: compilation is nearly all that the suite does, and
# this halves it. In the environment too, for the processes that tests start. JAX_DISABLE_MOST_OPTIMIZATIONS=0 in the
# environment compiles as users do; tests that mean just that ask for `compile_as_users_do`.
if jax.default_backend() == "cpu":
    unoptimised = os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    jax.config.update("jax_disable_most_optimizations", unoptimised == "1")
compiled_programs.keep()
pytest_plugins = ["compiled_programs", "unchanged"]


def pytest_report_header():
    """Says so where shapes go unchecked."""
    return (
        None if shape_checks.ARE_ON else "beartype is not installed: annotations are NOT checked at run time"
    )


def _no_gpu(*capabilities: str) -> str | None:
    """Why this machine can't run a test that needs a GPU of one of these compute capabilities, or None."""
    needed = f"needs an NVIDIA GPU of compute capability {' or '.join(capabilities)}"
    try:
        gpu = jax.devices("gpu")[0]
    except RuntimeError:
        return f"{needed}, JAX sees none"
    capability = getattr(gpu, "compute_capability", None)
    return None if capability in capabilities else f"{needed}, found {capability}"


LONG = (
    "notebooks",
    "parallel_training",
    "parallel_context",
    "kernels_decode",
    "kernels_ring",
    "runs",
    "chunked",
    "kernels",
    "kernels_prefill",
    "models_scan",
    "sweep",
    "family_models",
    "parallel_serving",
    "kernels_backward",
    "isolation",
    "hf_latent",
    "kernels_lower",
    "serving_family",
    "kernels_channels",
    "models",
    "tasks",
    "layers",
    "analysis",
)
"""Files that take a minute or more with their slow tests, then those whose quick tests take longest. They are begun
first, so that no process of the test run is left with one when the others have nothing to do; only how long the run
takes hangs on this list."""


def pytest_collection_modifyitems(items):
    place = {f"test_{name}.py": i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONG)))
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker and (reason := _no_gpu(*(marker.args or ("9.0",)))):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish():
    """The garbage collector leaves alone what was imported, and comes more seldom: tracing makes a lot of objects and
    few cycles, and each file collects its own at its end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 10)


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_programs():
    """Gives back what the programs of a file hold: every one takes a few memory mappings, Linux allows a process
    65,530, and XLA ends in a segmentation fault where it gets no more."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def no_type_checks():
    """What a user sees: the test run's type checks would report a wrong shape before the library does."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture
def hopper(monkeypatch):
    """Public calls believe that there is a GPU, and lower for it."""
    from pallas_kernels.device import launch

    monkeypatch.setattr(launch, "device_reason", lambda *_: None)


@pytest.fixture
def interpreted(monkeypatch):
    """`gdn_jax.parts` takes the kernels, interpreted; the fixture's value counts the calls of each."""
    from layer_kernels import interpret

    return interpret(monkeypatch)


@pytest.fixture
def last_arrivals(monkeypatch):
    """Kernels whose loading warpgroup ends before the others, interpreted: it has not seen their last arrivals."""
    from layer_kernels import leave_last_arrivals

    leave_last_arrivals(monkeypatch)


@pytest.fixture
def interpreted_calls():
    """Public calls of `gdn_jax.serving` interpret the kernels."""
    from layer_kernels import INTERPRET

    from gdn_jax.serving.call import interpreted

    with interpreted(INTERPRET):
        yield


@pytest.fixture
def ticking_clock(monkeypatch):
    """Every measurement by the clock of `gdn bench` lasts a second, however many calls it has."""
    from gdn_jax.bench import measure

    monkeypatch.setattr(measure, "time", types.SimpleNamespace(perf_counter=itertools.count().__next__))


@pytest.fixture
def compile_as_users_do():
    """Compilation with all optimisations."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Thirty small files of Python-like text."""
    root = tmp_path_factory.mktemp("text")
    for i in range(30):
        (root / f"part{i % 3}").mkdir(exist_ok=True)
        body = "".join(f"def f{i}_{j}(x):\n    return x + {j}\n" for j in range(8))
        (root / f"part{i % 3}" / f"file{i}.py").write_text(body)
    return root
