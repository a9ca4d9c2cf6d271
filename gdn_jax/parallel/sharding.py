"""Places on a mesh for the parameters of a model, the state of its optimiser and its batches.

    parameter                           along head                   along data, where parameters are sharded
    q, k, v, a, b, f, w, g projections  their outputs, by heads      their inputs
    q_b, kv_b, e_b projections          their outputs, by heads      their inputs
    o projection                        its inputs, by heads         its outputs
    gate and up projections             the inner width              the width of the stream
    down projection                     the inner width              the width of the stream
    A, B of a low-rank change           the side of the projection   inputs, rank
                                        that its weight has there
    A_log, dt_bias                      heads                        -
    embedding and head                  -                            the vocabulary, else the width of the stream
    everything else                     -                            the first dimension that divides

A matrix whose dimension does not divide keeps it whole along data; along head that is refused.
"""

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gdn_jax.parallel.mesh import AXES, CONTEXT, DATA, HEAD, MeshShape

_OUTPUTS = {"q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj", "gate_proj", "up_proj"}
_OUTPUTS |= {"f_proj", "f_b_proj", "e_b_proj", "w_proj", "g_b_proj", "q_b_proj", "kv_b_proj"}
_INPUTS = {"o_proj", "down_proj"}
_HEADS = {"A_log", "dt_bias"}


def check(config: Any, shape: MeshShape, batch: int, length: int) -> None:
    """Refuses a model or a batch that the devices of a mesh do not divide.

    Args:
      config: the model's, a `gdn_jax.models.ModelConfig`.
      shape: of the mesh.
      batch, length: rows of a batch that are computed at once, and their tokens.

    Raises:
      ValueError: names the axis, what was expected and what came.
    """
    HV = config.num_heads if config.num_v_heads is None else config.num_v_heads
    heads = math.gcd(config.num_heads, HV)
    if heads % shape.head:
        raise ValueError(
            f"head: expected a divisor of the model's heads, {heads} of keys and values, got {shape.head}"
        )
    if config.mlp_size % shape.head:
        raise ValueError(
            f"head: expected a divisor of the SwiGLU's inner width {config.mlp_size}, got {shape.head}"
        )
    if shape.context > 1 and not config.mixer.splits_tokens(config):
        which = f"the rule {config.rule}" if config.rule != type(config).rule else config.mixer.title
        raise NotImplementedError(f"context: {which} does not run over split tokens, the delta rules do")
    if shape.context > 1 and config.window_attention is not None:
        raise NotImplementedError(
            "context: layers of type window_attention do not run over split tokens: devices would exchange all "
            "tokens of a row for some heads, where the few of a window would do"
        )
    if batch % shape.data:
        raise ValueError(f"data: expected a divisor of the {batch} rows of a batch, got {shape.data}")
    if length % shape.context:
        raise ValueError(f"context: expected a divisor of the {length} tokens of a row, got {shape.context}")
    if shape.context > 1 and length // shape.context < config.conv_size - 1:
        least = config.conv_size - 1
        raise ValueError(
            f"context: expected at least {least} tokens of a row on each device, got {length // shape.context}"
        )


def parameter_specs(params: Any, shape: MeshShape) -> Any:
    """Returns the PartitionSpec of every parameter.

    Args:
      params: a pytree of arrays or shapes whose paths have the names of the modules, as `nnx.state(model)` has.
      shape: of the mesh.
    """
    return jax.tree_util.tree_map_with_path(lambda path, x: _spec(path, x.shape, shape), params)


def numbers_of_a_device(params: Any, shape: MeshShape) -> int:
    """Returns how many numbers of the parameters each device holds.

    Args:
      params, shape: as for `parameter_specs`.

    Raises:
      ValueError: a dimension does not divide, as `parameter_specs`.
    """
    sizes = {name: getattr(shape, name) for name in AXES}

    def local(x, spec: PartitionSpec) -> int:
        return math.prod(x.shape) // math.prod(sizes[axis] for axis in spec if axis is not None)

    leaves = jax.tree.map(local, params, parameter_specs(params, shape))
    return sum(jax.tree.leaves(leaves))


def state_shardings(optimizer: Any, params: Any, mesh: Mesh, shape: MeshShape) -> Any:
    """Returns NamedShardings of the parameters and of the state of their optimiser.

    Args:
      optimizer: of optax.
      params, shape: as for `parameter_specs`.
      mesh: made of the shape.

    Returns:
      Pytrees of shardings, like params and like `optimizer.init(params)`.
    """
    import optax

    specs = parameter_specs(params, shape)
    state = jax.eval_shape(optimizer.init, params)
    state_specs = optax.tree_map_params(
        optimizer, lambda _, spec: spec, state, specs, transform_non_params=lambda _: PartitionSpec()
    )

    def sharding(spec):
        return NamedSharding(mesh, spec)

    is_spec = dict(is_leaf=lambda x: isinstance(x, PartitionSpec))
    return jax.tree.map(sharding, specs, **is_spec), jax.tree.map(sharding, state_specs, **is_spec)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch's tokens [B, T] on a mesh of `MeshShape.make`.

    Args:
      mesh: the mesh.
    """
    return NamedSharding(mesh, PartitionSpec(DATA, CONTEXT))


def _spec(path: tuple, size: tuple[int, ...], shape: MeshShape) -> PartitionSpec:
    names = {str(getattr(key, "key", getattr(key, "name", ""))) for key in path}
    entries: list[str | None] = [None] * len(size)
    if shape.head > 1 and size:
        # A change A B has the projection's inputs in A and its outputs in B.
        if names & _HEADS or (names & _INPUTS and not names & {"b"}):
            entries[0] = HEAD
        elif names & _OUTPUTS and not names & {"a"}:
            entries[-1] = HEAD
        for n, entry in zip(size, entries, strict=True):
            if entry == HEAD and n % shape.head:
                name = jax.tree_util.keystr(path)
                raise ValueError(f"head: expected a divisor of {n}, the width of {name}, got {shape.head}")
    if shape.shard_parameters and shape.data > 1:
        free = [i for i, n in enumerate(size) if entries[i] is None and n % shape.data == 0]
        if free and len(size) >= 2:
            entries[free[0]] = DATA
    return PartitionSpec(*entries)
