"""Compiles training steps for meshes of GPUs on a machine without one.

    PYTHONPATH=. python tests/support/gpu_ahead.py [--mesh data=4 context=4] [--model 0.4b] [--gpu H200] ...

Prints a Markdown line for each step: kernels of this project in the program, seconds, memory by the compiler's
account, and what a device sends. JAX's plugin for CUDA 13 and its compiler, of the versions that fit the installed
jax, are fetched through pip once (700 MB), into a cache folder that no other program imports from. XLA chooses
products without timing them here. Ends with 1 if a step did not compile.
"""

import argparse
import importlib.metadata
import itertools
import os
import sys
import time
from pathlib import Path
from unittest import mock

import ahead

GPUS = {"H100": (85_520_809_984, 3_350_000_000_000), "H200": (150_754_820_096, 4_800_000_000_000)}
"""GPU -> bytes of memory, and bytes a second."""

DESCRIPTION = """gpu_device_info {{
  cuda_compute_capability {{ major: 9 minor: 0 }} core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 l2_cache_size: 62914560
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  device_memory_size: {memory} memory_bandwidth: {bandwidth}
}}
platform_name: "CUDA" runtime_version {{ major: 13 }} dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "NVIDIA {name}"
"""
"""What XLA asks of a GPU, as it writes it itself."""

DEVICES = 16
"""CPU devices of the process. With more than one, operations are prepared for a mesh; it may have more GPUs."""

COLLECTIVES = "all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all"


def folder() -> Path:
    """The folder of the plugin and the compiler, fetched if it is not there.

    Raises:
      SystemExit: pip could not fetch them.
    """
    version = importlib.metadata.version("jaxlib")
    plugin = [f"jax-cuda13-{part}=={version}" for part in ("plugin", "pjrt")]
    return ahead.fetched("cuda", [*plugin, "nvidia-cuda-nvcc>=13,<14", "nvidia-nvvm>=13,<14"])


def environment(place: Path) -> dict[str, str]:
    """Variables of a process that compiles for GPUs with the packages of a folder."""
    cuda = place / "nvidia" / "cu13"
    flags = f"--xla_gpu_cuda_data_dir={cuda} --xla_force_host_platform_device_count={DEVICES}"
    return {
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # of a driver that is not there
        "PATH": f"{cuda / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
    }


def compiled(model: str, matmul: str, mesh: str, options: argparse.Namespace) -> str:
    """Compiles a step; returns cells of the table."""
    from jax.experimental import topologies

    from gdn_jax.bench import training
    from gdn_jax.bench.collectives import traffic
    from gdn_jax.bench.sizes import model_config
    from gdn_jax.parallel.mesh import MeshShape
    from gdn_jax.training.placement import Placement
    from pallas_kernels.device import launch

    shape, (memory, bandwidth) = MeshShape.parse(mesh), GPUS[options.gpu]
    described = DESCRIPTION.format(name=options.gpu, memory=memory, bandwidth=bandwidth)
    gpus = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=described, topology=f"1x1x{shape.size}"
    ).devices
    config = model_config(model, tuple(options.fields), dtype="bfloat16", matmul=matmul)
    rows, length = options.tokens // options.length * shape.data, options.length * shape.context
    problem = training.StepProblem(config, rows, length, Placement(shape, shape.make(gpus)), 0)
    started = time.time()
    with mock.patch.object(launch, "default_device", lambda: gpus[0]):  # kernels are chosen by it
        lowered = training.lowered(problem)
    lower_s, started = time.time() - started, time.time()
    program = lowered.compile()
    compile_s, text = time.time() - started, program.as_text()
    used, sent = program.memory_analysis(), traffic(text).sent
    kernels = text.count('custom_call_target="mosaic_gpu')
    gib = [f"{n / 2**30:.2f}" for n in (used.argument_size_in_bytes, used.temp_size_in_bytes)]
    bytes_sent = [f"{sent[name] / 1e9:.3f}" if name in sent else "" for name in COLLECTIVES]
    seconds = f"{lower_s:.1f} + {compile_s:.1f}"
    return " | ".join([f"{rows} x {length}", f"{kernels}", seconds, " + ".join(gib), *bytes_sent])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mesh", nargs="+", default=["data=1", "data=4", "data=4,sharded", "context=4"])
    parser.add_argument("--model", nargs="+", default=["0.4b"], help="names as of gdn bench step")
    parser.add_argument(
        "--matmul", nargs="+", default=["default"], help="dtypes of products, as of gdn train"
    )
    parser.add_argument(
        "--fields", nargs="+", default=[], help="fields of the ModelConfig, as in num_layers=4"
    )
    parser.add_argument("--tokens", type=int, default=32768, help="of a device, over data and context")
    parser.add_argument("--length", type=int, default=8192, help="of a row on one device")
    parser.add_argument("--gpu", choices=GPUS, default="H200")
    options = parser.parse_args()
    place = folder()
    ahead.ensure(place, environment(place))
    import jax

    print(f"jax {jax.__version__}, {options.gpu}, {' '.join(options.fields)}\n")
    titles = "model", "products", "mesh", "rows x tokens", "kernels", "trace and lower + compile, s"
    titles += "arguments + temporaries, GiB", *(f"{name}, GB" for name in COLLECTIVES)
    print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|", flush=True)
    failed = False
    for names in itertools.product(options.model, options.matmul, options.mesh):
        try:
            cells = compiled(*names, options)
        except Exception as error:  # of the compiler; the other programs may be right
            failed, cells = True, ahead.failure(error)
        print(f"| {' | '.join(names)} | {cells} |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
