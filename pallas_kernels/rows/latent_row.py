"""Latent attention of one token: two kernels between the projections of its input and the one of its output.

    c = kv (mean(kv^2) + eps)^(-1/2) w,   k_r and each q_r turned by the token's position;   both go to the cache
    s_hj = (q_h . c_j + q_r,h . k_r,j) scale,   o_h = sum_{j <= i} softmax_j(s_h) c_j
    y_h = sigmoid(gate_h) W_h o_h

Every head reads the same cache. So a CTA of the first kernel has all heads and some of the tokens: each of its warps
has a head or two, and all that a token asks of it stays in registers. A CTA of the second one adds up what all have
found for a head, and multiplies it by some rows of the matrix, which are on their way meanwhile.

Inputs (GMEM): channels [1, F], from `Places` on kv [C], k_r [R] in pairs and the gates [H]; q [1, H C + H R], all
q_h, then all q_r,h in pairs; w [C] float32; R / 2 frequencies float32; W [H, V, C]. In place (GMEM): length [1],
int32, tokens before this one; the cache, k_r [1, S, 1, R], the firsts of the pairs before the seconds, and c
[1, S, 1, C]. A token for which there is no slot takes the last one, and its y is NaN. Between the kernels (GMEM):
maxima and sums [parts, H], o [parts, H, C] float32, and the length, which the second one changes. Output (GMEM):
y [1, H V] of q's dtype.
Grid: CTAs of some warpgroups: `Config.parts` of the first, one for each head and `ROWS` rows of W to a warpgroup of
the second. Shared memory: `_memory`.
Numerics: float32; c is rounded as it lies in the cache. The same bits in every call. Hardware:
`NEEDS`. Limits: `check_supported`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.device import generations
from pallas_kernels.device.angles import cos_and_sin
from pallas_kernels.device.lanes import WARP, lane_layout, load, spread
from pallas_kernels.device.launch import Shaped, grid_index, kernel, launch, warpgroup_index
from pallas_kernels.device.memory import Barriers, Buffer, Memory, store_any
from pallas_kernels.device.needs import Needs

NEEDS = Needs.TMA

PIECE = 256
"""Columns of c that a warp has at once."""

TOKENS = 4
"""Tokens whose scores are taken at once."""

ROWS = 4
"""Rows of W of a warpgroup."""

WARPGROUPS = 4
"""Warpgroups of a CTA at most."""

WARPGROUP = 128
"""Threads of a warpgroup."""

MOST_SLOTS = 8192
"""Slots of a cache at most: without tensor cores a long one takes longer to multiply than to read."""


class Places(NamedTuple):
    """Where parts begin in the channels."""

    kv: int
    gate: int | None
    """None: there is no gate."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the tokens are shared out, not what is computed."""

    parts: int
    """CTAs that share them."""
    stages: int = 4
    """Groups of `TOKENS` in shared memory."""

    @classmethod
    def default(cls, slots: int) -> "Config":
        """Few parts for few slots: the second kernel adds them up."""
        return cls(min(128, max(16, slots // 32)))


def check_supported(q: Shaped, k: Shaped, v: Shaped, values: Shaped, places: Places) -> str | None:
    """Why the kernels cannot take queries, a cache, a matrix and places; None if they can."""
    (H, V, C), (N, S, _, R) = values.shape, k.shape
    if N != 1:
        return f"{N} rows; the kernels take one"
    if not q.dtype == k.dtype == v.dtype == values.dtype or q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{q.dtype}, {k.dtype}, {v.dtype} and {values.dtype}; the kernels take bfloat16 or float16, all alike"
    if H not in (4, 8, 16, 32) or C % PIECE or C > 2 * PIECE or R != 2 * WARP:
        return f"{H} heads, widths {C} and {R}; the kernels take 4, 8, 16 and 32 heads, {PIECE} or {2 * PIECE} and 64"
    if V % (ROWS * _warpgroups(H)):
        return f"values of {V}; the kernels take multiples of {ROWS * _warpgroups(H)}"
    if S > MOST_SLOTS:
        return f"{S} slots; the kernels take {MOST_SLOTS}"
    if places.kv % 8 or (H * C) % R:
        return f"latents that begin at {places.kv}; the kernels take multiples of 8"
    return None


def _warpgroups(H: int) -> int:
    return min(WARPGROUPS, H // 4)


def _memory(C: int, R: int, stages: int, warpgroups: int, dtype: Any) -> Memory:
    return {
        "c": Buffer((stages, TOKENS, C // PIECE, PIECE), dtype),
        "r": Buffer((stages, TOKENS, R), dtype),
        "full": Barriers(arrivals=(C // PIECE + 1) * TOKENS, count=stages),
        "empty": Barriers(arrivals=warpgroups, count=stages),
    }


WIDE, NARROW = lane_layout(WARP, PIECE // WARP), lane_layout(WARP, 1)
"""Layouts of pieces of c, and of halves of k_r, a head to a warp."""


def _rotated(pair: list[jax.Array], cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
    a, b = pair
    return a * cos - b * sin, b * cos + a * sin


def _attend(gmem: Any, smem: Any, *, places: Places, scale: float, eps: float, config: Config) -> None:
    """The first kernel."""
    stages, C = smem.c.shape[0], gmem.w.shape[0]
    S, R, H = gmem.k.shape[1], gmem.k.shape[3], gmem.m.shape[1]
    wg, cta, parts, warpgroups = warpgroup_index(), grid_index(), config.parts, _warpgroups(H)
    rows, half, columns = H // warpgroups, R // 2, [pl.ds(first, PIECE) for first in range(0, C, PIECE)]
    dtype, heads = smem.c.dtype, pl.ds(wg * (H // warpgroups), H // warpgroups)
    length = jnp.minimum(gmem.length[0], S)
    each = lax.div(length + (parts - 1), jnp.int32(parts))
    begin = cta * each
    count = jnp.clip(length - begin, 0, each)
    groups = lax.div(count + (TOKENS - 1), jnp.int32(TOKENS))

    def start(i):
        slot = lax.rem(i, jnp.int32(stages))
        for t in range(TOKENS):  # the last token again where there is none
            token = begin + jnp.minimum(i * TOKENS + t, count - 1)
            for n, own in enumerate(columns):
                plgpu.copy_gmem_to_smem(
                    gmem.v.at[0, token, 0, own], smem.c.at[slot, t, n], smem.full.at[slot]
                )
            plgpu.copy_gmem_to_smem(gmem.k.at[0, token, 0], smem.r.at[slot, t], smem.full.at[slot])

    @pl.when(wg == 0)
    def _():
        lax.fori_loop(0, jnp.minimum(groups, stages), lambda i, _: start(i), None)

    cos, sin = cos_and_sin(gmem.length[0].astype(jnp.float32) * load(gmem.frequencies, NARROW.reduce(0)))
    c, k_r = _own(gmem, places, eps, columns, cos, sin, dtype)
    is_last = cta == parts - 1

    @pl.when(is_last & (wg == 0))
    def _():
        slot = jnp.minimum(gmem.length[0], S - 1)
        for own, x in zip(columns, c, strict=True):
            store_any(gmem.v.at[0, slot, 0, own], x.astype(dtype))
        for own, x in zip((pl.ds(0, half), pl.ds(half, half)), k_r, strict=True):
            store_any(gmem.k.at[0, slot, 0, own], x.astype(dtype))

    q = [load(gmem.q.at[heads, own], WIDE).astype(jnp.float32) * scale for own in columns]
    first = gmem.q_pairs.shape[0] - H
    q_r = [
        load(gmem.q_pairs.at[pl.ds(first + heads.start, rows), :, j], NARROW).astype(jnp.float32) * scale
        for j in (0, 1)
    ]
    q_r = _rotated(q_r, *(spread(x, (rows, half), 1, NARROW) for x in (cos, sin)))

    def score(c, k_r):
        wide = [a * spread(x, (rows, PIECE), 1, WIDE) for a, x in zip(q, c, strict=True)]
        narrow = [a * spread(x, (rows, half), 1, NARROW) for a, x in zip(q_r, k_r, strict=True)]
        wide, narrow = (jnp.sum(functools.reduce(jnp.add, x), axis=1) for x in (wide, narrow))
        return wide + plgpu.layout_cast(narrow, WIDE.reduce(1))

    def of_slot(slot, t):
        pieces = [smem.c.at[slot, t, n] for n in range(len(columns))]
        wide = [load(piece, WIDE.reduce(0)).astype(jnp.float32) for piece in pieces]
        narrow = [
            load(smem.r.at[slot, t, pl.ds(j * half, half)], NARROW.reduce(0)).astype(jnp.float32)
            for j in (0, 1)
        ]
        return wide, narrow

    def group(i, carry):
        m, total, *acc = carry
        slot = lax.rem(i, jnp.int32(stages))
        plgpu.barrier_wait(smem.full.at[slot])
        scores = [
            jnp.where(i * TOKENS + t < count, score(*of_slot(slot, t)), -jnp.inf) for t in range(TOKENS)
        ]
        most = functools.reduce(jnp.maximum, [m, *scores])
        old, p = jnp.exp(m - most), [jnp.exp(s - most) for s in scores]
        acc = [x * spread(old, (rows, PIECE), 0, WIDE) for x in acc]
        for t in range(TOKENS):
            weight = spread(p[t], (rows, PIECE), 0, WIDE)
            for n, x in enumerate(of_slot(slot, t)[0]):
                acc[n] = acc[n] + weight * spread(x, (rows, PIECE), 1, WIDE)

        @pl.when(i + stages < groups)
        def _():
            plgpu.commit_smem()  # every thread has read the group
            plgpu.barrier_arrive(smem.empty.at[slot])

            @pl.when(wg == 0)
            def _():
                plgpu.barrier_wait(smem.empty.at[slot])
                start(i + stages)

        return (most, functools.reduce(jnp.add, p, total * old), *acc)

    # The last CTA begins with the token itself, the others with nothing.
    s = jnp.where(is_last, score(c, k_r), -jnp.inf)
    ones = plgpu.layout_cast(jnp.full((rows,), jnp.where(is_last, 1.0, 0.0)), WIDE.reduce(1))
    acc = [jnp.where(is_last, spread(x, (rows, PIECE), 1, WIDE), 0.0) for x in c]
    m, total, *acc = lax.fori_loop(0, groups, group, (s, ones, *acc))
    pl.when((cta == 0) & (wg == 0))(lambda: _copy(gmem.length, gmem.now))
    store_any(gmem.m.at[cta, heads], m)
    store_any(gmem.total.at[cta, heads], total)
    for own, x in zip(columns, acc, strict=True):
        store_any(gmem.o.at[cta, heads, own], x)


def _copy(source: Any, target: Any) -> None:
    target[0] = source[0]


def _own(gmem: Any, places: Places, eps: float, columns: list[Any], cos: Any, sin: Any, dtype: Any):
    """c and k_r of the token, as they lie in the cache, in float32."""
    C, half = len(columns) * PIECE, cos.shape[0]
    kv = [
        load(gmem.channels.at[0, pl.ds(places.kv + own.start, PIECE)], WIDE.reduce(0)).astype(jnp.float32)
        for own in columns
    ]
    scale = lax.rsqrt(jnp.sum(functools.reduce(jnp.add, [x * x for x in kv])) / C + eps)
    c = [x * scale * load(gmem.w.at[own], WIDE.reduce(0)) for own, x in zip(columns, kv, strict=True)]
    pairs = pl.ds((places.kv + C) // 2, half)
    k_r = [load(gmem.pairs.at[pairs, j], NARROW.reduce(0)).astype(jnp.float32) for j in (0, 1)]
    k_r = _rotated(k_r, cos, sin)
    return ([x.astype(dtype).astype(jnp.float32) for x in part] for part in (c, k_r))


def _join(gmem: Any, smem: Any, *, places: Places, slots: int) -> None:
    """The second kernel."""
    (H, V, C), parts, wg = gmem.values.shape, gmem.m.shape[0], warpgroup_index()
    warpgroups = _warpgroups(H)
    of_head = V // (ROWS * warpgroups)
    head = lax.div(grid_index(), jnp.int32(of_head))
    row = (lax.rem(grid_index(), jnp.int32(of_head)) * warpgroups + wg) * ROWS
    columns = [pl.ds(first, PIECE) for first in range(0, C, PIECE)]
    for n, own in enumerate(columns):
        source = gmem.values.at[head, pl.ds(row, ROWS), own]
        plgpu.copy_gmem_to_smem(source, smem.tiles.at[wg, n], smem.full.at[wg])
    maxima = [gmem.m[part, head] for part in range(parts)]
    most = functools.reduce(jnp.maximum, maxima)
    factors = [jnp.exp(m - most) for m in maxima]
    total = functools.reduce(jnp.add, [gmem.total[part, head] * f for part, f in enumerate(factors)])
    numbers = max(C // warpgroups, WARPGROUP)
    own, layout = pl.ds(wg * numbers, numbers), plgpu.Layout.WG_STRIDED((numbers,), vec_size=1)

    @pl.when(wg * numbers < C)
    def _():
        pieces = [load(gmem.o.at[part, head, own], layout) * f for part, f in enumerate(factors)]
        store_any(smem.row.at[own], functools.reduce(jnp.add, pieces) * (1.0 / total))

    generations.meet(smem.made)
    plgpu.barrier_wait(smem.full.at[wg])
    products = [
        load(smem.tiles.at[wg, n], WIDE).astype(jnp.float32)
        * spread(load(smem.row.at[own], WIDE.reduce(0)), (ROWS, PIECE), 1, WIDE)
        for n, own in enumerate(columns)
    ]
    y = jnp.sum(functools.reduce(jnp.add, products), axis=1)
    if places.gate is not None:
        y = y / (1.0 + jnp.exp(-gmem.channels[0, places.gate + head].astype(jnp.float32)))
    y = jnp.where(gmem.now[0] < slots, y, jnp.nan)
    store_any(gmem.y.at[0, pl.ds(head * V + row, ROWS)], y.astype(gmem.y.dtype))

    @pl.when((grid_index() == 0) & (wg == 0))
    def _():
        gmem.length[0] = gmem.now[0] + 1


@kernel(
    "places", "scale", "eps", "config", chosen=lambda x: dict(config=x.config or Config.default(x.k.shape[1]))
)
def latent_row(
    channels: Float[Array, "1 F"],
    q: Float[Array, "1 G"],
    norm: Float[Array, " C"],
    frequencies: Float[Array, " R2"],
    values: Float[Array, "H V C"],
    k: Float[Array, "1 S 1 R"],
    v: Float[Array, "1 S 1 C"],
    length: Int[Array, "1"],
    *,
    places: Places,
    scale: float,
    eps: float,
    config: Config | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "1 O"], Float[Array, "1 S 1 R"], Float[Array, "1 S 1 C"], Int[Array, "1"]]:
    """Results of the heads, the cache with the token, and how many those are, where `check_supported` says so.

    The cache is updated in place where it is donated to the compiled function around this call; else XLA copies it.

    Args:
      channels: of the latents and the gates.
      q: queries by head, as they meet c, and then what is turned of them, in pairs.
      norm: weight of the norm of c.
      frequencies: angle of a pair from a token to the next.
      values: matrix of each head.
      k, v: the cache, turned keys and c.
      length: tokens before this one.
      places: where parts begin in the channels.
      scale: of the scores.
      eps: of the norm.
      config: None for the default.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    assert config is not None
    (H, V, C), R, like = values.shape, k.shape[3], jax.ShapeDtypeStruct
    warpgroups, parts = _warpgroups(H), config.parts
    options: dict[str, Any] = dict(warpgroups=warpgroups, interpret=interpret)
    made = launch(
        "latent_row",
        functools.partial(_attend, places=places, scale=scale, eps=eps, config=config),
        inputs={
            "channels": channels,
            "pairs": channels.reshape(-1, 2),
            "q": q.reshape(-1, C),
            "q_pairs": q.reshape(-1, R // 2, 2),
            "w": norm.astype(jnp.float32),
            "frequencies": frequencies,
            "length": length,
        },
        outputs={
            "m": like((parts, H), jnp.float32),
            "total": like((parts, H), jnp.float32),
            "o": like((parts, H, C), jnp.float32),
            "now": like((1,), jnp.int32),
        },
        updated={"k": k, "v": v},
        memory=_memory(C, R, config.stages, warpgroups, k.dtype),
        ctas=parts,
        **options,
    )
    joined = launch(
        "latent_row_values",
        functools.partial(_join, places=places, slots=k.shape[1]),
        inputs={name: made[name] for name in ("m", "total", "o", "now")}
        | {"values": values, "channels": channels},
        outputs={"y": like((1, H * V), q.dtype)},
        updated={"length": length},
        memory={
            "tiles": Buffer((warpgroups, C // PIECE, ROWS, PIECE), values.dtype),
            "row": Buffer((C,)),
            "full": Barriers(arrivals=C // PIECE, count=warpgroups),
            "made": Barriers(arrivals=warpgroups),
        },
        ctas=H * V // (ROWS * warpgroups),
        **options,
    )
    return joined["y"], made["k"], made["v"], joined["length"]
