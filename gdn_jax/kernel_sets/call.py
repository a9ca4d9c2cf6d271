"""A call by kernels, the protocol that sets of kernels share, and names for what a forward leaves."""

from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from gdn_jax.chunks.recurrence import INVERSE_NAME, STATES_NAME
from gdn_jax.partitioning import RuleAxes
from gdn_jax.shapes import AnyStates, Dims, Outputs, RuleArrays

# The kernels' own records, which are imported inside calls.
Residuals = Any
Cotangents = OutputCotangents = Any  # pallas_kernels.backward.rule

GATES_NAME, OUTPUT_NAME = "gdn_gates", "gdn_output"
RESIDUAL_NAMES = (INVERSE_NAME, STATES_NAME, GATES_NAME, OUTPUT_NAME)
"""`checkpoint_name`s of all that the forward kernels write, the final states apart: who keeps these arrays runs no
forward kernel again in the backward pass. The output is among them for what follows the rule."""


class Call(NamedTuple):
    """Everything that a call is compiled for, besides shapes."""

    use_qk_l2norm: bool
    state_layout: str
    known_lengths: bytes | None
    """cu_seqlens as int64, where its values are known while tracing: the kernels split their work by them."""
    shards: int | None = None
    """Devices that XLA is expected to split the call over, by rows and by heads; None where it is not to split it.
    Any other number of shards is right too, but has its sequences cut into segments as suits this one."""
    scale: float = 1.0
    """The factor of the output, one that the kernels hold."""
    segment_chunks: int | None = None
    """Chunks of every segment, 0 for rows that are not cut; None for a choice from the shapes."""
    kernels: str = "mosaic_gpu"
    """The set of kernels, by its name."""

    def arrays(self, x: RuleArrays) -> RuleArrays:
        """The arguments of the call, with the lengths that are known."""
        known = self.known_lengths
        return x if known is None else x._replace(cu_seqlens=np.frombuffer(known, np.int64))


class KernelSet(Protocol):
    """Kernels of the rule's forward and backward.

    `pack` and `unpack` are for shards: a part of a record of residuals is a record only together with what the call
    says, and with `settled` all shards leave the same kind of record.
    """

    name: str
    """The name by which a call asks for them."""

    def device_reason(self) -> str | None:
        """Why JAX's default device cannot run them; None if it can."""
        ...

    def check_supported(self, dims: Dims, dtype: Any, *, chunk_size: int, packed: bool) -> str | None:
        """Why they cannot run a call and its derivative, from shapes and dtypes; None if they can.

        Args:
          dtype: of q, k and v.
          packed: whether cu_seqlens is given.
        """
        ...

    def forward(self, call: Call, x: RuleArrays) -> tuple[Outputs, AnyStates, Residuals]:
        """Outputs, final states and residuals of a call that is not split."""
        ...

    def backward(
        self, call: Call, x: RuleArrays, residuals: Residuals, cotangents: OutputCotangents
    ) -> Cotangents:
        """Cotangents of the arguments of a call that is not split, with q and k as they are after the L2 norm."""
        ...

    def settled(self, call: Call, x: RuleArrays) -> Call:
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


def as_gates(x: jax.Array) -> jax.Array:
    """The array by the name of gates of residuals."""
    return checkpoint_name(x, GATES_NAME)


def as_inverse(x: jax.Array) -> jax.Array:
    """The array by the name of what is made of the inverse."""
    return checkpoint_name(x, INVERSE_NAME)


def as_states(x: jax.Array) -> jax.Array:
    """The array by the name of states."""
    return checkpoint_name(x, STATES_NAME)
