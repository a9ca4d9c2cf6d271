"""The gated delta rule on Hopper: composition of the kernels, choice of the split, padding. No device code.

    chunk_gates  ->  tril_inverse  ->  [recurrence of transitions  ->  segment_states]  ->  recurrence

The part in brackets runs only where there are too few sequences and heads to fill the GPU: sequences are then cut
into segments, whose effect on a state is computed for all of them at once. That is exact, not an approximation.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from gdn_jax.shapes import Dims
from pallas_kernels import recurrence as recurrence_kernel
from pallas_kernels import tril_inverse as tril_inverse_kernel
from pallas_kernels.chunk_gates import chunk_gates
from pallas_kernels.common import CHUNK, GRANULE, L2NORM_EPS, NUM_SMS, round_up
from pallas_kernels.recurrence import Split, Tables, recurrence
from pallas_kernels.segment_states import segment_states
from pallas_kernels.tril_inverse import tril_inverse
from pallas_kernels.work_split import choose_split, work_of

MANY_WAVES = 16
"""Waves of CTAs after which the order of the sequences no longer matters."""

MAX_ORDERED = 128
"""Sequences up to which they are ordered: the ranks are N^2 comparisons."""

FOLDED_SCALES = (2.0**-16, 16.0)
"""Scales that the recurrence applies: its P holds them, which float16 must have room for. Others are applied to o
afterwards."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the forward runs, not what it computes. None stands for a choice from the shapes."""

    state_warpgroups: int | None = None
    """64-row tiles of the state in one CTA of the recurrence, 1 or 2."""
    segment_chunks: int | None = None
    """Chunks of a segment; 0 for whole sequences."""
    inverse: tril_inverse_kernel.Config | None = None
    recurrence: recurrence_kernel.Config | None = None
    """Of the walk that writes outputs."""


jax.tree_util.register_static(Split)  # Residuals cross the borders of compiled functions


class Segments(NamedTuple):
    """What a forward over segments leaves for a backward over the same ones."""

    starts: Float[Array, "items HO V K"]
    """State at the start of every segment, transposed."""
    m_t: Float[Array, "items HO K K"]
    """What a segment does to a state, S -> S m_t + ..; that of a sequence's last one is not written."""
    tables: Tables | None
    """Of packed rows."""
    split: Split


class Residuals(NamedTuple):
    """What the forward leaves for a backward. K and V are padded to multiples of 64."""

    g2_cum: Float[Array, "B HO T64"]
    """In-chunk cumulative log2 decay."""
    beta_t: Float[Array, "B HO T64"]
    t: Float[Array, "B HO T64 C"]
    """T of every chunk, as tril_inverse leaves it: the gated inverse times diag(beta); with use_qk_l2norm its rows
    are divided by the keys' norms."""
    segments: Segments | None
    """None where sequences are not cut."""


def check_supported(dims: Dims, dtype, *, chunk_size: int = CHUNK) -> str | None:
    """Why these kernels cannot run a call of the rule, from its shapes and dtypes; None if they can.

    Args:
      dims: of gdn_jax.shapes.
      dtype: of q, k and v.
      chunk_size: as asked for.
    """
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"q, k and v are {jnp.dtype(dtype).name}; the kernels take bfloat16 and float16"
    if chunk_size != CHUNK:
        return f"chunk_size is {chunk_size}; the kernels are written for {CHUNK}"
    if dims.K > 256 or dims.V > 256:
        return f"K = {dims.K}, V = {dims.V}; the kernels go up to 256"
    if not dims.B * dims.T * dims.N:
        return "there are no tokens"
    if dims.B * dims.T * dims.HO * max(dims.K, dims.V, CHUNK) >= 2**40:
        return "the arrays are larger than the offsets of a bulk copy"
    return None


def device_reason() -> str | None:
    """Why JAX's default device cannot run the kernels; None if it can."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"the default device is a {device.platform}; the kernels need an NVIDIA GPU"
    capability = str(getattr(device, "compute_capability", None))
    return None if capability == "9.0" else f"compute capability {capability}; the kernels need 9.0"


def known_lengths(cu_seqlens) -> np.ndarray | None:
    """cu_seqlens as int64 in NumPy where its values are known while tracing, else None."""
    if cu_seqlens is None or isinstance(cu_seqlens, jax.core.Tracer):
        return None
    return np.asarray(cu_seqlens).astype(np.int64)


def forward(
    q: Float[Array, "B T Hq K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HO"] | None,
    beta: Float[Array, "B T HO"] | None,
    initial_state: Float[Array, "N HO _ _"] | None,
    *,
    scale: float | Float[Array, ""],
    cu_seqlens: Int[Array, " N1"] | Int[np.ndarray, " N1"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    use_qk_l2norm: bool = False,
    state_layout: str = "kv",
    config: Config | None = None,
    interpret=None,
) -> tuple[Float[Array, "B T HO V"], Float[Array, "N HO _ _"], Residuals]:
    """The rule on arguments that gdn_jax.gated_delta_rule has checked, and that check_supported accepts.

    Args: those of gdn_jax.gated_delta_rule; scale is a number, or an array (then applied to o afterwards).
      cu_seqlens: where its values are known while tracing (NumPy, or a JAX array that is not traced) the work is
        split by the true lengths, the tables cost nothing at run time, and sequences of equal lengths run as a
        batch. Otherwise the split assumes equal lengths.
      config: None for a choice from the shapes.
      interpret: parameters of Pallas' interpreter, None to compile.

    Returns:
      o in q's dtype, the final states in float32 and the residuals (of the batch, where sequences run as one).

    Numerics: operands of products rounded to q's dtype (float16 inside the inverse), sums, gates and states in
      float32. Keys with |k|^2 beta > 2 leave the range where the inverse is accurate: normalise them.
    """
    config = config or Config()
    B, T, Hk, K = k.shape
    Hq, HV, V = q.shape[2], v.shape[2], v.shape[3]
    HO = max(Hq, HV)
    packed = cu_seqlens is not None
    N = cu_seqlens.shape[0] - 1 if packed else B
    dims = Dims(B=B, T=T, N=N, Hq=Hq, Hk=Hk, HV=HV, HO=HO, K=K, V=V)
    known = known_lengths(cu_seqlens)
    if known is not None and (length := common_length(known, T)):
        o, final, residuals = forward(
            q.reshape(N, length, Hq, K),
            k.reshape(N, length, Hk, K),
            v.reshape(N, length, HV, V),
            None if g is None else g.reshape(N, length, HO),
            None if beta is None else beta.reshape(N, length, HO),
            initial_state,
            scale=scale,
            use_qk_l2norm=use_qk_l2norm,
            state_layout=state_layout,
            config=config,
            interpret=interpret,
        )
        return o.reshape(1, T, HO, V), final, residuals

    work = work_of(dims, packed, known)
    K64, V64 = round_up(K, GRANULE), round_up(V, GRANULE)
    warpgroups, segment_chunks = choose_split(
        dims, K64, V64, work, state_warpgroups=config.state_warpgroups, segment_chunks=config.segment_chunks
    )
    split, tables, first = Split(B, None), None, None
    if cu_seqlens is not None:
        starts: Any = cu_seqlens.astype(jnp.int32) if known is None else known.astype(np.int32)
        ctas = N * HO * V64 // (GRANULE * warpgroups)  # with few waves of them a long one at the end is felt
        longest_first = NUM_SMS < ctas < MANY_WAVES * NUM_SMS and 1 < N <= MAX_ORDERED
        split, tables = _packed_tables(starts, T, segment_chunks, longest_first)
        if known is None or _share_chunks(known, T):
            first = _first_rows(starts, T)
    elif segment_chunks is not None:
        num_chunks = -(-T // CHUNK)
        split = Split(B * -(-num_chunks // segment_chunks), segment_chunks)
    main = config.recurrence or recurrence_kernel.Config.default(K64, V64, True, warpgroups)
    in_kernel = not isinstance(scale, jax.Array) and FOLDED_SCALES[0] <= scale <= FOLDED_SCALES[1]
    static = _Static(
        scale=float(scale) if in_kernel else 1.0,
        use_qk_l2norm=use_qk_l2norm,
        kv_layout=state_layout == "kv",
        split=split,
        config=dataclasses.replace(config, recurrence=main),
        interpret=interpret,
    )
    tables, first = jax.tree.map(jnp.asarray, (tables, first))
    run = _compiled if interpret is None else _run  # the interpreter hangs inside a compiled function
    o, final, residuals = run(static, q, k, v, g, beta, initial_state, segment_ids, tables, first)
    if not in_kernel:
        o = (o.astype(jnp.float32) * jnp.asarray(scale, jnp.float32)).astype(o.dtype)
    return o, final, residuals


class _Static(NamedTuple):
    """What a compiled forward is made for, besides shapes."""

    scale: float
    use_qk_l2norm: bool
    kv_layout: bool
    split: Split
    config: Config
    """Its `recurrence` is given."""
    interpret: Any


def _run(static: _Static, q, k, v, g, beta, initial_state, segment_ids, tables: Tables | None, first):
    """The kernels in order, with the padding around them."""
    B, T, Hk, K = k.shape
    Hq, HV, V = q.shape[2], v.shape[2], v.shape[3]
    HO = max(Hq, HV)
    N = B if tables is None else tables.cu_seqlens.shape[0] - 1
    f32, interpret, config = jnp.float32, static.interpret, static.config
    main: Any = config.recurrence

    normalize = static.use_qk_l2norm
    if normalize and k.dtype == jnp.float16:  # which has no room for the reciprocal norm of a key of zeros
        q, k, normalize = _l2norm(q), _l2norm(k), False
    g = jnp.zeros((B, T, HO), f32) if g is None else g.astype(f32)
    beta = jnp.ones((B, T, HO), f32) if beta is None else beta.astype(f32)
    if segment_ids is not None:
        changes = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
        g = jnp.where(changes[..., None], -jnp.inf, g)
    K64, V64, T8 = round_up(K, GRANULE), round_up(V, GRANULE), round_up(T, 8)
    q, k, v = _pad(q, (B, T8, Hq, K64)), _pad(k, (B, T8, Hk, K64)), _pad(v, (B, T8, HV, V64))
    if initial_state is not None:
        padded = (N, HO, K64, V64) if static.kv_layout else (N, HO, V64, K64)
        initial_state = _pad(initial_state.astype(f32), padded)

    g2_cum, beta_t = chunk_gates(g, beta, first, interpret=interpret)
    inverse = dict(normalize=normalize, config=config.inverse, interpret=interpret)
    t: Any = tril_inverse(k, beta_t, g2_cum, first, **inverse)
    rstd = None
    if normalize:
        t, k_rstd = t
        rstd = _reciprocal_norms(q), k_rstd
    segments, options = None, dict(split=static.split, rstd=rstd, interpret=interpret)
    if static.split.segment_chunks is not None:
        n, m_t = recurrence(None, k, v, g2_cum, t, None, tables, write_transition=True, **options)
        starts = segment_states(
            n,
            m_t,
            initial_state,
            None if tables is None else tables.first_item,
            num_sequences=N,
            kv_layout=static.kv_layout,
            interpret=interpret,
        )
        segments = Segments(starts, m_t, tables, static.split)
    o, final = recurrence(
        q,
        k,
        v,
        g2_cum,
        t,
        initial_state if segments is None else segments.starts,
        tables,
        scale=static.scale,
        kv_layout=static.kv_layout,
        s0_kv_layout=static.kv_layout and segments is None,
        config=main,
        **options,
    )
    if (T8, V64) != (T, V):
        o = o[:, :T, :, :V]
    if (K64, V64) != (K, V):
        final = final[:, :, :K, :V] if static.kv_layout else final[:, :, :V, :K]
    return o, final, Residuals(g2_cum, beta_t, t, segments)


_compiled = jax.jit(_run, static_argnums=0)
"""So that a call outside jit compiles once, not every time."""


def common_length(cu_seqlens: np.ndarray, T: int) -> int | None:
    """Tokens of every sequence, if all have equally many and fill the row: then they are rows of a batch."""
    lengths = np.diff(cu_seqlens)
    length = int(lengths[0])
    return length if length and not length % 8 and cu_seqlens[-1] == T and (lengths == length).all() else None


def _share_chunks(cu_seqlens: np.ndarray, T: int) -> bool:
    """Whether some chunk holds tokens of two sequences, or of one and of the padding."""
    starts = cu_seqlens[:-1] if cu_seqlens[-1] == T else cu_seqlens
    return bool((starts % CHUNK).any())


def _pad(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if x.shape == shape:
        return x
    return jnp.pad(x, [(0, n - m) for m, n in zip(x.shape, shape, strict=True)])


def _l2norm(x: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    return (x32 * lax.rsqrt(jnp.sum(x32 * x32, axis=-1, keepdims=True) + L2NORM_EPS)).astype(x.dtype)


def _reciprocal_norms(x: Float[Array, "B T H K"]) -> Float[Array, "B H T64"]:
    """Reciprocal norm of every head of every token, head-major."""
    x32 = x.astype(jnp.float32)
    rstd = lax.rsqrt(jnp.sum(x32 * x32, axis=-1) + L2NORM_EPS).swapaxes(1, 2)
    return jnp.pad(rstd, ((0, 0), (0, 0), (0, -x.shape[1] % CHUNK)))


UNROLLED = 16
"""Sequences up to which tables are element-wise expressions, one fusion each, without a reduction or a scan."""


def _first_rows(cu_seqlens: Any, T: int) -> Any:
    """[NT C] row of its chunk at which each token's sequence starts. In NumPy where cu_seqlens is.

    A token of the padding counts as a sequence of its own: it has no entries in the triangular inverse, where
    garbage it holds (NaN times 0) would reach the tokens that share its chunk.
    """
    xp: Any = np if isinstance(cu_seqlens, np.ndarray) else jnp
    token = xp.arange(round_up(T, CHUNK), dtype=np.int32)
    if xp is np:
        begins = cu_seqlens[np.searchsorted(cu_seqlens, token, side="right") - 1]
    elif cu_seqlens.shape[0] <= UNROLLED + 1:
        begins = jnp.zeros_like(token)
        for n in range(1, cu_seqlens.shape[0]):
            begins = jnp.where(cu_seqlens[n] <= token, cu_seqlens[n], begins)
    elif cu_seqlens.shape[0] <= 64:
        begins = jnp.max(jnp.where(cu_seqlens <= token[:, None], cu_seqlens, 0), axis=1)
    else:
        begins = jnp.zeros_like(token).at[cu_seqlens].max(cu_seqlens, mode="drop")
        begins = lax.cummax(begins)
    begins = xp.where(token >= cu_seqlens[-1], token, begins)
    return xp.maximum(begins - token // CHUNK * CHUNK, 0).astype(np.int32)


def _longest_first(chunks: Any) -> Any:
    """[N + 1] sequences, those of most chunks first, then N for the padding. In NumPy where chunks is."""
    N = chunks.shape[0]
    if isinstance(chunks, np.ndarray):
        return np.append(np.argsort(-chunks, kind="stable"), N).astype(np.int32)
    n = jnp.arange(N, dtype=jnp.int32)
    before = (chunks > chunks[:, None]) | ((chunks == chunks[:, None]) & (n < n[:, None]))
    place = jnp.sum(before, axis=1, dtype=jnp.int32)
    at = jnp.arange(N + 1, dtype=jnp.int32)[:, None]
    return jnp.sum(jnp.where(place == at, n, 0), axis=1, dtype=jnp.int32) + jnp.where(at[:, 0] == N, N, 0)


def _packed_tables(
    cu_seqlens: Any, T: int, segment_chunks: int | None, longest_first: bool = False
) -> tuple[Split, Tables]:
    """Items of packed rows. In NumPy where cu_seqlens is.

    Args:
      longest_first: whether whole sequences are started in that order.
    """
    N = cu_seqlens.shape[0] - 1
    xp: Any = np if isinstance(cu_seqlens, np.ndarray) else jnp
    begin, end = cu_seqlens[:-1], cu_seqlens[1:]
    chunks = xp.where(end > begin, -(-end // CHUNK) - begin // CHUNK, 0)
    if segment_chunks is None:
        order = _longest_first(chunks) if longest_first else None
        return Split(N + 1, None), Tables(cu_seqlens, order, None)
    segments = xp.maximum(-(-chunks // segment_chunks), 1)
    # Sum of ceil(c / s) <= (sum of c) / s + N, and every border between sequences lies in at most one more chunk.
    num_items = (-(-T // CHUNK) + N) // segment_chunks + N + 1
    item = xp.arange(num_items, dtype=np.int32)
    if N <= UNROLLED:
        first_items, sequence = [0 * chunks[0]], xp.zeros_like(item)
        for n in range(N):
            first_items.append(first_items[-1] + segments[n])
        first_items.append(first_items[-1] + 1)  # the padding is one item
        for first in first_items[1:]:
            sequence = sequence + (item >= first)
        first_item = xp.stack(first_items)
    else:
        ends = xp.cumsum(segments, dtype=np.int32)
        first_item = xp.concatenate([xp.zeros_like(ends[:1]), ends, ends[-1:] + 1])
        sequence = xp.searchsorted(first_item[1:], item, side="right")
    tables = Tables(cu_seqlens, sequence.astype(np.int32), first_item.astype(np.int32))
    return Split(num_items, segment_chunks), tables
