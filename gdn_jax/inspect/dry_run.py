"""A training step on a mesh of devices that need not exist: compiled for as many devices of the CPU, never run.

No weight is made: arrays are shapes. The compiled program tells what each device holds and sends, which stands beside
what the formulas below expect.

The program is the training step of `gdn train` in plain JAX and float32, with `scan_layers` where the model's layers
have a period. What the formulas count, in bytes of one device, with S bytes of the residual stream of its tokens, and
devices d of data, h of head, c of context:

    gradients      all-reduce           2 (d c - 1) / (d c) of them
    weights        all-gather           with sharded parameters: (d - 1) / d of them, in a loop over layers twice,
                                        forward and backward
    stream         all-reduce           over h, each 2 (h - 1) / h S: of a block two forward, and two backward, or
                                        three where it has an output gate; one where the embedding is looked up
    loss           all-gather           over h: (h - 1) / h S, as its devices share the tokens
    states         collective-permute   over c, see docs/parallel.md
    heads          all-to-all           over c, where shards are short, instead of states: q, k, v, o and
                                        gates, forward and backward
    convolution    collective-permute   over c: W - 1 tokens of its input, forward and backward
    attention      all-to-all           over c: (c - 1) / c of q, k, v and o, forward and backward
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from gdn_jax.commands.errors import RunError
from gdn_jax.layers.parameters import value_width
from gdn_jax.models import LanguageModel, ModelConfig
from gdn_jax.parallel import exchange, sharding
from gdn_jax.parallel.communication import Traffic, traffic
from gdn_jax.parallel.mesh import DATA, HEAD, MeshShape
from gdn_jax.tasks.batch import Batch
from gdn_jax.training import steps
from gdn_jax.training.options import ScheduleOptions
from gdn_jax.training.placement import Placement

_FLOAT = 4  # bytes of a float32


class DryRun(NamedTuple):
    """What one device of a mesh holds and sends in a training step."""

    config: ModelConfig
    """Of the model as it was compiled."""
    state_bytes: int
    """Weights, optimiser state and batch."""
    temporary_bytes: int
    """What else the program needs at once, as XLA plans it for a CPU, without the kernels."""
    sent: Traffic
    expected: dict[str, dict[str, int]]
    """What is sent -> kind -> bytes by the formulas."""


def dry_run(config: ModelConfig, shape: MeshShape, rows: int, length: int) -> DryRun:
    """Compiles the training step of a model for a mesh.

    Args:
      config: of the model.
      shape: of the mesh.
      rows, length: sequences of a step, and their tokens.

    Raises:
      RunError: the model or its batch do not divide, the model has experts, or JAX began with fewer devices
        of the CPU.
    """
    if config.experts is not None:
        raise RunError(
            "--mesh: expected a model without experts, for which there is no formula of what they send"
        )
    config = _compiled_alike(dataclasses.replace(config, dtype="float32", weight_dtype="float32"))
    mesh = shape.make(_devices(shape.size))
    placement = Placement(shape, mesh)
    placement.check(config, rows, length)
    model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    optimizer = steps.make_optimizer(ScheduleOptions(), 1000, 1e-3)
    with placement.active():
        try:
            found = sharding.state_shardings(optimizer, params, mesh, shape)
        except ValueError as error:
            raise RunError(f"--mesh: {error}") from error
        shardings = steps.TrainState(*found)
        state = steps.TrainState(params, jax.eval_shape(optimizer.init, params))
        where = sharding.batch_sharding(mesh)
        dtypes = (jnp.int32, jnp.int32, jnp.float32)
        batch = Batch._make(jax.ShapeDtypeStruct((rows, length), dtype) for dtype in dtypes)
        train: Any = steps.make_functions(graphdef, rest, optimizer, 1, shardings=shardings).train
        arguments = _lying(state, shardings), _lying(batch, Batch._make([where] * 3))
        # Nobody runs it: what its loops look like does not matter.
        quickly = {"xla_backend_optimization_level": 0}
        compiled = train.lower(*arguments).compile(compiler_options=quickly)
    memory = compiled.memory_analysis()
    return DryRun(
        config,
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        traffic(compiled.as_text() or ""),
        expected(config, params, shape, rows, length),
    )


def expected(
    config: ModelConfig, params: Any, shape: MeshShape, rows: int, length: int
) -> dict[str, dict[str, int]]:
    """What one device sends in a step, by the formulas of this module: what -> kind -> bytes.

    Args:
      params: the model's parameters, or their shapes.
    """
    d, h, c = shape.data, shape.head, shape.context
    r, t = rows // d, length // c
    specs = sharding.parameter_specs(params, shape)
    is_spec = dict(is_leaf=lambda x: isinstance(x, PartitionSpec))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(params)]
    gradients, gathered, moved = 0.0, 0.0, 0.0
    for path, x, spec in zip(paths, jax.tree.leaves(params), jax.tree.leaves(specs, **is_spec), strict=True):
        held = _FLOAT * math.prod(x.shape) / (h if HEAD in spec else 1)
        groups = [d * c * h] if "'head'" in path else [d * c]
        pieces = d if DATA in spec else 1
        if "embedding" in path and config.tie_embeddings:  # read twice, reduced twice
            groups.append(d * c * h)
        elif "embedding" in path and h > 1:  # XLA splits the vocabulary over head to look up in it
            moved = 2 * held / d if DATA in spec else 0
            held, pieces = held / h, max(1, pieces / h)
        gradients += sum(2 * (group - 1) / group * held for group in groups)
        # XLA keeps what it has gathered for the backward pass, but not in a loop, nor in a `jax.shard_map` (where
        # projections of one input stand together, and a SwiGLU).
        in_map = "down_proj" in path or (HEAD in spec[-1:] and "g_proj" not in path)
        apart = config.scan_layers or (h > 1 and in_map)
        times = 2 if "blocks" in path and apart else 1
        gathered += times * (pieces - 1) / pieces * held
    stream = _FLOAT * r * t * config.hidden_size
    recurrent, attending = (config.types.count(kind) for kind in ("gated_delta_net", "attention"))
    weights = {"all-gather": gathered, "collective-permute": moved}
    found = {"gradients": {"all-reduce": gradients}, "weights": weights}
    if h > 1:
        gated = config.attention is not None and config.attention.output_gate
        times = 1 + 2 * config.num_layers + 3 * recurrent + (3 if gated else 2) * attending
        found["stream"] = {"all-reduce": times * 2 * (h - 1) / h * stream}
        found["loss"] = {"all-gather": (h - 1) / h * stream}
    if c > 1:
        HV = (config.num_v_heads or config.num_heads) // h
        K, V = config.head_dim, value_width(config.head_dim, config.expand_v)
        n, H = exchange.steps(c), config.num_heads // h
        if exchanged := exchange.expected_bytes(r, t, (H, HV), (K, V), _FLOAT, c):
            found["heads"] = {"all-to-all": recurrent * exchanged}
        else:
            states = HV * K * ((1 + n) * V + max(0, n - 1) * K)
            found["states"] = {"collective-permute": 2 * recurrent * _FLOAT * r * states}
        channels = 2 * H * K + HV * V
        conv = (config.conv_size - 1) * channels
        found["convolution"] = {"collective-permute": 2 * recurrent * _FLOAT * r * conv}
    if c > 1 and config.attention is not None:
        H, kv, D = (getattr(config.attention, name) for name in ("num_heads", "num_kv_heads", "head_dim"))
        if H % (h * c) == 0:
            kv = math.lcm(math.lcm(kv or H, h) // h, c)
            part = _FLOAT * r * t * D * 2 * (H // h + kv)
            found["attention"] = {"all-to-all": 2 * attending * (c - 1) / c * part}
    return {what: {kind: round(n) for kind, n in part.items()} for what, part in found.items()}


def _compiled_alike(config: ModelConfig) -> ModelConfig:
    """The configuration with layers that are compiled once, where they have a period shorter than all of them."""
    kinds = [(kind, config.has_experts(i)) for i, kind in enumerate(config.types)]
    n = len(kinds)
    periodic = any(n % p == 0 and kinds == kinds[:p] * (n // p) for p in range(1, n))
    return dataclasses.replace(config, scan_layers=periodic)


def _lying(arrays: Any, shardings: Any) -> Any:
    """Shapes of arrays that lie so."""
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), arrays, shardings
    )


def _devices(number: int) -> list[jax.Device]:
    """So many devices of the CPU, of which JAX begins with as many as JAX_NUM_CPU_DEVICES says."""
    devices = jax.devices("cpu")
    if len(devices) < number:
        raise RunError(f"--mesh: expected at most {len(devices)} devices, JAX_NUM_CPU_DEVICES, got {number}")
    return devices[:number]
