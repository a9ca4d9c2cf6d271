"""The protocol that sets of kernels share, and what a forward leaves: its names, and how shards hand it on."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
from jax.ad_checkpoint import checkpoint_name

from gdn_jax.rule.call import Arrays, Call, RuleAxes
from gdn_jax.rule.chunks.recurrence import INVERSE_NAME, STATES_NAME
from gdn_jax.rule.state_passing import StatePassing
from gdn_jax.shapes import AnyStates, Dims, Outputs

# The kernels' own records, which are imported inside calls.
Residuals = Any
OutputCotangents = Any  # pallas_kernels.backward.rule

GATES_NAME, OUTPUT_NAME = "gdn_gates", "gdn_output"
RESIDUAL_NAMES = (INVERSE_NAME, STATES_NAME, GATES_NAME, OUTPUT_NAME)
"""`checkpoint_name`s of all that the forward kernels write, the final states apart: who keeps these arrays runs no
forward kernel again in the backward pass. The output is among them for what follows the rule."""


ITEMS = "items"
"""Name of a dimension of residuals, see `KernelSet.axes`."""


@runtime_checkable
class KernelSet(Protocol):
    """Kernels of the rule's forward and backward."""

    @property
    def name(self) -> str:
        """The name by which a call asks for them."""
        ...

    @property
    def gates(self) -> tuple[str, ...]:
        """The kinds of gates that they take, see `Call.gates`."""
        ...

    def state_passing(self, call: Call, x: Arrays) -> StatePassing | None:
        """One device's part of a call whose tokens are split over devices; None where they pass no states."""
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

    def reason(self, x: Arrays) -> str | None:
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

    def axes(self, axes: RuleAxes, residuals: Residuals) -> Residuals:
        """Names of the dimensions of residuals, see `on_shards`, in the places of the arrays.

        `ITEMS` is a dimension of the items or visits of all rows, row after row. Packed sequences of equal lengths
        are rows.
        """
        ...

    def named(self, residuals: Residuals) -> Residuals:
        """The residuals with the names of `RESIDUAL_NAMES`."""
        ...


class OfModules:
    """Methods of sets of kernels that refuse what the module of their forward refuses."""

    called = "these kernels"
    """Their name in a refusal."""

    def forward_module(self) -> Any:
        """The module of the forward."""
        raise NotImplementedError

    def device_reason(self) -> str | None:
        """See `KernelSet`."""
        from pallas_kernels.device import launch

        return launch.device_reason(self.forward_module().NEEDS, self.called)

    def check_supported(self, dims: Dims, dtype: Any, *, chunk_size: int, packed: bool) -> str | None:
        """See `KernelSet`."""
        return self.forward_module().check_supported(dims, dtype, chunk_size=chunk_size, packed=packed)

    def reason(self, x: Arrays) -> str | None:
        """See `KernelSet`."""
        del x


class InSegments(OfModules):
    """A method of sets of kernels that cut sequences into segments, whose states and maps the residuals hold."""

    def settled(self: Any, call: Call, x: Arrays) -> Call:
        """See `KernelSet`. What is kept of segments has a shape: all shards are cut as is best for those expected."""
        segments = jax.eval_shape(lambda x: self.forward(call, x)[2], x).segments
        return call._replace(segment_chunks=0 if segments is None else segments.items.split.segment_chunks)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ByRow:
    """An array of residuals whose items have an axis for each row, so that rows can be split; or names of its
    dimensions."""

    array: Any


def by_row(kernels: KernelSet, x: Arrays, residuals: Residuals) -> Residuals:
    """The residuals of a call with `ByRow` in the places of arrays that have items."""

    def one(y: jax.Array, names: str) -> Any:
        return ByRow(y.reshape(x.k.shape[0], -1, *y.shape[1:])) if ITEMS in names else y

    return jax.tree.map(one, residuals, kernels.axes(RuleAxes.of(x), residuals))


def axes_by_row(kernels: KernelSet, axes: RuleAxes, residuals: Residuals) -> Residuals:
    """Names of the dimensions of residuals that came from `by_row`."""
    rows = axes.inputs.initial_state.split()[0]

    def one(y: Any, names: str) -> Any:
        return ByRow(names.replace(ITEMS, f"{rows} .")) if isinstance(y, ByRow) else names

    names = kernels.axes(axes, jax.eval_shape(whole, residuals))
    return jax.tree.map(one, residuals, names, is_leaf=lambda y: isinstance(y, ByRow))


def whole(residuals: Residuals) -> Residuals:
    """The residuals that `by_row` was given, or those of a shard, which have the number of its items."""
    from pallas_kernels.work.residuals import Segments

    def counted(y: Any) -> Any:
        if not isinstance(y, Segments):
            return y
        split = y.items.split._replace(num_items=y.starts.shape[0])
        return y._replace(items=y.items._replace(split=split))

    def joined(y: Any) -> Any:
        return y.array.reshape(-1, *y.array.shape[2:]) if isinstance(y, ByRow) else y

    residuals = jax.tree.map(joined, residuals, is_leaf=lambda y: isinstance(y, ByRow))
    return jax.tree.map(counted, residuals, is_leaf=lambda y: isinstance(y, Segments))


def of_items(tree: Any) -> Any:
    """Names of the dimensions [items, heads, ..] of every array."""
    return jax.tree.map(lambda y: f"{ITEMS} h" + " ." * (y.ndim - 2), tree)


def axes_of_segments(segments: Any) -> Any:
    """The same of a `pallas_kernels.work.residuals.Segments` or None; its tables are the same for all heads."""
    if segments is None:
        return None
    starts, m_t, items = segments
    return segments._make((of_items(starts), of_items(m_t), jax.tree.map(lambda _: ".", items)))


def named_segments(segments: Any) -> Any:
    """A `pallas_kernels.work.residuals.Segments` or None, by the names of `RESIDUAL_NAMES`."""
    return segments and segments._make((*jax.tree.map(as_states, segments[:2]), segments.items))


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
