"""The gated delta rule on Hopper: composition of the kernels, choice of the split, padding. No device code.

    chunk_gates  ->  tril_inverse  ->  [recurrence of transitions  ->  segment_states]  ->  recurrence

The part in brackets runs only where there are too few sequences and heads to fill the GPU: sequences are then cut
into segments, whose effect on a state is computed for all of them at once. That is exact, not an approximation.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from gdn_jax.shapes import Dims
from pallas_kernels import recurrence as recurrence_kernel
from pallas_kernels import tril_inverse as tril_inverse_kernel
from pallas_kernels.chunk_gates import chunk_gates
from pallas_kernels.common import CHUNK, NUM_SMS, round_up
from pallas_kernels.recurrence import Split, Tables, recurrence
from pallas_kernels.segment_states import segment_states
from pallas_kernels.tril_inverse import tril_inverse

GRANULE = 64
"""K and V are padded with zeros to a multiple of this: the columns of a swizzled tile, and the rows of a wgmma."""

STEP = {1: 1.43, 2: 2.15}
"""Microseconds of one chunk with one or two state warpgroups (H200, 2026-11-21, K = V = 128)."""

TRANSITION_STEP = {1: 0.94, 2: 1.3}
"""The same without outputs."""

SEGMENT_STEP = 0.7
"""Microseconds of one step of segment_states (estimate)."""

SEGMENT_LAUNCHES = 10.0
"""Microseconds of two more launches and the filling of their pipelines (estimate)."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the forward runs, not what it computes. None stands for a choice from the shapes."""

    state_warpgroups: int | None = None
    """64-row tiles of the state in one CTA of the recurrence, 1 or 2."""
    segment_chunks: int | None = None
    """Chunks of a segment; 0 for whole sequences."""
    qk_in_inverse: bool = True
    """Whether tril_inverse computes Q K^T, once per key head (where Hq = Hk), and not the recurrence."""
    inverse: tril_inverse_kernel.Config | None = None
    recurrence: recurrence_kernel.Config | None = None
    """Of the walk that writes outputs."""


class Residuals(NamedTuple):
    """What the forward leaves for a backward. K and V are padded to multiples of 64."""

    g2_cum: Float[Array, "B HO T64"]
    """In-chunk cumulative log2 decay."""
    beta_t: Float[Array, "B HO T64"]
    a: Float[Array, "B HO T64 C"]
    """A diag(beta) of every chunk, A ungated."""
    segment_starts: Float[Array, "items HO V K"] | None
    """State at the start of every segment, transposed; None where sequences are not cut."""


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


def choose_split(
    dims: Dims, K: int, V: int, packed: bool, config: Config, sms: int = NUM_SMS
) -> tuple[int, int | None]:
    """(state warpgroups per CTA, chunks of a segment or None) of least predicted time, from static sizes only.

    Args:
      K, V: padded widths.
      packed: the lengths are known at run time only: the longest is taken to be twice the mean.
    """
    num_chunks = -(-dims.T // CHUNK)
    sequences, longest = dims.N, num_chunks
    if packed and dims.N > 1:
        longest = min(num_chunks, -(-2 * num_chunks // dims.N))
    pairs = V % (2 * GRANULE) == 0 and K % (2 * GRANULE) == 0 and K <= 128
    warpgroups = [config.state_warpgroups] if config.state_warpgroups else [2, 1] if pairs else [1]

    def waves(ctas: int) -> int:
        return -(-ctas // sms)

    def time(n: int, length: int) -> float:
        if not length:
            return waves(sequences * dims.HO * V // (GRANULE * n)) * longest * STEP[n]
        segments = -(-longest // length)
        items = num_chunks // length + sequences if packed else sequences * segments
        main = waves(items * dims.HO * V // (GRANULE * n)) * length * STEP[n]
        cut = 2 if pairs else 1
        ctas = (items - sequences) * dims.HO * (V + K) // (GRANULE * cut)
        prepare = waves(ctas) * length * TRANSITION_STEP[cut]
        return main + prepare + segments * SEGMENT_STEP + SEGMENT_LAUNCHES

    if config.segment_chunks is not None:
        lengths = [config.segment_chunks]
    else:
        lengths = [0, *sorted({-(-longest // n) for n in range(2, 65)} - {longest})]
        lengths = [length for length in lengths if length == 0 or length >= 4]
    n, length = min(((n, length) for n in warpgroups for length in lengths), key=lambda c: time(*c))
    return n, length or None


def forward(
    q: Float[Array, "B T Hq K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HO"] | None,
    beta: Float[Array, "B T HO"] | None,
    initial_state: Float[Array, "N HO _ _"] | None,
    *,
    scale: float | Float[Array, ""],
    cu_seqlens: Int[Array, " N1"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    use_qk_l2norm: bool = False,
    state_layout: str = "kv",
    config: Config | None = None,
    interpret=None,
) -> tuple[Float[Array, "B T HO V"], Float[Array, "N HO _ _"], Residuals]:
    """The rule on arguments that gdn_jax.gated_delta_rule has checked, and that check_supported accepts.

    Args: those of gdn_jax.gated_delta_rule; scale is a number, or an array (then applied to o afterwards).
      config: None for a choice from the shapes.
      interpret: parameters of Pallas' interpreter, None to compile.

    Returns:
      o in q's dtype, the final states in float32 and the residuals.

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
    kv_layout = state_layout == "kv"
    f32 = jnp.float32
    dynamic_scale = scale if isinstance(scale, jax.Array) else None
    static_scale = 1.0 if dynamic_scale is not None else float(scale)

    if use_qk_l2norm:
        q, k = _l2norm(q), _l2norm(k)
    g = jnp.zeros((B, T, HO), f32) if g is None else g.astype(f32)
    beta = jnp.ones((B, T, HO), f32) if beta is None else beta.astype(f32)
    if segment_ids is not None:
        changes = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
        g = jnp.where(changes[..., None], -jnp.inf, g)
    K64, V64, T8 = round_up(K, GRANULE), round_up(V, GRANULE), round_up(T, 8)
    q, k, v = _pad(q, (B, T8, Hq, K64)), _pad(k, (B, T8, Hk, K64)), _pad(v, (B, T8, HV, V64))
    if initial_state is not None:
        padded = (N, HO, K64, V64) if kv_layout else (N, HO, V64, K64)
        initial_state = _pad(initial_state.astype(f32), padded)

    warpgroups, segment_chunks = choose_split(dims, K64, V64, packed, config)
    main = config.recurrence or recurrence_kernel.Config.default(K64, V64, True, warpgroups)
    tables, first = None, None
    if packed:
        split, tables = _packed_tables(cu_seqlens.astype(jnp.int32), T, segment_chunks)
        first = _first_rows(tables.cu_seqlens, T)
    else:
        num_chunks = -(-T // CHUNK)
        segments = 1 if segment_chunks is None else -(-num_chunks // segment_chunks)
        split = Split(B * segments, segment_chunks)

    g2_cum, beta_t = chunk_gates(g, beta, first, interpret=interpret)
    q_for_inverse = q if config.qk_in_inverse and Hq == Hk and not main.output_warpgroup else None
    a, qk = tril_inverse(
        k, beta_t, q_for_inverse, first, scale=static_scale, config=config.inverse, interpret=interpret
    )
    starts = None
    if segment_chunks is not None:
        n, m_t = recurrence(
            None,
            k,
            v,
            g2_cum,
            a,
            None,
            None,
            tables,
            split=split,
            write_transition=True,
            interpret=interpret,
        )
        first_item = tables.first_item if packed else None
        starts = segment_states(
            n,
            m_t,
            initial_state,
            first_item,
            num_sequences=N,
            kv_layout=kv_layout,
            interpret=interpret,
        )
    o, final = recurrence(
        q,
        k,
        v,
        g2_cum,
        a,
        qk,
        initial_state if starts is None else starts,
        tables,
        split=split,
        scale=static_scale,
        kv_layout=kv_layout,
        s0_kv_layout=kv_layout and starts is None,
        config=main,
        interpret=interpret,
    )
    if (T8, V64) != (T, V):
        o = o[:, :T, :, :V]
    if (K64, V64) != (K, V):
        final = final[:, :, :K, :V] if kv_layout else final[:, :, :V, :K]
    if dynamic_scale is not None:
        o = (o.astype(f32) * dynamic_scale.astype(f32)).astype(o.dtype)
    return o, final, Residuals(g2_cum, beta_t, a, starts)


def _pad(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if x.shape == shape:
        return x
    return jnp.pad(x, [(0, n - m) for m, n in zip(x.shape, shape, strict=True)])


def _l2norm(x: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    return (x32 * lax.rsqrt(jnp.sum(x32 * x32, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def _first_rows(cu_seqlens: jax.Array, T: int) -> jax.Array:
    """[NT C] row of its chunk at which each token's sequence starts; the padding counts as one more sequence."""
    token = jnp.arange(round_up(T, CHUNK), dtype=jnp.int32)
    if cu_seqlens.shape[0] <= 64:
        begins = jnp.max(jnp.where(cu_seqlens <= token[:, None], cu_seqlens, 0), axis=1)
    else:
        begins = jnp.zeros_like(token).at[cu_seqlens].max(cu_seqlens, mode="drop")
        begins = lax.cummax(begins)
    return jnp.maximum(begins - token // CHUNK * CHUNK, 0)


def _packed_tables(cu_seqlens: jax.Array, T: int, segment_chunks: int | None) -> tuple[Split, Tables]:
    N = cu_seqlens.shape[0] - 1
    if segment_chunks is None:
        return Split(N + 1, None), Tables(cu_seqlens, None, None)
    begin, end = cu_seqlens[:-1], cu_seqlens[1:]
    chunks = jnp.where(end > begin, -(-end // CHUNK) - begin // CHUNK, 0)
    segments = jnp.maximum(-(-chunks // segment_chunks), 1)
    first_item = jnp.pad(jnp.cumsum(segments, dtype=jnp.int32), (1, 1))
    first_item = first_item.at[N + 1].set(first_item[N] + 1)  # the padding is one item
    # Sum of ceil(c / s) <= (sum of c) / s + N, and every border between sequences lies in at most one more chunk.
    num_items = (-(-T // CHUNK) + N) // segment_chunks + N + 1
    item = jnp.arange(num_items, dtype=jnp.int32)
    sequence = jnp.searchsorted(first_item[1:], item, side="right", method="compare_all").astype(jnp.int32)
    return Split(num_items, segment_chunks), Tables(cu_seqlens, sequence, first_item)
