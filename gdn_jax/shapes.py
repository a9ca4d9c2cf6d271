"""Notation, array types, arguments that go from room to room, and boundary checks.

A leaf: it imports no other module of the project.

Dimensions (upper case everywhere, in names, docstrings and jaxtyping strings):

    B     batch                                  T     tokens of a row
    N     sequences (B, or len(cu_seqlens) - 1)  C     tokens of a chunk
    Hq    query heads                            Hk    key heads
    HV    value heads                            HO    state, gate and output heads, max(Hq, HV)
    K     width of a key (and query)             V     width of a value (and output)

Arrays:

    q k v   queries [B, T, Hq, K], keys [B, T, Hk, K], values [B, T, HV, V]
    g       log decay, natural logarithm, <= 0 [B, T, HO]; decay is exp(g), "linear alpha" elsewhere
    beta    write strength [B, T, HO], in [0, 1], or [0, 2] with negative eigenvalues; erase and write in its place
    h       recurrent state [N, HO, K, V] ("kv") or [N, HO, V, K] ("vk")
    o       outputs [B, T, HO, V]
    g_cum   inclusive cumulative log decay inside a chunk
    kkt     strictly lower triangular matrix before the solve; A = (I + kkt)^-1
    w, u    WY keys and values; v_new = u - w h
    do dh_T dq dk dv dg dbeta dh_0   cotangents; dh is that of the state h

Head i of the output reads head i // (HO // Hx) of an input with Hx heads.

Inside the kernels the state and its cotangent are transposed, h and dh [V, K], gates are base-2 exponents, and one
chunk of one head has

    G       g2_cum [C], inclusive cumulative log2 decay; gl = 2^G_last
    D, Dr   2^G and 2^(G_last - G) [C]: decay from the chunk's start to a token, and from a token to the chunk's end
    Gamma   2^(G_i - G_j) [C, C] for i >= j, 0 above
    L, A    kkt without decay, and (I + L)^-1 [C, C];   T = (A * Gamma) diag(beta)
    P       scale (Q K^T) * Gamma [C, C]
    W, U    V^T - (h K^T) D, and W T^T [V, C]: the corrected values, which are written
    E, M    what a segment does to a state: h -> h M^T + E

    span    tokens of a sequence in a row, and the chunks of the common grid that they touch
    visit   a chunk and a sequence that touches it
    item    what one CTA walks over: a sequence, or a segment of one
"""

from itertools import pairwise
from typing import Any, Literal, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

Queries = Float[Array, "B T Hq K"]
Keys = Float[Array, "B T Hk K"]
Values = Float[Array, "B T HV V"]
LogDecay = Float[Array, "B T HO"]
Strength = Float[Array, "B T HO"]
AnyLogDecay = LogDecay | Float[Array, "B T HO K"]
"""Log decay of each head, or of each channel."""
Erase = Strength | Float[Array, "B T HO K"]
Write = Strength | Float[Array, "B T HO V"]
States = Float[Array, "N HO K V"]
AnyStates = Float[Array, "N HO _ _"]
"""States in either layout."""
Outputs = Float[Array, "B T HO V"]
Offsets = Int[Array, "N1"]
"""Borders of packed sequences, cu_seqlens."""
KnownOffsets = Int[Array, "N1"] | Int[np.ndarray, "N1"]
SegmentIds = Int[Array, "B T"]
Scale = float | Float[Array, ""]

STATE_LAYOUTS = ("kv", "vk")
MAX_HEAD_DIM = 256


class Dims(NamedTuple):
    """Sizes of one call of the rule, see the module docstring."""

    B: int
    T: int
    N: int
    Hq: int
    Hk: int
    HV: int
    HO: int
    K: int
    V: int


@jax.tree_util.register_static
class Number(float):
    """A number that a program is made for: as an argument of a compiled function it is part of what is compiled."""


class RuleArrays(NamedTuple):
    """Array arguments of one call of the rule, as the caller gave them; see `gated_delta_rule`.

    Where only shapes count they may be `jax.ShapeDtypeStruct`, and for `partitioning` they are the names of their
    dimensions. None is an argument that is absent or not read.
    """

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    initial_state: Any
    cu_seqlens: Any
    segment_ids: Any

    @property
    def dims(self) -> Dims:
        """The sizes of arguments that `rule_dims` has checked."""
        (B, T, Hk, K), Hq, (HV, V) = self.k.shape, self.q.shape[2], self.v.shape[2:]
        N = B if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
        return Dims(B, T, N, Hq, Hk, HV, max(Hq, HV), K, V)


class Choice(NamedTuple):
    """How the experts of a token are chosen."""

    per_token: int
    groups: int
    """Groups of experts that lie side by side. One counts the sum of its two largest."""
    kept_groups: int
    """Groups that a token chooses its experts from."""
    normalise: bool
    """Whether weights are divided by their sum."""
    factor: float
    """Factor of the weights."""
    scoring: Literal["sigmoid", "softmax"] = "sigmoid"
    """Function of the router's products that gives the weights."""


class Convolution(NamedTuple):
    """A short convolution of the first results of a token's product, with SiLU."""

    state: Float[Array, "B C W1"]
    """Inputs before the token, oldest first."""
    filters: Float[Array, "C W"]
    bias: Float[Array, " C"] | None


class LayerScales(NamedTuple):
    """Scales and narrow projections that a layer of one token has beside matrices of codes of E4M3.

    A matrix W[f, d] is codes[f, d] * scales[f // 128, d // 128].
    """

    inputs: Float[Array, "M N"]
    """Scales of the projections of the layer's input."""
    output: Float[Array, "P Q"]
    """Scales of the output projection."""
    narrow: Float[Array, "S D"]
    """Projections of the input whose weights are numbers; their results come after those of the codes."""


class ArgumentError(ValueError):
    """An argument that cannot be used.

    Fields:
      name: of the argument.
      expected, got: what it may be, and what it is, in words.
    """

    def __init__(self, name: str, expected: str | None = None, got: object = None):
        # Pickle, copy and keras make an exception again from its text alone.
        super().__init__(name if expected is None else f"{name}: expected {expected}, got {got}")
        self.name, self.expected, self.got = name, expected or "", str(got)


def _fail(name: str, expected: str, got: object) -> NoReturn:
    raise ArgumentError(name, expected, got)


def check_array(name: str, x: object, shape: tuple[int | None, ...], letters: str) -> None:
    """Raises ValueError unless x is an array of that shape (None matches any size)."""
    got = getattr(x, "shape", None)
    if got is None:
        _fail(name, f"an array [{letters}]", type(x).__name__)
    if len(got) != len(shape) or any(s is not None and s != n for s, n in zip(shape, got, strict=True)):
        want = ", ".join("?" if s is None else str(s) for s in shape)
        _fail(name, f"shape [{letters}] = [{want}]", list(got))


def check_numbers(name: str, shape: tuple[Any, ...]) -> None:
    """Raises ValueError unless every size is a number, not a symbol of `jax.export`."""
    if not all(isinstance(size, int) for size in shape):
        got = f"[{', '.join(map(str, shape))}]"
        _fail(name, "sizes that are numbers (with jax.export only the batch may be symbolic)", got)


def check_channels(name: str, x: Any, shape: tuple[int | None, ...], width: int, letters: str) -> None:
    """Raises ValueError unless x is a floating array of one number a head [*shape], or a channel [*shape, width].

    Args:
      letters: of both axes, such as "B, T, HO, K"; the last is the width's.
    """
    if len(getattr(x, "shape", ())) == len(shape):
        check_array(name, x, shape, letters.rpartition(", ")[0])
    else:
        check_array(name, x, (*shape, width), letters)
    check_floating(name, x)


def check_floating(name: str, x: Any) -> None:
    """Raises ValueError unless x is an array of f16, bf16, f32 or f64."""
    if not hasattr(x, "dtype"):
        _fail(name, "a floating array", type(x).__name__)
    if x.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64):
        _fail(name, "dtype float16, bfloat16, float32 or float64", x.dtype)


def check_integer(name: str, x: Any) -> None:
    """Raises ValueError unless x, an array, is of integers."""
    if not jnp.issubdtype(x.dtype, jnp.integer):
        _fail(name, "an integer dtype", x.dtype)


def widened(x: Any) -> Any:
    """The same integers in at least 32 bits, of JAX or NumPy.

    JAX calculates and compares in the dtype of the array, to which it wraps a number: in int8 100 * 2 is -56.
    """
    return x.astype(np.int32) if x.dtype.itemsize < 4 else x


def check_choice(name: str, value: object, choices: tuple) -> None:
    """Raises ValueError unless value is one of choices."""
    if value not in choices:
        _fail(name, "one of " + ", ".join(map(repr, choices)), repr(value))


def check_type(name: str, value: object, kind: type) -> None:
    """Raises ValueError unless value is of that type."""
    if not isinstance(value, kind):
        _fail(name, f"a {kind.__name__}", type(value).__name__)


def check_flags(**flags: object) -> None:
    """Raises ValueError unless every option is True or False."""
    for name, value in flags.items():
        if not isinstance(value, bool | np.bool_):
            _fail(name, "True or False", type(value).__name__ if hasattr(value, "shape") else repr(value))


def check_whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Raises ValueError unless value is a whole number, of Python or NumPy, from least to most."""
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_whole or value < least or (most is not None and value > most):
        _fail(name, f"at least {least}" if most is None else f"{least} to {most}", repr(value))


def real_number(name: str, value: Any) -> float:
    """The real number of Python or NumPy as a float; ValueError where it is none, or beyond every float."""
    if not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool):
        _fail(name, "a number", repr(value))
    try:
        return float(value)
    except OverflowError:
        _fail(name, "a number that a float holds", "one beyond it")


def check_ascending(T: int, cu_seqlens: Any) -> None:
    """Raises ValueError for known offsets that are not those of sequences in T tokens; also of several rows."""
    cu = np.asarray(cu_seqlens)
    if np.any(cu[..., 0] != 0) or np.any(cu[..., 1:] < cu[..., :-1]) or np.any(cu[..., -1] > T):
        _fail("cu_seqlens", f"ascending values from 0 to at most T = {T}", cu.tolist())


def rule_dims(
    q: jax.Array | jax.ShapeDtypeStruct,
    k: jax.Array | jax.ShapeDtypeStruct,
    v: jax.Array | jax.ShapeDtypeStruct,
    g: jax.Array | jax.ShapeDtypeStruct | None,
    beta: jax.Array | jax.ShapeDtypeStruct | None,
    initial_state: jax.Array | jax.ShapeDtypeStruct | None,
    cu_seqlens: jax.Array | np.ndarray | jax.ShapeDtypeStruct | None,
    segment_ids: jax.Array | jax.ShapeDtypeStruct | None,
    state_layout: str,
) -> Dims:
    """Checks ranks, sizes and dtypes of the rule's arguments and returns its dimensions.

    Raises:
      ValueError: names the argument, what was expected and what came.
    """
    check_choice("state_layout", state_layout, STATE_LAYOUTS)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_array(name, x, (None,) * 4, "B, T, heads, width")
        check_floating(name, x)
    for name, x in (("k", k), ("v", v), ("q", q)):
        check_numbers(name, x.shape[1:])
    B, T, Hq, K = q.shape
    for name, x in (("k", k), ("v", v)):
        if x.shape[1] != T and x.shape[2] == Hq > max(T, x.shape[1]):
            _fail(
                name, f"{T} tokens as q has, in [B, T, heads, width], not [B, heads, T, width]", list(x.shape)
            )
    check_array("k", k, (B, T, None, K), "B, T, Hk, K")
    check_array("v", v, (B, T, None, None), "B, T, HV, V")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            _fail(name, f"q's dtype {q.dtype}", x.dtype)
    Hk, HV, V = k.shape[2], v.shape[2], v.shape[3]
    HO = max(Hq, HV)
    for name, heads in (("q", Hq), ("k", Hk), ("v", HV)):
        if heads == 0 or HO % heads:
            _fail(name, f"a head count that divides HO = max(Hq, HV) = {HO}", heads)
    for name, letter, width in (("q", "K", K), ("v", "V", V)):
        if not 1 <= width <= MAX_HEAD_DIM:
            _fail(name, f"a head width {letter} from 1 to {MAX_HEAD_DIM}", width)
    for name, x in (("g", g), ("beta", beta)):
        if x is not None:
            check_array(name, x, (B, T, HO), "B, T, HO")
            check_floating(name, x)
    N = check_packing(B, T, cu_seqlens, segment_ids)
    if initial_state is not None:
        state, letters = ((K, V), "K, V") if state_layout == "kv" else ((V, K), "V, K")
        check_array("initial_state", initial_state, (N, HO, *state), f"N, HO, {letters}")
        check_floating("initial_state", initial_state)
    return Dims(B, T, N, Hq, Hk, HV, HO, K, V)


def check_packing(B: int, T: int, cu_seqlens: Any, segment_ids: Any) -> int:
    """The number of sequences in rows of T tokens; ValueError for offsets or segments that cannot be theirs."""
    if cu_seqlens is not None and segment_ids is not None:
        _fail("cu_seqlens", "at most one of cu_seqlens and segment_ids", "both")
    if segment_ids is not None:
        check_array("segment_ids", segment_ids, (B, T), "B, T")
        check_integer("segment_ids", segment_ids)
    if cu_seqlens is None:
        return B
    check_array("cu_seqlens", cu_seqlens, (None,), "N + 1")
    check_numbers("cu_seqlens", cu_seqlens.shape)
    check_integer("cu_seqlens", cu_seqlens)
    if B != 1:
        _fail("cu_seqlens", "packed rows with B = 1", f"B = {B}")
    if cu_seqlens.shape[0] < 2:
        _fail("cu_seqlens", "at least two entries (N >= 1 sequences)", cu_seqlens.shape[0])
    return cu_seqlens.shape[0] - 1


def changes_segment(segment_ids: SegmentIds, first: bool = False) -> Bool[Array, "B T"]:
    """Marks the tokens whose segment differs from the one before; `first` is for a row's first token."""
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.pad(changes, ((0, 0), (1, 0)), constant_values=first)


def accumulation_dtype(*arrays: jax.Array | jax.ShapeDtypeStruct | None) -> jnp.dtype:
    """float64 when any of the arrays is, else float32: the dtype of states, gates and sums."""
    # Not `jnp.result_type`: a pool's states may be of 8 bits, which have no type in common with others.
    wide = any(x is not None and x.dtype == jnp.float64 for x in arrays)
    return jnp.dtype(jnp.float64 if wide else jnp.float32)


def split_heads(x: jax.Array, axis: int, head_counts: tuple[int, ...]) -> jax.Array:
    """Splits the head axis into one axis per level of sharing, so that shared heads broadcast, never repeat.

    With head counts 2 | 4 | 8 (say Hk, Hq, HV) the axis of k becomes (2, 1, 1), of q (2, 2, 1), of v (2, 2, 2):
    output head i, in row-major order of (2, 2, 2), reads head i // (HO // Hx) of each.

    Args:
      x: any array with Hx heads along axis.
      axis: the head axis.
      head_counts: the counts that occur in the call, HO among them; each divides HO.

    Returns:
      x with the head axis replaced by len(set(head_counts)) axes. Only when the counts do not divide one
      another (4 and 6 of 12) is x repeated, to HO heads: no nesting of axes can express that sharing.
    """
    levels = sorted(set(head_counts))
    if any(b % a for a, b in pairwise(levels)):
        x = jnp.repeat(x, levels[-1] // x.shape[axis], axis)
        levels = levels[-1:]
    sizes = [b // a for a, b in pairwise([1, *levels])]
    used = levels.index(x.shape[axis]) + 1
    sizes = sizes[:used] + [1] * (len(levels) - used)
    return x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :])
