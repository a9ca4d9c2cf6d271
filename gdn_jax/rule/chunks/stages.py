"""The stages of the chunkwise WY form of the gated delta rule, one function each, in plain jnp.

Inside a chunk of C tokens, with G the inclusive cumulative log decay and h the state at its start:

    kkt   = strictLower(beta_i k_i.k_j exp(G_i - G_j))        what token j's write puts into token i's error
    A     = (I + kkt)^-1
    w     = A (beta exp(G) k)                                 WY keys
    u     = A (beta v)                                        WY values
    v_new = u - w h                                           the values that are really written
    o     = scale (exp(G) q h + lower(q k^T exp(G_i - G_j)) v_new)

G is `decay.chunk_cumsum`; the states h and v_new are `recurrence.solve_states`. Every stage takes
arrays [..., C, D] with free leading axes; an input shared by several heads has size 1 on their axis and is
broadcast inside the products, never repeated.

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", section 3.3 (its output mask must be the decaying
one, its W needs A before the gate); fla's `chunk_scaled_dot_kkt_fwd`, `solve_tril`, `recompute_w_u_fwd`,
`chunk_fwd_o`.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from gdn_jax.rule.chunks.decay import ChunkDecay
from gdn_jax.shapes import accumulation_dtype

# Rows of solve_tril's first blocks: unrolled substitution costs their square in operations of the program.
_SUBSTITUTION_ROWS = 8


class Numerics(NamedTuple):
    """How products are computed: operands are rounded to `operand`, sums are kept in `accumulate`."""

    operand: jnp.dtype
    accumulate: jnp.dtype
    precision: lax.Precision
    """The precision of float32 products on hardware that could round their operands."""

    @classmethod
    def of(cls, dtype: jnp.dtype, accumulate: jnp.dtype) -> "Numerics":
        """bfloat16 operands for bfloat16 inputs; float16 inputs use wider operands, since a state can pass 65504."""
        half = dtype in (jnp.bfloat16, jnp.float16)
        operand = dtype if dtype == jnp.bfloat16 and accumulate == jnp.float32 else accumulate
        return cls(jnp.dtype(operand), accumulate, lax.Precision.DEFAULT if half else lax.Precision.HIGHEST)

    def wide(self) -> "Numerics":
        """Numerics with operands as wide as the sums: for the recurrence, where roundings grow and add up."""
        return self._replace(operand=self.accumulate)

    @property
    def kept(self) -> jnp.dtype:
        """dtype of v_new between the walk over the chunks and its uses.

        On a CPU that of the sums, for o is small where the values written cancel: keys alike, beta near 2, no decay.
        Elsewhere that of the operands, which takes a third less memory with the gradients.
        """
        return self.accumulate if jax.default_backend() == "cpu" else self.operand

    @classmethod
    def full(cls, *arrays: jax.Array) -> "Numerics":
        """Everything in float32, or float64 when an array is."""
        dtype = accumulation_dtype(*arrays)
        return cls(dtype, dtype, lax.Precision.HIGHEST)

    def einsum(self, spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
        """Product of two arrays; axes of size 1 broadcast without being materialised."""
        return jnp.einsum(
            spec,
            a.astype(self.operand),
            b.astype(self.operand),
            precision=self.precision,
            preferred_element_type=self.accumulate,
        )


def kkt(
    k: Float[Array, "*S C K"],
    decay: ChunkDecay,
    beta: Float[Array, "*R C"],
    numerics: Numerics | None = None,
) -> Float[Array, "*R C C"]:
    """kkt_ij = beta_i k_i.k_j exp(G_i - G_j) for i > j, else 0.

    Leading axes, such as rows, chunks and heads, broadcast; so they do in the other stages.

    Args:
      k: keys [.., C, K] of the tokens of a chunk, any floating dtype.
      decay: `chunk_cumsum` of their log decays.
      beta: write strengths [.., C], in [0, 1], or [0, 2] with negative eigenvalues.
      numerics: how the products are computed; None: in float32, or float64 when an argument is.

    Returns:
      [.., C, C], strictly lower triangular, for `solve_tril`.

    Source: fla's `chunk_scaled_dot_kkt_fwd`. The paper's mask is strict here and inclusive in the output.
    """
    numerics = numerics or Numerics.full(k, decay.g, beta)
    C = k.shape[-2]
    products = _gram(numerics, k)
    strict = jnp.tril(jnp.ones((C, C), bool), -1)
    return jnp.where(strict, beta[..., None] * products * decay.between(), 0)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gram(numerics: Numerics, k: jax.Array) -> jax.Array:
    """k k^T. Its derivative M + M^T, M = dk k^T, is one product in either mode, not two."""
    return numerics.einsum("...ik,...jk->...ij", k, k)


@_gram.defjvp
def _gram_jvp(numerics, primals, tangents):
    (k,), (dk,) = primals, tangents
    M = numerics.einsum("...ik,...jk->...ij", dk, k)
    return _gram(numerics, k), M + jnp.swapaxes(M, -1, -2)


def solve_tril(kkt: Float[Array, "*S C C"]) -> Float[Array, "*S C C"]:
    """A = (I + kkt)^-1 for strictly lower triangular kkt, in its dtype; C is a power of two or at most 8.

    Blocks of 8 rows by forward substitution; then pairs of neighbouring inverse blocks X and Z are merged to
    twice the size, where the block L below X and left of Z becomes -Z L X.

    Numerics: as stable as substitution, for any keys. Powers of kkt (the Neumann series and its doubling)
      overflow for correlated keys even in float32.
    Raises:
      ValueError: C is above 8 and not a power of two.
    Source: fla's `solve_tril`, with the sign of the paper's equation corrected (the inverse of I + kkt).
    """
    C = kkt.shape[-1]
    if kkt.shape[-2] != C or (C > _SUBSTITUTION_ROWS and C & (C - 1)):
        raise ValueError(
            f"kkt: expected [.., C, C] with C a power of two or at most 8, got {list(kkt.shape)}"
        )
    size = min(C, _SUBSTITUTION_ROWS)
    X = _substitute(_diagonal_blocks(kkt, size))
    product = partial(jnp.einsum, "...ij,...jk->...ik", precision=lax.Precision.HIGHEST)
    while size < C:
        L = _diagonal_blocks(kkt, 2 * size)[..., size:, :size]
        X, Z = X[..., 0::2, :, :], X[..., 1::2, :, :]
        below = -product(product(Z, L), X)
        top = jnp.concatenate([X, jnp.zeros_like(X)], -1)
        X = jnp.concatenate([top, jnp.concatenate([below, Z], -1)], -2)
        size *= 2
    return X[..., 0, :, :]


def _diagonal_blocks(x: jax.Array, size: int) -> jax.Array:
    """[..., C, C] to its C / size diagonal blocks [..., C / size, size, size]."""
    blocks = [x[..., i : i + size, i : i + size] for i in range(0, x.shape[-1], size)]
    return jnp.stack(blocks, -3)


def _substitute(L: jax.Array) -> jax.Array:
    """(I + L)^-1 of small strictly lower triangular blocks, row by row, unrolled."""
    L = jnp.moveaxis(L, (-2, -1), (0, 1))  # the batch fills the vector lanes
    rows = []
    for i in range(L.shape[0]):
        row = jnp.zeros_like(L[0]).at[i].set(1)
        for j in range(i):
            row = row - L[i, j] * rows[j]
        rows.append(row)
    return jnp.moveaxis(jnp.stack(rows), (0, 1), (-2, -1))


def wy(
    A: Float[Array, "*R C C"],
    k: Float[Array, "*S C K"],
    v: Float[Array, "*T C V"],
    decay: ChunkDecay,
    beta: Float[Array, "*R C"],
    numerics: Numerics | None = None,
) -> tuple[Float[Array, "*R C K"], Float[Array, "*R C V"]]:
    """WY keys w = A (beta exp(G) k) and values u = A (beta v).

    The factors go onto the columns of A, which belong to one head, rather than onto k and v, which heads share.

    Args:
      A: (I + kkt)^-1, of `solve_tril` [.., C, C].
      k, v: keys [.., C, K] and values [.., C, V].
      decay, beta, numerics: as for `kkt`.

    Returns:
      w [.., C, K] and u [.., C, V]. What a chunk with the state h at its start writes is v_new = u - w h.

    Source: fla's `recompute_w_u_fwd`.
    """
    numerics = numerics or Numerics.full(A, k, v)
    columns = beta[..., None, :]
    w = numerics.einsum("...ij,...jk->...ik", A * columns * decay.from_start()[..., None, :], k)
    u = numerics.einsum("...ij,...jv->...iv", A * columns, v)
    return w, u


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _read(numerics: Numerics, from_start: jax.Array, q: jax.Array, h: jax.Array) -> jax.Array:
    """exp(G) (q h). Its derivative in both factors of h is one product, so that q h is not computed again."""
    return from_start[..., None] * numerics.einsum("...ck,...kv->...cv", q, h)


@_read.defjvp
def _read_jvp(numerics, primals, tangents):
    from_start, q, h = primals
    dfrom_start, dq, dh = tangents
    dfactor = dfrom_start[..., None] * q + from_start[..., None] * dq
    do = numerics.einsum("...ck,...kv->...cv", dfactor, h)
    return _read(numerics, *primals), do + _read(numerics, from_start, q, dh)


def chunk_output(
    q: Float[Array, "*Q C K"],
    k: Float[Array, "*S C K"],
    v_new: Float[Array, "*R C V"],
    states: Float[Array, "*R K V"],
    decay: ChunkDecay,
    scale: float | Float[Array, ""],
    numerics: Numerics | None = None,
) -> Float[Array, "*R C V"]:
    """o = scale (exp(G) q h + lower(q k^T exp(G_i - G_j)) v_new).

    The mask decays: with a plain causal mask the output is wrong by half (the paper's equation as printed).

    Args:
      q, k: queries and keys [.., C, K].
      v_new: what the chunk writes [.., C, V], u - w h of `wy`.
      states: h, the state at the chunk's start [.., K, V].
      decay, numerics: as for `kkt`.
      scale: factor of the output, K ** -0.5 in `gated_delta_rule`.

    Returns:
      o [.., C, V].

    Source: fla's `chunk_fwd_o`.
    """
    numerics = numerics or Numerics.full(q, k, v_new, states)
    scores = numerics.einsum("...ik,...jk->...ij", q, k) * decay.between()
    read = _read(numerics, decay.from_start(), q, states)
    pairs = numerics if v_new.dtype == numerics.operand else numerics.wide()
    return scale * (read + pairs.einsum("...ij,...jv->...iv", scores, v_new))
