"""The chunkwise WY form of the gated delta rule in plain jnp, one function per stage.

Inside a chunk of C tokens, with G the inclusive cumulative log decay and h the state at its start:

    kkt   = strictLower(beta_i k_i.k_j exp(G_i - G_j))        what token j's write puts into token i's error
    A     = (I + kkt)^-1
    w     = A (beta exp(G) k)                                 WY keys
    u     = A (beta v)                                        WY values
    v_new = u - w h  =  A (beta v - beta exp(G) (k h))        the values that are really written
    h'    = exp(G_C) h + k^T (exp(G_C - G) v_new)             state at the start of the next chunk
    o     = scale (exp(G) q h + lower(q k^T exp(G_i - G_j)) v_new)

Everything but h' is parallel over chunks. The rule uses v_new in its second form, which needs fewer products
than w and u; `wy` gives those to whoever studies them. Every stage takes arrays [..., C, D] with free leading
axes; an input shared by several heads has size 1 on their axis and is broadcast inside the products, never
repeated.

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
from jaxtyping import Array, Bool, Float, Int

from gdn_jax import packing
from gdn_jax.shapes import accumulation_dtype, split_heads

INVERSE_NAME = "gdn_inverse"
STATES_NAME = "gdn_states"
RESIDUAL_NAMES = (INVERSE_NAME, STATES_NAME)
"""`checkpoint_name`s of what the backward pass keeps beside the inputs: one C x C matrix and one state per chunk."""

# Coarse parts of gates are multiples of this, so that a chunk's sum of them is exact in float32 up to
# 2^24 / 1024 = 16384, that is -256 per token at C = 64; stronger gates only lose what exp has long made 0.
_COARSE_GRID = 1024.0


# Tokens times heads of a stretch and longest chunk on a CPU: the fastest of 32, 64, 128 and 32, 64 on two cores of an
# EPYC 9004 (2026-11-21, jax 0.12.0, T = 2048, 4 heads, K = V = 64, float32; see the performance log).
_CPU_STRETCH = 64 * 32
_CPU_CHUNK_SIZE = 32

# Rows of solve_tril's first blocks: unrolled substitution costs their square in operations of the program.
_SUBSTITUTION_ROWS = 8


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

    def wide(self) -> "Numerics":
        """The same with operands as wide as the sums: for the recurrence, where roundings grow and add up."""
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


class ChunkDecay(NamedTuple):
    """Cumulative log decay inside chunks, and the decays it implies, accurate in value and derivative.

    The sum of 64 gates of -20 is -1280, where float32 has steps of 1e-4; a difference of two such sums would
    carry that error into weak gates. So gates are summed in two parts: `coarse` multiples of 1/1024, whose sums
    and differences are exact, and the small `fine` rest. Gates of -inf are left out of both and counted.

    The derivative of exp(G_i - G_j) in g_t is itself for j < t <= i and 0 elsewhere. Taken through the cumulative
    sum, every gate outside would get a +x and a -x that ought to cancel; so it is written down here.
    """

    g: Float[Array, "*S C"]
    """The gates, 0 in place of -inf."""
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
        return _decay_from_start(self)

    def to_end(self) -> Float[Array, "*S C"]:
        """exp(G_C - G_i): decay of token i's write at the chunk's end."""
        return _decay_to_end(self)

    def total(self) -> Float[Array, "*S"]:
        """exp(G_C): decay over the whole chunk."""
        return _decay_from_start(self)[..., -1]

    def between(self) -> Float[Array, "*S C C"]:
        """exp(G_i - G_j) for i >= j, else 0: decay of token j's write when token i reads it."""
        return _decay_between(self)


@jax.custom_jvp
def _decay_from_start(decay: ChunkDecay) -> jax.Array:
    return jnp.exp(jnp.where(decay.resets == 0, decay.g_cum, -jnp.inf))


@_decay_from_start.defjvp
def _decay_from_start_jvp(primals, tangents):
    out = _decay_from_start(*primals)
    return out, out * jnp.cumsum(tangents[0].g, -1)


@jax.custom_jvp
def _decay_to_end(decay: ChunkDecay) -> jax.Array:
    last = jax.tree.map(lambda x: x[..., -1:], decay)
    difference = (last.coarse - decay.coarse) + (last.fine - decay.fine)
    return jnp.exp(jnp.where(last.resets == decay.resets, difference, -jnp.inf))


@_decay_to_end.defjvp
def _decay_to_end_jvp(primals, tangents):
    out, dg = _decay_to_end(*primals), tangents[0].g
    after = jnp.pad(lax.cumsum(dg[..., 1:], dg.ndim - 1, reverse=True), [(0, 0)] * (dg.ndim - 1) + [(0, 1)])
    return out, out * after


@jax.custom_jvp
def _decay_between(decay: ChunkDecay) -> jax.Array:
    C = decay.fine.shape[-1]
    i, j = (lambda x: x[..., :, None]), (lambda x: x[..., None, :])
    difference = (i(decay.coarse) - j(decay.coarse)) + (i(decay.fine) - j(decay.fine))
    visible = jnp.tril(jnp.ones((C, C), bool)) & (i(decay.resets) == j(decay.resets))
    # The exponent is masked, not the result: above the diagonal exp would overflow, and inf * 0 is NaN.
    return jnp.exp(jnp.where(visible, difference, -jnp.inf))


@_decay_between.defjvp
def _decay_between_jvp(primals, tangents):
    out, dg = _decay_between(*primals), tangents[0].g
    lower = jnp.tril(jnp.ones((dg.shape[-1],) * 2, bool))
    strict = jnp.tril(lower, -1).astype(dg.dtype)
    # A selection, not a product with the mask: XLA's CPU sums the transpose of the latter six times slower.
    until = jnp.where(lower, dg[..., None, :], 0)
    passed = jnp.einsum("...it,tj->...ij", until, strict, precision=lax.Precision.HIGHEST)
    return out, out * passed


def chunk_cumsum(g: Float[Array, "*S C"]) -> ChunkDecay:
    """Inclusive cumulative sum of the log decay along the last axis, in g's dtype; see `ChunkDecay`.

    Args:
      g: log decay <= 0; -inf is a full reset.
    """
    reset = jnp.isneginf(g)
    g = jnp.where(reset, 0, g)
    coarse = lax.stop_gradient(jnp.round(g * _COARSE_GRID) / _COARSE_GRID)
    sums = jnp.cumsum(coarse, -1), jnp.cumsum(g - coarse, -1), jnp.cumsum(reset.astype(jnp.int32), -1)
    # Without the barrier XLA's CPU computes these sums again for each of the C x C decays.
    return ChunkDecay(g, *lax.optimization_barrier(sums))


def kkt(
    k: Float[Array, "*S C K"],
    decay: ChunkDecay,
    beta: Float[Array, "*R C"],
    numerics: Numerics | None = None,
) -> Float[Array, "*R C C"]:
    """kkt_ij = beta_i k_i.k_j exp(G_i - G_j) for i > j, else 0.

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
    Source: fla's `recompute_w_u_fwd`.
    """
    numerics = numerics or Numerics.full(A, k, v)
    columns = beta[..., None, :]
    w = numerics.einsum("...ij,...jk->...ik", A * columns * decay.from_start()[..., None, :], k)
    u = numerics.einsum("...ij,...jv->...iv", A * columns, v)
    return w, u


class Transition(NamedTuple):
    """What a chunk does to the state, apart from what it writes: see `solve_states`."""

    total: Float[Array, "L P *H"]
    """exp(G_C): decay over the chunk."""
    to_end: Float[Array, "L P *H C"]
    """exp(G_C - G): decay of each token's write until the chunk's end."""
    read: Float[Array, "L P *H C"]
    """beta exp(G): factor of what each token's key finds in the state."""
    k: Float[Array, "L P *Hk C K"]
    keep: Bool[Array, "L P ..."] | None = None
    """False where nothing passes on to the next chunk, which starts from its forcing alone."""

    def next_state(self, h: jax.Array, v_new: jax.Array, numerics: Numerics) -> jax.Array:
        """total h + k^T (to_end v_new), the state at the chunk's end; 0 where keep is False."""
        return self.select(self.total[..., None, None] * h + self.write(v_new, numerics))

    def select(self, new: jax.Array) -> jax.Array:
        """new where keep is True; a selection, so that a NaN stops at the border of its sequence."""
        return new if self.keep is None else jnp.where(self.keep[..., None, None], new, 0)

    def write(self, v_new: jax.Array, numerics: Numerics) -> jax.Array:
        """k^T (to_end v_new): what the values v_new leave in the state at the chunk's end."""
        return numerics.einsum("...ck,...cv->...kv", self.k, self.to_end[..., None] * v_new)

    def v_new(self, A: jax.Array, x: jax.Array | None, h: jax.Array, numerics: Numerics) -> jax.Array:
        """A (x - read (k h)): the values that are really written."""
        found = self.read[..., None] * numerics.einsum("...ck,...kv->...cv", self.k, h)
        return numerics.einsum("...ij,...jv->...iv", A, -found if x is None else x - found)


class States(NamedTuple):
    """Solution of the recurrence over chunks."""

    h: Float[Array, "L P *H K V"]
    """State at the start of each chunk."""
    v_new: Float[Array, "L P *H C V"]
    """Values that each chunk really writes."""
    last: Float[Array, "*H K V"]
    """State after the last chunk."""


def _walk(numerics, A, transition, x, forcing, h):
    """The recurrence of `solve_states` in one pass over axis 0, every lane on its own."""
    stored, kept, numerics = numerics.operand, numerics.kept, numerics.wide()

    def chunk(h, inputs):
        A, transition, x, forcing = inputs
        v_new = transition.v_new(A, x, h, numerics)
        new = transition.next_state(h, v_new, numerics)
        new = new if forcing is None else new + forcing
        return new, (h.astype(stored), v_new.astype(kept))

    last, (states, v_new) = lax.scan(chunk, h, (A, transition, x, forcing))
    return States(states, v_new, last)


def _walk_lanes(numerics, A, transition, x, forcing, h0):
    """`solve_states` for a given inverse A, linear in (x, forcing, h0)."""
    lanes = transition.total.shape[1]
    if lanes == 1:
        states = _walk(numerics, A, transition, x, forcing, h0[None])
        return states._replace(last=states.last[0])
    # Every lane from a zero state and, for what it does to a state, from the identity; then the lanes are
    # joined in order and walked once more from their true start states.
    K = transition.k.shape[-1]
    shape = (lanes, *h0.shape)
    written = _walk(numerics, A, transition, x, forcing, jnp.zeros(shape, h0.dtype)).last
    identity = jnp.broadcast_to(jnp.eye(K, dtype=h0.dtype), (*shape[:-2], K, K))
    carried = _walk(numerics, A, transition, None, None, identity).last

    def join(h, lane):
        written, carried = lane
        product = jnp.einsum("...kj,...jv->...kv", carried, h, precision=lax.Precision.HIGHEST)
        return written + product, h

    _, starts = lax.scan(join, h0, (written, carried))
    states = _walk(numerics, A, transition, x, forcing, starts)
    return states._replace(last=states.last[-1])


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def solve_states(
    numerics: Numerics,
    kkt: Float[Array, "L P *H C C"],
    transition: Transition,
    x: Float[Array, "L P *H C V"],
    forcing: Float[Array, "L P *H K V"] | None,
    h0: Float[Array, "*H K V"],
) -> States:
    """Solves the recurrence over chunks, with A = (I + kkt)^-1:

        v_new = A (x - read (k h));   h' = keep (total h + k^T (to_end v_new)) + forcing

    Axis 0 is walked in order; axis 1 holds the lanes of a row one after another (lane 1 goes on where lane 0
    ends), walked side by side. One lane or many give the same states; many cost two more walks, all shorter.

    The equations are linear in (x, forcing, h0), so the derivative in any argument solves the same equations
    with another x and forcing, which are parallel over chunks. In reverse mode the adjoint state walks
    backwards and everything else is parallel; dkkt = -lam v_new^T needs no derivative of the inverse.
    """
    A = solve_tril(kkt)
    return _walk_lanes(numerics, A, transition, x, forcing, h0)


@solve_states.defjvp
def _solve_states_jvp(numerics, primals, tangents):
    kkt, transition, x, forcing, h0 = primals
    dkkt, d, dx, dforcing, dh0 = tangents
    wide = numerics.wide()
    einsum = wide.einsum
    A = checkpoint_name(solve_tril(kkt), INVERSE_NAME)
    solution = _walk_lanes(numerics, A, transition, x, forcing, h0)
    h = checkpoint_name(solution.h, STATES_NAME)
    # From h and not from the walk, so that the backward pass recomputes it without walking again.
    v_new = transition.v_new(A, x, h, wide).astype(numerics.kept)

    dx = dx - d.read[..., None] * einsum("...ck,...kv->...cv", transition.k, h)
    dx = dx - transition.read[..., None] * einsum("...ck,...kv->...cv", d.k, h)
    dx = dx - einsum("...ij,...jv->...iv", dkkt, v_new)
    # One product for both tangents: in reverse mode, so are both cotangents.
    dk_to_end = d.to_end[..., None] * transition.k + transition.to_end[..., None] * d.k
    drive = d.total[..., None, None] * h + einsum("...ck,...cv->...kv", dk_to_end, v_new)
    drive = transition.select(drive)
    drive = drive if dforcing is None else drive + dforcing
    return States(h, v_new, solution.last), _walk_lanes(numerics, A, transition, dx, drive, dh0)


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
    Source: fla's `chunk_fwd_o`.
    """
    numerics = numerics or Numerics.full(q, k, v_new, states)
    scores = numerics.einsum("...ik,...jk->...ij", q, k) * decay.between()
    read = _read(numerics, decay.from_start(), q, states)
    pairs = numerics if v_new.dtype == numerics.operand else numerics.wide()
    return scale * (read + pairs.einsum("...ij,...jv->...iv", scores, v_new))


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
    lanes: int | None = None,
) -> tuple[Float[Array, "B T HO V"], Float[Array, "N HO K V"]]:
    """The rule in chunks of `chunk_size` tokens. A reset is a gate of -inf.

    A row's chunks are walked in `lanes` parts side by side (see `solve_states`); None chooses. On a CPU a long row
    is computed in stretches one after another, each from the state the last one left, and in chunks of at most 32
    tokens (see `_stretch`).

    Returns:
      o [B, T, HO, V] and the final states [N, HO, K, V], in the dtype of g.

    Numerics: gates, the triangular solve, states and sums in g's dtype (float32 or float64); operands of the
      products in bfloat16 when q is bfloat16.
    Memory: the backward pass keeps the inputs and the residuals named in `RESIDUAL_NAMES`, and recomputes the rest.
      The temporary arrays of either pass are those of one stretch.
    """
    B, T, HO = g.shape
    tokens = T
    if cu_seqlens is None and lanes is None:
        tokens, chunk_size = _stretch(T, chunk_size, B * HO)
    numerics = Numerics.of(q.dtype, g.dtype)
    run = partial(_rule, numerics=numerics, cu_seqlens=cu_seqlens, chunk_size=chunk_size, lanes=lanes)
    keep = jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)
    run = jax.checkpoint(run, policy=keep)
    if tokens >= T:
        return run(q, k, v, g, beta, initial_state, scale)

    def stretch(h, x):
        o, h = run(*x, h, scale)
        return h, o

    h = jnp.zeros((B, HO, k.shape[3], v.shape[3]), g.dtype) if initial_state is None else initial_state
    final, o = lax.scan(stretch, h, [packing.row_to_chunks(x, tokens) for x in (q, k, v, g, beta)])
    return packing.chunks_to_row(o, T), final


def _rule(q, k, v, g, beta, initial_state, scale, *, numerics, cu_seqlens, chunk_size, lanes):
    counts = (q.shape[2], k.shape[2], v.shape[2], g.shape[2])
    row = _Row(cu_seqlens, k.shape[0], k.shape[1], counts, chunk_size, lanes)
    k, v, g, beta = (row.to_chunks(x) for x in (k, v, g, beta))
    decay = chunk_cumsum(g)
    states, final = row.solve(numerics, k, v, decay, beta, initial_state)
    # The output's own arrays come to life after the walk, not before it: they would be kept through it.
    q, decay, states = lax.optimization_barrier((q, decay, states))
    q = row.to_chunks(q)
    o = chunk_output(q, k, states.v_new, states.h, decay, scale, numerics)
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
    row = _Row(cu_seqlens, k.shape[0], k.shape[1], (k.shape[2], v.shape[2], g.shape[2]), chunk_size)
    k, v, g, beta = (row.to_chunks(x) for x in (k, v, g, beta))
    states, _ = row.solve(numerics, k, v, chunk_cumsum(g), beta, initial_state)
    h = jnp.moveaxis(states.h, (2, 1), (0, 1))  # [B, lanes, L, heads..., K, V]
    return h.reshape(h.shape[0], -1, row.HO, *h.shape[-2:])[:, : row.num_chunks]


class _Row:
    """How the tokens of one call lie in chunks and lanes, for batches of whole rows and for packed sequences."""

    def __init__(
        self,
        cu_seqlens: jax.Array | None,
        B: int,
        T: int,
        head_counts: tuple[int, ...],
        chunk_size: int,
        lanes: int | None = None,
    ):
        self.B, self.T, self.C = B, T, chunk_size
        self.head_counts, self.HO = head_counts, max(head_counts)
        self.table = None
        self.num_chunks = max(1, -(-T // chunk_size))
        if cu_seqlens is not None:
            self.table = packing.packed_chunks(cu_seqlens, T, chunk_size)
            self.num_chunks = self.table.token.shape[0]
        self.lanes = _num_lanes(self.num_chunks, B * self.HO) if lanes is None else lanes

    def to_chunks(self, x: jax.Array) -> jax.Array:
        """[B, T, H, D] or [B, T, H] to [L, lanes, B, heads..., C, D]."""
        x = packing.row_to_chunks(x, self.C) if self.table is None else packing.gather_chunks(x, self.table)
        return split_heads(self._to_lanes(jnp.moveaxis(x, 2, 3)), 3, self.head_counts)

    def from_chunks(self, x: jax.Array) -> jax.Array:
        """[L, lanes, B, heads..., C, D] to [B, T, HO, D]."""
        x = jnp.swapaxes(x, 0, 1).reshape(-1, self.B, self.HO, *x.shape[-2:])[: self.num_chunks]
        x = jnp.moveaxis(x, 2, 3)
        return (
            packing.chunks_to_row(x, self.T) if self.table is None else packing.scatter_chunks(x, self.table)
        )

    def _to_lanes(self, x: jax.Array) -> jax.Array:
        """[chunks, ...] to [L, lanes, ...], padded with chunks that leave the state alone."""
        pad = -x.shape[0] % self.lanes
        x = jnp.pad(x, ((0, pad),) + ((0, 0),) * (x.ndim - 1))
        return jnp.swapaxes(x.reshape(self.lanes, -1, *x.shape[1:]), 0, 1)

    def solve(
        self,
        numerics: Numerics,
        k: jax.Array,
        v: jax.Array,
        decay: ChunkDecay,
        beta: jax.Array,
        initial_state: jax.Array | None,
    ) -> tuple[States, jax.Array]:
        """Solution of the recurrence for chunked inputs, and the final states [N, HO, K, V]."""
        dtype = numerics.accumulate
        transition = Transition(decay.total(), decay.to_end(), beta * decay.from_start(), k.astype(dtype))
        L = kkt(k, decay, beta, numerics)
        x = beta[..., None] * v.astype(dtype)
        shape = (*transition.total.shape[3:], k.shape[-1], v.shape[-1])
        if self.table is None:
            h0 = jnp.zeros((self.B, *shape), dtype)
            if initial_state is not None:
                h0 = split_heads(initial_state, 1, self.head_counts)
            states = solve_states(numerics, L, transition, x, None, h0)
            return states, states.last.reshape(self.B, self.HO, *shape[-2:])

        # A sequence's last chunk passes nothing on; what the next chunk starts from is its sequence's own state.
        table, N = self.table, self.table.is_empty.shape[0]
        chain = transition._replace(keep=_like(self._to_lanes(~table.is_last), transition.total))
        forcing, h0 = None, jnp.zeros((1, *shape), dtype)
        if initial_state is not None:
            starts = split_heads(initial_state, 1, self.head_counts)
            starts = jnp.where(_like(table.is_first, starts), starts[table.sequence], 0)[:, None]
            h0 = starts[0]
            forcing = self._to_lanes(jnp.roll(starts, -1, 0).at[-1].set(0))
        states = solve_states(numerics, L, chain, x, forcing, h0)

        def of_last_chunks(x):
            return jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[3:])[table.last_chunk]

        last, h, v_new = jax.tree.map(of_last_chunks, (transition, states.h, states.v_new))
        final = last.next_state(h, v_new, numerics)
        final = final.reshape(N, self.HO, *shape[-2:])
        untouched = 0 if initial_state is None else initial_state
        return states, jnp.where(_like(table.is_empty, final), untouched, final)


def _like(mask: jax.Array, x: jax.Array) -> jax.Array:
    """mask with axes of size 1 appended, to broadcast against x."""
    return mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))


def _stretch(T: int, chunk_size: int, width: int) -> tuple[int, int]:
    """Tokens of a stretch, and of a chunk in it, for B * HO = width; a row that is one stretch stays as it is.

    A CPU is bound by its arithmetic, of which shorter chunks need less, and by its caches, where the arrays of a
    stretch find room. A GPU needs all chunks of a row at once, and wide products.
    """
    if jax.default_backend() != "cpu" or T * width <= _CPU_STRETCH:
        return T, chunk_size
    chunk_size = min(chunk_size, _CPU_CHUNK_SIZE)
    chunks = -(-T // chunk_size)
    stretches = -(-chunks // max(1, _CPU_STRETCH // (width * chunk_size)))
    return -(-chunks // stretches) * chunk_size, chunk_size


def _num_lanes(num_chunks: int, width: int) -> int:
    """Lanes to walk a row's chunks in, for B * HO = width: more than one where the walk is bound by latency.

    Forward on an H200 (2026-11-21, jax 0.11.2, bfloat16, K = V = 128, 32768 tokens): 8 heads take 10.4 ms in one
    lane, 5.6 in 8, 4.5 in 16; 64 heads take 19.0 ms in one lane and 26.1 in 8.
    """
    if jax.default_backend() == "cpu":
        return 1
    lanes = 1
    while 2 * lanes * width <= 128 and 8 * lanes * lanes <= num_chunks:
        lanes *= 2
    return lanes if lanes >= 8 else 1
