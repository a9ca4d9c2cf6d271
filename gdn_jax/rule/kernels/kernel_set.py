"""The protocol that sets of kernels share, and names for what a forward leaves."""

from typing import Any, Protocol, runtime_checkable

import jax
from jax.ad_checkpoint import checkpoint_name

from gdn_jax.rule.call import Arrays, Call, RuleAxes
from gdn_jax.rule.chunks.recurrence import INVERSE_NAME, STATES_NAME
from gdn_jax.shapes import AnyStates, Dims, Outputs

# The kernels' own records, which are imported inside calls.
Residuals = Any
OutputCotangents = Any  # pallas_kernels.backward.rule

GATES_NAME, OUTPUT_NAME = "gdn_gates", "gdn_output"
RESIDUAL_NAMES = (INVERSE_NAME, STATES_NAME, GATES_NAME, OUTPUT_NAME)
"""`checkpoint_name`s of all that the forward kernels write, the final states apart: who keeps these arrays runs no
forward kernel again in the backward pass. The output is among them for what follows the rule."""


@runtime_checkable
class KernelSet(Protocol):
    """Kernels of the rule's forward and backward.

    `pack` and `unpack` are for shards: a part of a record of residuals is a record only together with what the call
    says, and with `settled` all shards leave the same kind of record.
    """

    @property
    def name(self) -> str:
        """The name by which a call asks for them."""
        ...

    @property
    def gates(self) -> tuple[str, ...]:
        """The kinds of gates that they take, see `Call.gates`."""
        ...

    @property
    def hands_over_states(self) -> bool:
        """Whether `parallel.context_kernels` has them for rows whose tokens are split over devices."""
        ...

    def device_reason(self) -> str | None:
        """Why JAX's default device cannot run them; None if it can."""
        ...

    def check_supported(self, dims: Dims, dtype: Any, *, chunk_size: int, packed: bool) -> str | None:
        """Why they cannot run a call, from shapes and dtypes; None if they can.

        Args:
          dtype: of q, k and v.
          packed: whether cu_seqlens is given.
        """
        ...

    def gradients_reason(self, x: Arrays) -> str | None:
        """Why they cannot run the derivative of a call that they run; None if they can.

        Where they cannot, it is that of the chunked form in plain JAX, from the arguments alone.
        """
        ...

    def forward(self, call: Call, x: Arrays) -> tuple[Outputs, AnyStates, Residuals]:
        """Outputs, final states and residuals of a call that is not split."""
        ...

    def backward(self, call: Call, x: Arrays, residuals: Residuals, cotangents: OutputCotangents) -> Arrays:
        """Cotangents of the arguments of a call that is not split, with q and k as they are after the L2 norm."""
        ...

    def settled(self, call: Call, x: Arrays) -> Call:
        """The call with all that its shards decide alike.

        Args:
          x: shapes of one of the shards that are expected.
        """
        ...

    def settled_by(self, call: Call, residuals: Residuals) -> Call:
        """The same, as a forward decided that left these."""
        ...

    def pack(self, residuals: Residuals) -> Any:
        """The arrays of residuals."""
        ...

    def unpack(self, call: Call, arrays: Any) -> Residuals:
        """The residuals again, of a call that is settled."""
        ...

    def axes(self, axes: RuleAxes, arrays: Any) -> Any:
        """Names of the dimensions of those arrays, see `on_shards`. Packed sequences of equal lengths are rows."""
        ...

    def named(self, residuals: Residuals) -> Residuals:
        """The residuals with the names of `RESIDUAL_NAMES`."""
        ...


class InSegments:
    """Methods of sets of kernels that cut sequences into segments, whose states and maps the residuals hold."""

    def settled(self: Any, call: Call, x: Arrays) -> Call:
        """See `KernelSet`. What is kept of segments has a shape: all shards are cut as is best for those expected."""
        return self.settled_by(call, jax.eval_shape(lambda x: self.forward(call, x)[2], x))

    def settled_by(self, call: Call, residuals: Residuals) -> Call:
        """See `KernelSet`."""
        segments = residuals.segments
        return call._replace(segment_chunks=0 if segments is None else segments.items.split.segment_chunks)


def of_heads(cotangents: Any) -> Arrays:
    """Cotangents of the kernels, a `pallas_kernels.backward.rule.Cotangents`, as those of a call's arrays."""
    dq, dk, dv, dg, dbeta, dh_0 = cotangents
    return Arrays(dq, dk, dv, dg, dbeta, None, dh_0, None, None)


def as_gates(x: jax.Array) -> jax.Array:
    """The array by the name of gates of residuals."""
    return checkpoint_name(x, GATES_NAME)


def as_inverse(x: jax.Array) -> jax.Array:
    """The array by the name of what is made of the inverse."""
    return checkpoint_name(x, INVERSE_NAME)


def as_states(x: jax.Array) -> jax.Array:
    """The array by the name of states."""
    return checkpoint_name(x, STATES_NAME)
