"""One call of the rule: its arrays, the names of their dimensions, and its options. A leaf of the room.

A call whose decay and strengths have one number a head is the gated delta rule; the others are the delta rule with a
decay of each key channel, and with what is erased apart from what is written.
"""

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from gdn_jax.shapes import RuleArrays

HEADS, CHANNELS, APART, ERASURES = "heads", "channels", "apart", "erasures"
"""Gates of a call: decay and beta of each head; a decay of each channel with beta; erase and write apart; a decay of
each channel with an erasure at a key of its own before the write."""


class Arrays(NamedTuple):
    """Array arguments of one call, as the caller gave them; see `delta_rule`.

    Where only shapes count they may be `jax.ShapeDtypeStruct`, and for `partitioning` they are the names of their
    dimensions. None is an argument that is absent or not read. beta stands for both strengths: it is `erase`, and
    `write` is None (`Call.is_beta`). With gates `ERASURES` `erase` has the strengths of the erasure and of the write
    [B, T, HO, 2], and `write` the keys [B, T, Hk, K] that are erased at.
    """

    q: Any
    k: Any
    v: Any
    g: Any
    erase: Any
    write: Any
    initial_state: Any
    cu_seqlens: Any
    segment_ids: Any

    @property
    def floats(self) -> tuple[Any, ...]:
        """The arguments that have a derivative."""
        return self[:7]

    @property
    def of_heads(self) -> RuleArrays:
        """The arguments of a call with gates of each head, as its kernels take them."""
        q, k, v, g, beta, _, *rest = self
        return RuleArrays(q, k, v, g, beta, *rest)

    @property
    def num_heads(self) -> int:
        """HO, also where there is no q."""
        gates = (y.shape[2] for y in (self.g, self.erase, self.write) if y is not None)
        return next(gates, max((self.k if self.q is None else self.q).shape[2], self.v.shape[2]))


class Call(NamedTuple):
    """Options of a call. Plain forms and kernels are compiled for each value, as for each shape."""

    use_qk_l2norm: bool
    state_layout: str
    gates: str = HEADS
    """Says what the gates are of: `HEADS`, `CHANNELS`, `APART` or `ERASURES`."""
    chunk_size: int = 64
    form: str = "chunked"
    """The plain form, "recurrent" or "chunked"."""
    kernels: Any = None
    """The `kernels.kernel_set.KernelSet`; None for a plain form."""
    known_lengths: bytes | None = None
    """cu_seqlens as int64, where its values are known while tracing: the kernels split their work by them."""
    shards: int | None = None
    """Devices that XLA is expected to split the call over, by rows and by heads; None where it is not to split it.
    Any other number of shards is right too, but has its sequences cut into segments as suits this one."""
    scale: float = 1.0
    """The factor of the output, one that the kernels hold."""
    segment_chunks: int | None = None
    """Chunks of every segment, 0 for rows that are not cut; None for a choice from the shapes."""

    @property
    def is_beta(self) -> bool:
        """Whether erase stands for both strengths, a number of each head or None, and write is None."""
        return self.gates != APART

    @property
    def keys(self) -> tuple[str, ...]:
        """The fields of `Arrays` that use_qk_l2norm brings to unit length."""
        return ("q", "k", "write") if self.gates == ERASURES else ("q", "k")

    def known(self, x: Arrays) -> Arrays:
        """The arguments, with the lengths that are known."""
        lengths = self.known_lengths
        return x if lengths is None else x._replace(cu_seqlens=np.frombuffer(lengths, np.int64))


class RuleAxes(NamedTuple):
    """Names of the dimensions of a call's arrays, for `on_shards` and `on_explicit_shards`."""

    sizes: dict[str, int]
    """Parts that rows "b" and heads "h" can be split into: no two parts share a head of any array."""
    inputs: Arrays

    @classmethod
    def of(cls, x: Arrays) -> "RuleAxes":
        """Names the dimensions of a call's arguments."""
        heads = math.gcd(*(y.shape[2] for y in x[:3] if y is not None))
        g, erase, write = ("b t h ." if getattr(y, "ndim", 3) == 4 else "b t h" for y in x[3:6])
        state = "b h . ." if x.cu_seqlens is None else ". h . ."
        names = Arrays("b t h k", "b t h k", "b t h v", g, erase, write, state, ".", "b t")
        return cls({"b": x.k.shape[0], "h": heads}, names)

    @property
    def outputs(self) -> tuple[str, str]:
        """Names of the dimensions of o and the final states, and of their cotangents."""
        return self.inputs.v, self.inputs.initial_state

    def shard(self, x: Arrays, shards: int) -> Arrays:
        """Shapes of one of `shards` shards: rows are split as far as they divide, then heads."""
        rows = math.gcd(self.sizes["b"], shards)
        parts = {"b": rows, "h": math.gcd(self.sizes["h"], shards // rows)}

        def one(y: Any, names: str) -> Any:
            if y is None:
                return None
            shape = [n // parts.get(name, 1) for n, name in zip(y.shape, names.split(), strict=True)]
            return jax.ShapeDtypeStruct(shape, y.dtype)

        return Arrays._make(map(one, x, self.inputs))


def gates_of(x: Arrays, beta: Any) -> str:
    """Returns what the gates of a call are of.

    Args:
      beta: as the caller gave it.
    """
    if x.write is not None or (x.erase is not None and beta is None):
        return APART
    return HEADS if getattr(x.g, "ndim", 3) == 3 else CHANNELS
