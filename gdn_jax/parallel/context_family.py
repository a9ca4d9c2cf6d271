"""The family's rule over tokens that are split over the devices of a mesh axis: `context` with gates of each channel.

What a device's tokens do to a state is a matrix [K, K] here too, and so is all that is handed over.
"""

import dataclasses
from functools import partial
from typing import Any, ClassVar

import jax
from jax import lax
from jaxtyping import Array, Float

from gdn_jax import xla
from gdn_jax.family import forms
from gdn_jax.family import ops as family
from gdn_jax.parallel import context, exchange
from gdn_jax.parallel.context_plain import Plain, with_zeros
from gdn_jax.shapes import (
    AnyStates,
    Keys,
    KnownOffsets,
    Outputs,
    Queries,
    Scale,
    SegmentIds,
    Strength,
    Values,
    check_choice,
)


@dataclasses.dataclass(frozen=True)
class PlainChannels(Plain):
    """The family's plain form with these options on one device's tokens."""

    record: ClassVar[Any] = forms.Arrays

    def run(self, call: xla.Call, x: forms.Arrays) -> tuple[jax.Array, jax.Array]:
        """Outputs and final states of this device's tokens."""
        return forms.rule(call, x, self.scale)

    def widened(self, x: forms.Arrays, columns: int) -> forms.Arrays:
        """The tokens with so many more columns of values, which are zeros."""
        write = x.write
        if write is not None and write.ndim == 4:
            write = with_zeros(write, columns)
        return x._replace(v=with_zeros(x.v, columns), write=write)


def delta_rule(
    q: Queries,
    k: Keys,
    v: Values,
    g: Float[Array, "B T HO"] | Float[Array, "B T HO K"] | None = None,
    beta: Strength | None = None,
    erase: Float[Array, "B T HO"] | Float[Array, "B T HO K"] | None = None,
    write: Float[Array, "B T HO"] | Float[Array, "B T HO V"] | None = None,
    *,
    axis_name: str,
    scale: Scale | None = None,
    initial_state: AnyStates | None = None,
    cu_seqlens: KnownOffsets | None = None,
    segment_ids: SegmentIds | None = None,
    use_qk_l2norm: bool = False,
    state_layout: str = "kv",
    chunk_size: int = 64,
    implementation: str | None = None,
    by: str | None = None,
) -> tuple[Outputs, AnyStates]:
    """`gdn_jax.delta_rule` of rows whose tokens are split over a mesh axis in order, inside `jax.shard_map`.

    Args: those of `gdn_jax.delta_rule`. q, k, v, g, beta, erase, write and segment_ids are this device's tokens;
      initial_state and cu_seqlens are those of the whole rows, the same on every device of the axis.
      axis_name, by: as for `context.gated_delta_rule`, the faster one for g and beta of each head.

    Returns:
      o of this device's tokens, and the final states of the whole sequences, the same on every device of the axis.

    Raises:
      ValueError, NotImplementedError: as `gdn_jax.delta_rule`; ValueError where heads cannot be exchanged.

    Numerics: as `context.gated_delta_rule`.
    """
    options: dict[str, Any] = dict(use_qk_l2norm=use_qk_l2norm, chunk_size=chunk_size)
    lies: dict[str, Any] = dict(axis_name=axis_name, state_layout=state_layout)
    erase, write = family.strengths(beta, erase, write)
    x = forms.Arrays(q, k, v, g, erase, write, initial_state, cu_seqlens, segment_ids)
    dims, scale, _ = family.check_call(x, scale, state_layout, chunk_size, implementation)
    check_choice("by", by, ("states", "heads", None))
    devices = lax.axis_size(axis_name)
    if by is None:
        gates = sum(1 if y.ndim == 3 else y.shape[3] for y in (x.g, x.erase, x.write) if y is not None)
        by = "heads" if exchange.pays(dims, q.dtype.itemsize, devices, gates) else "states"
    if by == "heads":
        if reason := exchange.reason_against(dims, devices):
            raise ValueError(f"by: expected 'states', for {reason}; got 'heads'")
        options["implementation"] = implementation
        return exchange.rule_by_heads(_of_gates, x, dims, **lies, **options, scale=scale)
    if implementation == "mosaic_gpu":
        raise NotImplementedError("implementation 'mosaic_gpu': states are handed over in plain JAX alone")
    form = partial(PlainChannels, implementation=implementation or "chunked", **options)
    return context.by_states(form, x, dims, **lies, scale=scale)


def _of_gates(q, k, v, g, erase, write, **options: Any) -> tuple[jax.Array, jax.Array]:
    return family.delta_rule(q, k, v, g, erase=erase, write=write, **options)
