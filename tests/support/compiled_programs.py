"""Programs that XLA compiles for the tests: a folder keeps them between runs, each test file has a limit.

Two thirds of a test run's time is compilation of programs that an earlier run has compiled. JAX's compilation cache
keeps them in a folder of the user's cache directory. A program's key there holds the program, its compile options and
jaxlib's version, so a change of this project never finds what was compiled before it. The folder's name holds the
processor, because XLA compiles for the one that it runs on.
"""

import hashlib
import os
import pathlib
import platform
import shutil
from collections.abc import Iterator

import jax
import jaxlib
import pytest

FORM = 1
"""Counted up when what lies in the folder can no longer be used."""

MOST_BYTES = 2 << 30
"""Of the folder; the oldest programs beyond it go when a run begins."""

MOST_PROGRAMS = 60
"""A test file compiles, unless MORE names it. A single operation outside of `jit` is a program of its own."""

MORE: dict[str, int] = {
    "test_analysis.py": 70,
    "test_check.py": 80,
    "test_chunked.py": 80,
    "test_decode_bench.py": 70,
    "test_dense_stream_eight_bits.py": 270,
    "test_devices_bench.py": 95,
    "test_experiments.py": 140,
    "test_family_layers.py": 80,
    "test_family_models.py": 330,
    "test_fine_tuning.py": 120,
    "test_formulas.py": 110,
    "test_generate_bench.py": 90,
    "test_guides.py": 360,
    "test_hf_commands.py": 160,
    "test_hf_latent.py": 400,
    "test_inference.py": 103,
    "test_isolation.py": 280,
    "test_kept_step.py": 80,
    "test_kernels.py": 220,
    "test_kernels_ampere.py": 280,
    "test_kernels_ampere_channels.py": 300,
    "test_kernels_backward.py": 340,
    "test_kernels_channel_step.py": 75,
    "test_kernels_channels.py": 120,
    "test_kernels_channels_backward.py": 260,
    "test_kernels_conv_update.py": 200,
    "test_kernels_decode.py": 550,
    "test_kernels_eight_bits.py": 780,
    "test_kernels_erasures.py": 85,
    "test_kernels_halves.py": 400,
    "test_kernels_prefill.py": 200,
    "test_kernels_ring.py": 400,
    "test_layer_channel_tokens.py": 120,
    "test_layer_kernels_attention.py": 138,
    "test_layer_kernels_experts.py": 300,
    "test_layer_kernels_gates.py": 150,
    "test_layer_kernels_joined.py": 150,
    "test_layer_kernels_norms.py": 120,
    "test_layer_kernels_rows.py": 530,
    "test_layer_kernels_short_conv.py": 130,
    "test_layer_kernels_swiglu.py": 130,
    "test_layer_kernels_vocabulary.py": 210,
    "test_layer_of_a_token.py": 70,
    "test_layer_tokens.py": 185,
    "test_layers_of_a_row.py": 710,
    "test_load.py": 260,
    "test_lora.py": 90,
    "test_models.py": 90,
    "test_models_scan.py": 130,
    "test_mosaic.py": 190,
    "test_optimizers.py": 110,
    "test_other_devices.py": 70,
    "test_own_model.py": 270,
    "test_parallel_context.py": 380,
    "test_parallel_kernels.py": 700,
    "test_parallel_lowering.py": 200,
    "test_parallel_serving.py": 480,
    "test_parallel_training.py": 500,
    "test_parts_bench.py": 90,
    "test_reference.py": 110,
    "test_reproduce.py": 130,
    "test_rule_bench.py": 180,
    "test_rules.py": 80,
    "test_runs.py": 220,
    "test_runs_damaged.py": 210,
    "test_serve_bench.py": 70,
    "test_served_attention.py": 81,
    "test_served_drafts.py": 78,
    "test_serving.py": 190,
    "test_serving_batching.py": 140,
    "test_serving_bytes.py": 190,
    "test_serving_drafts.py": 80,
    "test_serving_errors.py": 90,
    "test_serving_family_prompts.py": 90,
    "test_serving_prompts.py": 120,
    "test_serving_ring.py": 220,
    "test_starts.py": 105,
    "test_step_bench.py": 100,
    "test_sweep.py": 380,
    "test_sweep_programs.py": 540,
    "test_tasks.py": 170,
}
"""Files that compile more than MOST_PROGRAMS on a CPU, with all their tests. A number here only goes down."""


def _processor() -> str:
    """The processor's kind and what it can do, as far as this system tells."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [f"model name: {platform.processor()}"]
    told = sorted(
        {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    )
    return f"{platform.machine()}-{hashlib.sha256('\n'.join(told).encode()).hexdigest()[:12]}"


def folder() -> pathlib.Path:
    """Where programs are kept unless JAX_COMPILATION_CACHE_DIR names another folder."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    cache = pathlib.Path(home) if os.path.isabs(home) else pathlib.Path.home() / ".cache"
    return cache / "gdn-jax" / "tests" / f"{_processor()}-jaxlib-{jaxlib.__version__}-{FORM}"


def keep() -> None:
    """Keeps every compiled program in the folder, from now on, in this process and in those that it starts."""
    environment = {
        "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(folder()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    os.environ.update(environment)
    jax.config.update("jax_compilation_cache_dir", environment["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def environment() -> dict[str, str]:
    """What makes a process with an environment of its own keep its programs in the same folder."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE", "JAX_ENABLE_COMPILATION_CACHE"))
    }


def copy_to(place: pathlib.Path) -> pathlib.Path:
    """A folder with the same programs, for processes that may leave half of one."""

    def same(source, target):
        try:
            os.link(source, target)
        except OSError:  # on another file system
            shutil.copyfile(source, target)

    return pathlib.Path(shutil.copytree(jax.config.jax_compilation_cache_dir, place, copy_function=same))


def discard_old(place: pathlib.Path, most: int = MOST_BYTES) -> None:
    """Where a folder holds more than `most` bytes, deletes the oldest programs until half of that is left."""
    entries = [(path.stat().st_mtime, path.stat().st_size, path) for path in place.glob("*-cache")]
    held = sum(size for _, size, _ in entries)
    if held <= most:
        return
    for _, size, path in sorted(entries):
        if held <= most // 2:
            break
        path.unlink(missing_ok=True)
        held -= size


class Count:
    """Programs that this process asked for, and how many of them came from the folder."""

    def __init__(self):
        self.programs = self.found = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def _on_duration(self, name: str, *_, **__) -> None:
        self.programs += name.endswith("backend_compile_duration")

    def _on_event(self, name: str, *_, **__) -> None:
        self.found += name == "/jax/compilation_cache/cache_hits"


def has_crossed(items: list, path: pathlib.Path) -> bool:
    """Whether this run has tests of the file that the gate leaves out. A file's limit is the gate's."""
    return any(item.path == path and item.get_closest_marker("crossed") for item in items)


count = Count()
over_all_processes = {"programs": 0, "found": 0}


@pytest.fixture(scope="module", autouse=True)
def few_programs(request) -> Iterator[None]:
    """Fails a file that compiles more programs than it may."""
    before = count.programs
    yield
    if jax.default_backend() != "cpu" or request.config.getoption("no_record"):
        return  # other tests run on a GPU, and with a fault or next to one in a copy of the project
    if has_crossed(request.session.items, request.path):
        return
    name, made = request.path.name, count.programs - before
    most = MORE.get(name, MOST_PROGRAMS)
    assert made <= most, (
        f"{name} asked XLA for {made} programs, {most} is its limit: prepare inputs and expected results in NumPy "
        "and put what is tested into one jax.jit"
    )


def pytest_report_header():
    if not jax.config.jax_enable_compilation_cache:
        return "compiled programs are not kept (JAX_ENABLE_COMPILATION_CACHE)"
    place = pathlib.Path(jax.config.jax_compilation_cache_dir)
    return f"compiled programs are kept in {place}, which holds {sum(1 for _ in place.glob('*-cache'))}"


def pytest_sessionstart(session):
    if not hasattr(session.config, "workerinput"):
        discard_old(pathlib.Path(jax.config.jax_compilation_cache_dir))


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["programs"] = (count.programs, count.found)
    else:
        _add(count.programs, count.found)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    _add(*getattr(node, "workeroutput", {}).get("programs", (0, 0)))


def _add(programs: int, found: int) -> None:
    over_all_processes["programs"] += programs
    over_all_processes["found"] += found


def pytest_terminal_summary(terminalreporter):
    programs, found = over_all_processes["programs"], over_all_processes["found"]
    terminalreporter.write_line(
        f"programs: {programs}, of which {found} were found compiled and {programs - found} were not"
    )
