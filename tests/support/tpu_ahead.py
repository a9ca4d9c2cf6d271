"""Compiles the rule and a training step for TPUs on a machine without one.

    PYTHONPATH=. python tests/support/tpu_ahead.py [--topologies NAME ...] [--only TEXT] [--model NAME]

Prints a Markdown line for each program and topology: seconds of compilation and MiB of temporaries by the compiler's
own account. libtpu, of the version that the installed jax asks for, is fetched through pip once, into a cache folder
that no other program imports from. Ends with 1 if a program did not compile.
"""

import argparse
import importlib.metadata
import itertools
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ahead

TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
"""Name of a kind of TPU -> a topology of it. Programs are compiled for one chip."""

PROGRAMS = (
    "gated_delta_rule, forward",
    "gated_delta_rule, both passes",
    "delta_rule, forward",
    "delta_rule, both passes",
    "training step",
)

AHEAD = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
"""Environment of libtpu: no server is asked what TPUs this machine has, and no other process waits for them."""


def folder() -> Path:
    """The folder of libtpu, fetched if it is not there.

    Raises:
      SystemExit: pip could not fetch it.
    """
    asked = [re.match(r"libtpu[^;]*", text) for text in importlib.metadata.requires("jax") or ()]
    (wanted,) = (match[0].strip() for match in asked if match)
    return ahead.fetched("libtpu", [wanted])


def rule(name: str, passes: str, tokens: int) -> tuple[Callable[..., Any], list[Any]]:
    """A call of a rule with 16 key heads and 32 value heads of 128 channels, in bfloat16, and its shapes."""
    import jax
    import jax.numpy as jnp

    import gdn_jax

    def forward(*x):
        return getattr(gdn_jax, name)(*x)

    def both(x, cotangents):
        outputs, vjp = jax.vjp(forward, *x)
        return outputs, vjp(cotangents)

    (H, HV), D = (16, 32), 128
    gates = (HV, D) if name == "delta_rule" else (HV,)
    half = [(1, tokens, H, D), (1, tokens, H, D), (1, tokens, HV, D)]
    x = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in half]
    x += [jax.ShapeDtypeStruct((1, tokens, *sizes), jnp.float32) for sizes in (gates, (HV,))]
    if passes == "forward":
        return forward, x
    return both, [x, jax.eval_shape(forward, *x)]


def step(model: str, fields: tuple[str, ...], tokens: int) -> tuple[Callable[..., Any], list[Any]]:
    """The training step of a model in bfloat16 on one row of tokens, and the shapes of its arguments."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from gdn_jax.bench.sizes import model_config
    from gdn_jax.models import LanguageModel
    from gdn_jax.training import steps
    from gdn_jax.training.options import ScheduleOptions
    from gdn_jax.training.tasks.batch import Batch

    config = model_config(model, fields, dtype="bfloat16")
    shapes = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    graphdef, params, rest = nnx.split(shapes, nnx.Param, ...)
    optimizer = steps.make_optimizer(ScheduleOptions(), 1000, 1e-3)
    state = steps.TrainState(params, jax.eval_shape(optimizer.init, params))
    text = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    batch = Batch(text, text, jax.ShapeDtypeStruct((1, tokens), jnp.float32))

    def train(rest, state, batch):
        return steps.train_step(graphdef, rest, optimizer, 1, state, batch)

    return train, [rest, state, batch]


def compiled(kind: str, program: str, options: argparse.Namespace) -> str:
    """Seconds of the compilation and MiB of temporaries, as cells of the table."""
    import jax
    from jax.experimental import topologies

    chip = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[kind]).devices[0]
    place = jax.sharding.SingleDeviceSharding(chip)
    name, _, passes = program.partition(", ")
    if passes:
        function, shapes = rule(name, passes, options.tokens)
    else:
        function, shapes = step(options.model, tuple(options.fields), options.tokens)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes)
    started = time.time()
    lowered = jax.jit(function).trace(*shapes).lower(lowering_platforms=("tpu",))
    memory = lowered.compile().memory_analysis()
    return f"{time.time() - started:.0f} | {memory.temp_size_in_bytes / 2**20:.0f}"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--topologies", nargs="+", choices=TOPOLOGIES, default=[*TOPOLOGIES])
    parser.add_argument("--only", default="", help="programs whose name contains this")
    parser.add_argument("--tokens", type=int, default=8192, help="of the row")
    parser.add_argument("--model", default="0.4b", help="whose training step is compiled")
    parser.add_argument(
        "--fields", nargs="+", default=[], help="fields of its ModelConfig, as in num_layers=4"
    )
    options = parser.parse_args()
    ahead.ensure(folder(), AHEAD)
    import jax

    version = importlib.metadata.version("libtpu")
    model = " ".join([options.model, *options.fields])
    print(f"jax {jax.__version__}, libtpu {version}, a row of {options.tokens} tokens, model {model}\n")
    print("| TPU | program | seconds | temporaries, MiB |\n|---|---|---|---|", flush=True)
    failed = False
    for kind, program in itertools.product(options.topologies, PROGRAMS):
        if options.only not in program:
            continue
        try:
            cells = compiled(kind, program, options)
        except Exception as error:  # of the compiler; the other programs may be right
            failed, cells = True, f"| {ahead.failure(error)}"
        print(f"| {kind} | {program} | {cells} |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
