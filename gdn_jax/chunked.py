"""The chunkwise WY form of the gated delta rule in plain jnp, one function per stage.

Inside a chunk of C tokens, with G the inclusive cumulative log decay and h the state at its start:

    kkt   = strictLower(beta_i k_i.k_j exp(G_i - G_j))        what token j's write puts into token i's error
    A     = (I + kkt)^-1
    w     = A (beta exp(G) k)                                 WY keys
    u     = A (beta v)                                        WY values
    v_new = u - w h                                           the values that are really written
    h'    = exp(G_C) h + k^T (exp(G_C - G) v_new)             state at the start of the next chunk
    o     = scale (exp(G) q h + lower(q k^T exp(G_i - G_j)) v_new)

Everything but h' is parallel over chunks. Every stage takes arrays [..., C, D] with free leading axes; an
input shared by several heads has size 1 on their axis and is broadcast inside the products, never repeated.

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", section 3.3 (its output mask must be the decaying
one, its W needs A before the gate); fla's `chunk_local_cumsum`, `chunk_scaled_dot_kkt_fwd`, `solve_tril`,
`recompute_w_u_fwd`, `chunk_gated_delta_rule_fwd_h`, `chunk_fwd_o`.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from gdn_jax import packing
from gdn_jax.shapes import split_heads

INVERSE_NAME = "gdn_inverse"
STATES_NAME = "gdn_states"
RESIDUAL_NAMES = (INVERSE_NAME, STATES_NAME)
"""`checkpoint_name`s of what the backward pass keeps beside the inputs: one C x C matrix and one state per chunk."""

# Coarse parts of gates are multiples of this, so that a chunk's sum of them is exact in float32 up to
# 2^24 / 1024 = 16384, that is -256 per token at C = 64; stronger gates only lose what exp has long made 0.
_COARSE_GRID = 1024.0


class Numerics(NamedTuple):
    """How products are computed: operands are rounded to `operand`, sums are kept in `accumulate`."""

    operand: jnp.dtype
    accumulate: jnp.dtype
    precision: lax.Precision

    @classmethod
    def of(cls, dtype: jnp.dtype, accumulate: jnp.dtype) -> "Numerics":
        """bfloat16 operands for bfloat16 inputs; float16 inputs use wider operands, since a state can pass 65504."""
        half = dtype in (jnp.bfloat16, jnp.float16)
        operand = dtype if dtype == jnp.bfloat16 and accumulate == jnp.float32 else accumulate
        return cls(jnp.dtype(operand), accumulate, lax.Precision.DEFAULT if half else lax.Precision.HIGHEST)

    def einsum(self, spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
        """Product of two arrays; axes of size 1 broadcast without being materialised."""
        return jnp.einsum(
            spec,
            a.astype(self.operand),
            b.astype(self.operand),
            precision=self.precision,
            preferred_element_type=self.accumulate,
        )


FULL = Numerics(jnp.dtype(jnp.float32), jnp.dtype(jnp.float32), lax.Precision.HIGHEST)


class ChunkDecay(NamedTuple):
    """Cumulative log decay inside chunks, kept so that differences of it are accurate.

    The sum of 64 gates of -20 is -1280, where float32 has steps of 1e-4; a difference of two such sums would
    carry that error into weak gates. So gates are summed in two parts: `coarse` multiples of 1/1024, whose sums
    and differences are exact, and the small `fine` rest. Gates of -inf are left out of both and counted.
    """

    coarse: Float[Array, "*S C"]
    fine: Float[Array, "*S C"]
    resets: Int[Array, "*S C"]
    """Number of gates of -inf up to and including each token: decays across a reset are 0."""

    @property
    def g_cum(self) -> Float[Array, "*S C"]:
        """Inclusive cumulative log decay of the finite gates."""
        return self.coarse + self.fine

    def from_start(self) -> Float[Array, "*S C"]:
        """exp(G_i): decay of the state at the chunk's start, after token i's gate."""
        return jnp.exp(jnp.where(self.resets == 0, self.g_cum, -jnp.inf))

    def to_end(self) -> Float[Array, "*S C"]:
        """exp(G_C - G_i): decay of token i's write at the chunk's end."""
        last = jax.tree.map(lambda x: x[..., -1:], self)
        difference = (last.coarse - self.coarse) + (last.fine - self.fine)
        return jnp.exp(jnp.where(last.resets == self.resets, difference, -jnp.inf))

    def total(self) -> Float[Array, "*S"]:
        """exp(G_C): decay over the whole chunk."""
        return self.from_start()[..., -1]

    def between(self) -> Float[Array, "*S C C"]:
        """exp(G_i - G_j) for i >= j, else 0: decay of token j's write when token i reads it."""
        C = self.fine.shape[-1]
        i, j = (lambda x: x[..., :, None]), (lambda x: x[..., None, :])
        difference = (i(self.coarse) - j(self.coarse)) + (i(self.fine) - j(self.fine))
        visible = jnp.tril(jnp.ones((C, C), bool)) & (i(self.resets) == j(self.resets))
        # The exponent is masked, not the result: above the diagonal exp would overflow, and inf * 0 is NaN.
        return jnp.exp(jnp.where(visible, difference, -jnp.inf))


def chunk_cumsum(g: Float[Array, "*S C"]) -> ChunkDecay:
    """Inclusive cumulative sum of the log decay along the last axis, in g's dtype; see `ChunkDecay`.

    Args:
      g: log decay <= 0; -inf is a full reset.
    """
    reset = jnp.isneginf(g)
    g = jnp.where(reset, 0, g)
    coarse = lax.stop_gradient(jnp.round(g * _COARSE_GRID) / _COARSE_GRID)
    return ChunkDecay(
        coarse=jnp.cumsum(coarse, -1),
        fine=jnp.cumsum(g - coarse, -1),
        resets=jnp.cumsum(reset.astype(jnp.int32), -1),
    )


def kkt(
    k: Float[Array, "*S C K"],
    decay: ChunkDecay,
    beta: Float[Array, "*R C"],
    numerics: Numerics = FULL,
) -> Float[Array, "*R C C"]:
    """kkt_ij = beta_i k_i.k_j exp(G_i - G_j) for i > j, else 0.

    Source: fla's `chunk_scaled_dot_kkt_fwd`. The paper's mask is strict here and inclusive in the output.
    """
    C = k.shape[-2]
    products = numerics.einsum("...ik,...jk->...ij", k, k)
    strict = jnp.tril(jnp.ones((C, C), bool), -1)
    return jnp.where(strict, beta[..., None] * products * decay.between(), 0)


@jax.custom_jvp
def solve_tril(kkt: Float[Array, "*S C C"]) -> Float[Array, "*S C C"]:
    """A = (I + kkt)^-1 for strictly lower triangular kkt, by a triangular solve in kkt's dtype.

    Numerics: forward substitution, backward stable for any keys. Powers of kkt (the Neumann series and its
      doubling) overflow for correlated keys even in float32.
    Source: fla's `solve_tril`; the derivative is dA = -A dkkt A.
    """
    identity = jnp.broadcast_to(jnp.eye(kkt.shape[-1], dtype=kkt.dtype), kkt.shape)
    return lax.linalg.triangular_solve(kkt, identity, left_side=True, lower=True, unit_diagonal=True)


@solve_tril.defjvp
def _solve_tril_jvp(primals, tangents):
    A = checkpoint_name(solve_tril(*primals), INVERSE_NAME)
    einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    return A, -einsum("...ij,...jk->...ik", A, einsum("...ij,...jk->...ik", tangents[0], A))


def wy(
    A: Float[Array, "*R C C"],
    k: Float[Array, "*S C K"],
    v: Float[Array, "*T C V"],
    decay: ChunkDecay,
    beta: Float[Array, "*R C"],
    numerics: Numerics = FULL,
) -> tuple[Float[Array, "*R C K"], Float[Array, "*R C V"]]:
    """WY keys w = A (beta exp(G) k) and values u = A (beta v).

    The factors go onto the columns of A, which belong to one head, rather than onto k and v, which heads share.
    Source: fla's `recompute_w_u_fwd`.
    """
    columns = beta[..., None, :]
    w = numerics.einsum("...ij,...jk->...ik", A * columns * decay.from_start()[..., None, :], k)
    u = numerics.einsum("...ij,...jv->...iv", A * columns, v)
    return w, u


class Transition(NamedTuple):
    """What a chunk does to the state: h' = total h + k^T (to_end (u - w h))."""

    total: Float[Array, "L P *H"]
    to_end: Float[Array, "L P *H C"]
    w: Float[Array, "L P *H C K"]
    k: Float[Array, "L P *Hk C K"]

    def write(self, v_new: jax.Array, numerics: Numerics) -> jax.Array:
        """k^T (to_end v_new): what values v_new leave in the state at the chunk's end."""
        return numerics.einsum("...ck,...cv->...kv", self.k, self.to_end[..., None] * v_new)


def _scan_states(numerics, keep, transition, u, forcing, h):
    """h_{c+1} = T_c h_c + k_c^T (to_end_c u_c) + forcing_c along the leading axis; linear in (u, forcing, h)."""

    def chunk(h, x):
        transition, u, forcing = x
        v_new = -numerics.einsum("...ck,...kv->...cv", transition.w, h)
        v_new = v_new if u is None else v_new + u
        new = transition.total[..., None, None] * h + transition.write(v_new, numerics)
        new = new if forcing is None else new + forcing
        return new, h.astype(numerics.operand) if keep else None

    last, states = lax.scan(chunk, h, (transition, u, forcing))
    return states, last


def _solve_states(numerics, transition, u, forcing, h0):
    """`solve_states` without its derivative rule."""
    lanes = transition.total.shape[1]
    if lanes == 1:
        states, last = _scan_states(numerics, True, transition, u, forcing, h0[None])
        return states, last[0]
    # Every lane from a zero state and, for its effect on a state, from the identity; then the lanes are
    # joined in order and walked once more from their true start states.
    K = transition.k.shape[-1]
    width = (lanes, *h0.shape)
    _, written = _scan_states(numerics, False, transition, u, forcing, jnp.zeros(width, h0.dtype))
    identity = jnp.broadcast_to(jnp.eye(K, dtype=h0.dtype), (*width[:-2], K, K))
    _, carried = _scan_states(numerics, False, transition, None, None, identity)

    def join(h, lane):
        written, carried = lane
        product = jnp.einsum("...kj,...jv->...kv", carried, h, precision=lax.Precision.HIGHEST)
        return written + product, h

    _, starts = lax.scan(join, h0, (written, carried))
    states, last = _scan_states(numerics, True, transition, u, forcing, starts)
    return states, last[-1]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def solve_states(
    numerics: Numerics,
    transition: Transition,
    u: Float[Array, "L P *H C V"],
    forcing: Float[Array, "L P *H K V"] | None,
    h0: Float[Array, "B *H K V"],
) -> tuple[Float[Array, "L P *H K V"], Float[Array, "B *H K V"]]:
    """States at the start of every chunk, and the last state, of h_{c+1} = T_c h_c + k_c^T (to_end_c u_c) + f_c.

    Axis 0 is walked in order; axis 1 holds the lanes of a row one after another (lane 1 goes on where
    lane 0 ends), walked side by side. Both orders give the same states; lanes cost a second walk and shorten it.

    The states solve a linear recurrence, so their derivative solves the same recurrence driven by another
    input: all products of the derivative but the recurrence itself are parallel over chunks, in any order of
    differentiation, forward and reverse.
    """
    states, last = _solve_states(numerics, transition, u, forcing, h0)
    return checkpoint_name(states, STATES_NAME), last


@solve_states.defjvp
def _solve_states_jvp(numerics, primals, tangents):
    transition, u, _, h0 = primals
    d, du, dforcing, dh0 = tangents
    states, last = solve_states(numerics, *primals)
    v_new = u - numerics.einsum("...ck,...kv->...cv", transition.w, states)
    dv_new = du - numerics.einsum("...ck,...kv->...cv", d.w, states)
    drive = transition.to_end[..., None] * dv_new + d.to_end[..., None] * v_new
    drive = d.total[..., None, None] * states + numerics.einsum("...ck,...cv->...kv", transition.k, drive)
    drive = drive + numerics.einsum("...ck,...cv->...kv", d.k, transition.to_end[..., None] * v_new)
    drive = drive if dforcing is None else drive + dforcing
    dstates, dlast = _solve_states(numerics, transition, None, drive, dh0)
    return (states, last), (dstates, dlast)


def chunk_output(
    q: Float[Array, "*S C K"],
    k: Float[Array, "*S C K"],
    v_new: Float[Array, "*R C V"],
    states: Float[Array, "*R K V"],
    decay: ChunkDecay,
    scale: float | Float[Array, ""],
    numerics: Numerics = FULL,
) -> Float[Array, "*R C V"]:
    """o = scale (exp(G) q h + lower(q k^T exp(G_i - G_j)) v_new).

    The mask decays: with a plain causal mask the output is wrong by half (the paper's equation as printed).
    Source: fla's `chunk_fwd_o`.
    """
    scores = numerics.einsum("...ik,...jk->...ij", q, k) * decay.between()
    read = decay.from_start()[..., None] * numerics.einsum("...ck,...kv->...cv", q, states)
    return scale * (read + numerics.einsum("...ij,...jv->...iv", scores, v_new))


class _Chunks(NamedTuple):
    """A call's inputs as chunks [L, lanes, B, heads..., C, width]; q may be None."""

    q: jax.Array | None
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array


def chunked_rule(
    q: Float[Array, "B T Hq K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HO"],
    beta: Float[Array, "B T HO"],
    initial_state: Float[Array, "N HO K V"] | None,
    *,
    scale: float | Float[Array, ""],
    cu_seqlens: Int[Array, "N1"] | None,
    chunk_size: int,
) -> tuple[Float[Array, "B T HO V"], Float[Array, "N HO K V"]]:
    """The rule in chunks of `chunk_size` tokens. A reset is a gate of -inf.

    Returns:
      o [B, T, HO, V] and the final states [N, HO, K, V], in the dtype of g.

    Numerics: gates, the triangular solve, states and sums in g's dtype (float32 or float64); operands of the
      products in bfloat16 when q is bfloat16.
    Memory: the backward pass keeps the inputs and the residuals named in `RESIDUAL_NAMES`, and recomputes the rest.
    """
    numerics = Numerics.of(q.dtype, g.dtype)
    run = partial(_rule, numerics=numerics, cu_seqlens=cu_seqlens, chunk_size=chunk_size)
    keep = jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)
    return jax.checkpoint(run, policy=keep)(q, k, v, g, beta, initial_state, scale)


def _rule(q, k, v, g, beta, initial_state, scale, *, numerics, cu_seqlens, chunk_size):
    counts = (q.shape[2], k.shape[2], v.shape[2], g.shape[2])
    row = _Row(cu_seqlens, k.shape[:2], counts, chunk_size)
    chunks = _Chunks(*(row.to_chunks(x) for x in (q, k, v, g, beta)))
    decay, transition, u = _prepare(chunks, numerics)
    states, final = row.solve(numerics, transition, u, initial_state)
    v_new = u - numerics.einsum("...ck,...kv->...cv", transition.w, states)
    o = chunk_output(chunks.q, chunks.k, v_new, states, decay, scale, numerics)
    return row.from_chunks(o), final


def chunk_states_of(
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HO"],
    beta: Float[Array, "B T HO"],
    initial_state: Float[Array, "N HO K V"] | None,
    *,
    cu_seqlens: Int[Array, "N1"] | None,
    chunk_size: int,
) -> Float[Array, "B L HO K V"]:
    """State at the start of every chunk, in the dtype of g and computed in it; differentiable.

    With cu_seqlens the chunks are those of `packing.packed_chunks`; unused ones hold 0.
    """
    numerics = Numerics(g.dtype, g.dtype, lax.Precision.HIGHEST)
    row = _Row(cu_seqlens, k.shape[:2], (k.shape[2], v.shape[2], g.shape[2]), chunk_size)
    chunks = _Chunks(None, *(row.to_chunks(x) for x in (k, v, g, beta)))
    _, transition, u = _prepare(chunks, numerics)
    states, _ = row.solve(numerics, transition, u, initial_state)
    states = jnp.moveaxis(states, (2, 1), (0, 1))  # [B, lanes, L, heads..., K, V]
    states = states.reshape(states.shape[0], -1, g.shape[2], *states.shape[-2:])
    return states[:, : row.num_chunks]


def _prepare(chunks: _Chunks, numerics: Numerics) -> tuple[ChunkDecay, Transition, jax.Array]:
    """The stages before the recurrence: everything that does not depend on the state."""
    decay = chunk_cumsum(chunks.g)
    A = solve_tril(kkt(chunks.k, decay, chunks.beta, numerics))
    w, u = wy(A, chunks.k, chunks.v, decay, chunks.beta, numerics)
    w, k = w.astype(numerics.operand), chunks.k.astype(numerics.operand)
    return decay, Transition(decay.total(), decay.to_end(), w, k), u.astype(numerics.operand)


class _Row:
    """How the tokens of one call lie in chunks and lanes, for batches of whole rows and for packed sequences."""

    def __init__(
        self,
        cu_seqlens: jax.Array | None,
        batch: tuple[int, int],
        head_counts: tuple[int, ...],
        chunk_size: int,
    ):
        self.B, self.T = batch
        self.C, self.head_counts, self.HO = chunk_size, head_counts, max(head_counts)
        self.table = None
        self.num_chunks = max(1, -(-self.T // chunk_size))
        if cu_seqlens is not None:
            self.table = packing.packed_chunks(cu_seqlens, self.T, chunk_size)
            self.num_chunks = self.table.token.shape[0]
        self.lanes = _num_lanes(self.num_chunks, self.B * self.HO, packed=cu_seqlens is not None)

    def to_chunks(self, x: jax.Array) -> jax.Array:
        """[B, T, H, D] or [B, T, H] to [L, lanes, B, heads..., C, D]."""
        x = packing.row_to_chunks(x, self.C) if self.table is None else packing.gather_chunks(x, self.table)
        return split_heads(self._to_lanes(jnp.moveaxis(x, 2, 3)), 3, self.head_counts)

    def from_chunks(self, x: jax.Array) -> jax.Array:
        """[L, lanes, B, heads..., C, D] to [B, T, HO, D]."""
        x = jnp.swapaxes(x, 0, 1).reshape(-1, self.B, self.HO, *x.shape[-2:])[: self.num_chunks]
        x = jnp.moveaxis(x, 2, 3)
        return packing.chunks_to_row(x, self.T) if self.table is None else packing.scatter_chunks(x, self.table)

    def _to_lanes(self, x: jax.Array) -> jax.Array:
        """[chunks, ...] to [L, lanes, ...], padded with chunks that leave the state alone."""
        pad = -x.shape[0] % self.lanes
        x = jnp.pad(x, ((0, pad),) + ((0, 0),) * (x.ndim - 1))
        return jnp.swapaxes(x.reshape(self.lanes, -1, *x.shape[1:]), 0, 1)

    def solve(
        self, numerics: Numerics, transition: Transition, u: jax.Array, initial_state: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """States at the start of every chunk and the final states [N, HO, K, V]."""
        K, V = transition.k.shape[-1], u.shape[-1]
        dtype = numerics.accumulate
        if self.table is None:
            if initial_state is None:
                initial_state = jnp.zeros((self.B, self.HO, K, V), dtype)
            h0 = split_heads(initial_state, 1, self.head_counts)
            states, final = solve_states(numerics, transition, u, None, h0)
            return states, final.reshape(self.B, self.HO, K, V)

        # A sequence's last chunk passes nothing on; what the next chunk starts from is its sequence's own state.
        table, N = self.table, self.table.is_empty.shape[0]
        keep = _like(self._to_lanes(~table.is_last), transition.total)
        chain = transition._replace(
            total=transition.total * keep, to_end=transition.to_end * keep[..., None]
        )
        forcing, h0 = None, jnp.zeros((1, *transition.total.shape[3:], K, V), dtype)
        if initial_state is not None:
            starts = split_heads(initial_state, 1, self.head_counts)
            starts = jnp.where(_like(table.is_first, starts), starts[table.sequence], 0)[:, None]
            h0 = starts[0]
            forcing = self._to_lanes(jnp.roll(starts, -1, 0).at[-1].set(0))
        states, _ = solve_states(numerics, chain, u, forcing, h0)

        def of_last_chunks(x):
            return jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[3:])[table.last_chunk]

        last, u, h = jax.tree.map(of_last_chunks, (transition, u, states))
        v_new = u - numerics.einsum("...ck,...kv->...cv", last.w, h)
        final = last.total[..., None, None] * h + last.write(v_new, numerics)
        final = final.reshape(N, self.HO, K, V)
        untouched = 0 if initial_state is None else initial_state
        return states, jnp.where(_like(table.is_empty, final), untouched, final)


def _like(mask: jax.Array, x: jax.Array) -> jax.Array:
    """mask with axes of size 1 appended, to broadcast against x."""
    return mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))


def _num_lanes(num_chunks: int, width: int, *, packed: bool) -> int:
    """Lanes that a row's chunks are walked in; more than one only where the walk is bound by latency."""
    if num_chunks < 16 or (jax.default_backend() == "cpu" and not packed):
        return 1
    lanes = 1
    while lanes * lanes * 2 < num_chunks and lanes * width < 256:
        lanes *= 2
    return lanes
