"""The short convolution of q, k and v with SiLU, and unit length for the heads that want it, forward and backward.

    z[t] = sum over j < W of w[j] x[t - (W - 1) + j],   s = silu(z),   y = s or s (sum(s^2) + eps)^(-1/2) of each head
    ds = dy or r (dy - y sum(dy y)) with r the factor above,   dz = ds silu'(z)
    dx[t] = sum over j < W of w[j] dz[t + (W - 1) - j],   dw[j] = sum over t of dz[t] x[t - (W - 1) + j]

for every channel by itself but for the norm. Left to XLA, the derivative's sums over tokens and its shifts end in one
fusion that takes several times as long as the memory needs; here x and dy are read once and dx is written once.

Inputs (GMEM): x [B, T, 2 H + HV, K] bfloat16 or float16, the heads of q, then k, then v, where a head is K channels
also of v, which has no norm; perhaps others behind them, which are not read; w [W, 2 H + HV, K] float32; dq, dk, dv
[B, T, H or HV, K]; fresh [B, T] int32, 1 at the first token of each segment of a row, or none.
Outputs (GMEM): q, k, v; dx like x, written into a given array where x has others; dw [strips, W, 2 H + HV, K]
float32, one sum for each strip, which are added in a fixed order, so results repeat bit for bit.
Grid: one CTA of one warpgroup for each (row of the batch, strip of `Config.strip` tokens, `HEADS` heads), backward as
many as run at once where that is possible. It walks over its tokens, forward from the first and backward from the
last, with the inputs and cotangents of the tokens around the present one in registers. What a strip needs of its
neighbours it reads or makes again. No shared memory.
Numerics: float32 inside. Hardware: `NEEDS`. Limits: `check_supported`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.device.launch import Shaped, grid_index, kernel, launch, num_sms
from pallas_kernels.device.layouts import L2NORM_EPS
from pallas_kernels.device.memory import store_any
from pallas_kernels.device.needs import Needs
from pallas_kernels.device.operations import Device
from pallas_kernels.layer import rows

NEEDS = Needs.NOTHING

WIDTH = 4
"""Taps."""

HEADS = 4
"""Heads of a CTA: one for each warp, so that the sums of a head stay inside a warp."""

AHEAD = 8
"""Tokens that a row is a multiple of."""

CTAS_PER_SM, CTAS_PER_SM_OF_SEGMENTS = 4, 3
"""CTAs of the backward kernel that the registers of a multiprocessor take: 118 and with segments 146 a thread, for
heads of 128 (`python -m pallas_kernels.tools.ptxas_report`)."""

LEAST_STRIP = 32
"""Tokens of a strip of the backward kernel at least: the sums of the filters that a strip writes are 16 bytes a
channel, as many as the inputs of 8 tokens."""

MOST_WAVES = 4
"""The most strips that `even_strip` tries, in multiples of those that run at once."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernels run, not what they compute."""

    strip: int
    """Tokens of a strip, a multiple of ahead * turns."""
    ahead: int
    """Tokens that are computed at once, while as many are read: divides AHEAD."""
    turns: int = 1
    """How often that stands in the body of the backward loop: ahead * turns divides AHEAD."""
    depth: int = 1
    """How often as many tokens are read in advance in the backward loop."""


FORWARD = Config(256, 4)
"""Default: the fastest of those in docs/log/training.md (H200, 2026-11-22, 8 rows of 8192 tokens, 3072 channels)."""


def backward_config(B: int, T: int, heads: int, segments: bool) -> Config:
    """The default of the backward kernel for all heads of B rows, found like `FORWARD` but for the strip."""
    ctas_per_sm = CTAS_PER_SM_OF_SEGMENTS if segments else CTAS_PER_SM
    strip = even_strip(T, B * (heads // HEADS), num_sms() * ctas_per_sm, 2)
    return Config(strip, 1, turns=2, depth=2)


def even_strip(T: int, walks: int, at_once: int, multiple: int) -> int:
    """Tokens of a strip with which the CTAs that run at once fill the GPU and end together.

    Their time is taken to be that of strip + WIDTH - 1 tokens a wave, for those behind a strip are made again. Of
    equal times, the one with fewer strips: each writes sums of the filters, which are added afterwards.

    Args:
      T: tokens of a row.
      walks: CTAs if a row was one strip.
      at_once: CTAs that run at once.
      multiple: what a strip is a multiple of.
    """

    def time(strip: int) -> int:
        return pl.cdiv(walks * pl.cdiv(T, strip), at_once) * (strip + WIDTH - 1)

    numbers = (max(1, waves * at_once // walks) for waves in range(1, MOST_WAVES + 1))
    strips = (max(LEAST_STRIP, pl.cdiv(pl.cdiv(T, n), multiple) * multiple) for n in numbers)
    return min(strips, key=time)


def check_supported(x: Shaped, weight: Shaped, heads: int, width: int) -> str | None:
    """Why the kernels cannot take a convolution; None if they can.

    Args:
      x: inputs [B, T, C].
      weight: filters [D, W] of the first D of them.
      heads, width: of q and of k, whose channels come first.
    """
    B, T, channels = x.shape
    D = weight.shape[0]
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"x is {jnp.dtype(x.dtype).name}; the kernel takes bfloat16 and float16"
    if weight.shape[1] != WIDTH:
        return f"W = {weight.shape[1]}; the kernel is written for {WIDTH}"
    if not B or not T or T % AHEAD:
        return f"T = {T}; the kernel takes multiples of {AHEAD}"
    if width not in (32, 64, 128, 256) or heads % HEADS or D % (HEADS * width) or channels % width:
        takes = f"multiples of {HEADS} heads of 32, 64, 128 or 256"
        return f"{D} channels with {heads} heads of {width}; the kernel takes {takes}"
    return None


class _Strip:
    """The knowledge of a CTA: its tokens `first` to `end`, and its heads."""

    def __init__(self, gmem: Any, parts: Sequence[Any], config: Config, device: Device):
        self.device = device
        _, self.T, _, self.width = gmem.x.shape
        heads = gmem.w.shape[1]
        strips, groups = -(-self.T // config.strip), heads // HEADS
        self.gmem, self.parts = gmem, parts
        self.number, group = lax.div(grid_index(), groups), lax.rem(grid_index(), groups)
        self.heads = pl.ds(group * HEADS, HEADS)
        self.row = lax.div(self.number, strips)
        self.first = lax.rem(self.number, strips) * config.strip
        self.end = jnp.minimum(self.first + config.strip, self.T)
        self.w = [rows.load_whole(gmem.w.at[j, self.heads]) for j in range(WIDTH)]

    def read(self, token) -> jax.Array:
        """Inputs of a token of the row."""
        return rows.load_whole(self.gmem.x.at[self.row, token, self.heads])

    def x(self, token) -> jax.Array:
        """Inputs of a token as float32; zeros before the row."""
        return self.of_row(token, self.read(jnp.maximum(token, 0)))

    def of_row(self, token, x: jax.Array) -> jax.Array:
        """Inputs that were read of a token as float32; zeros where it lies before the row."""
        return jnp.where(token >= 0, self.widen(x), 0.0)

    def linked(self, token) -> Any:
        """Whether a token sees the one before it, where the row has segments."""
        return self.gmem.fresh[self.row, jnp.clip(token, 0, self.T - 1)] == 0

    def widen(self, x: jax.Array) -> jax.Array:
        """x as float32."""
        if self.width == rows.LANES:  # one number a thread
            return x.astype(jnp.float32)
        return self.device.widen(x, rows.layout(self.width, HEADS))

    def sigmoid(self, z: jax.Array) -> jax.Array:
        """1 / (1 + exp(-z)), 0 where that is below 2^-126."""
        return self.device.reciprocal(1.0 + jnp.exp(-z), rows.layout(self.width, HEADS))

    def unit(self, s: jax.Array) -> jax.Array:
        """The factor that gives each head unit length, [heads]."""
        return lax.rsqrt(rows.row_sum(s * s) + L2NORM_EPS)

    def spread(self, x: jax.Array) -> jax.Array:
        """A number of each head repeated along it."""
        return rows.spread(x, self.width)

    def of_parts(self, walk: Callable[[Any, bool], None], normalize: bool) -> None:
        """walk(at, normalize) for the array among those of q, k and v that has the heads of this CTA: at(token) are
        its heads of a token."""
        begin = 0
        for n, array in enumerate(self.parts):
            end = begin + array.shape[2]
            first = self.heads.start - begin

            def at(token, array=array, first=first):
                return array.at[self.row, token, pl.ds(first, HEADS)]

            inside = (self.heads.start >= begin) & (self.heads.start < end)
            pl.when(inside)(functools.partial(walk, at, normalize and n < 2))
            begin = end


def _dot(w: list[jax.Array], taps: list[jax.Array]) -> jax.Array:
    """Sum over the taps, oldest first."""
    return functools.reduce(jnp.add, [a * b for a, b in zip(w, taps, strict=True)])


def _cut(linked: Any, values: Sequence[jax.Array]) -> list[jax.Array]:
    """The values, or zeros across a border."""
    return [jnp.where(linked, x, 0.0) for x in values]


def _forward(gmem: Any, smem: Any, *, config: Config, normalize: bool, device: Device) -> None:
    strip = _Strip(gmem, (gmem.q, gmem.k, gmem.v), config, device)
    segments = gmem.fresh is not None
    past = [strip.x(strip.first - j) for j in (3, 2, 1)]
    if segments:  # the tokens before the strip may have borders among them
        for n in (1, 2):
            past[:n] = _cut(strip.linked(strip.first - (WIDTH - 1) + n), past[:n])

    def walk(at, normalize: bool):
        def load(i):
            """Inputs of the i-th few tokens; behind the row those of its last token, which nobody uses."""
            token = strip.first + i * config.ahead
            return tuple(strip.read(jnp.minimum(token + j, strip.T - 1)) for j in range(config.ahead))

        def some(i, carry):
            past, loaded = carry
            following, token = load(i + 1), strip.first + i * config.ahead
            past, ys = list(past), []
            for j, x in enumerate(loaded):
                if segments:
                    past = _cut(strip.linked(token + j), past)
                past = [*past, strip.widen(x)]
                z = _dot(strip.w, past)
                past, ys = past[1:], [*ys, z * strip.sigmoid(z)]
            # Sums of all tokens one after another: each waits long for its threads, none for another.
            scales = [strip.unit(y) for y in ys] if normalize else None
            for j, y in enumerate(ys):
                y = y if scales is None else y * strip.spread(scales[j])
                out = at(token + j)
                store_any(out, y.astype(out.dtype))
            return tuple(past), following

        lax.fori_loop(0, lax.div(strip.end - strip.first, config.ahead), some, (tuple(past), load(0)))

    strip.of_parts(walk, normalize)


def _cotangents(strip: _Strip, tokens: Sequence[tuple[list[jax.Array], jax.Array]], normalize: bool) -> list:
    """dz of several tokens from their inputs and dy."""
    zs = [_dot(strip.w, taps) for taps, _ in tokens]
    gates = [strip.sigmoid(z) for z in zs]
    dys = [strip.widen(dy) for _, dy in tokens]
    ss = [z * gate for z, gate in zip(zs, gates, strict=True)]
    if normalize:
        # Sums of all tokens one after another: each waits long for its threads, none for another.
        sums = [(strip.unit(s), rows.row_sum(dy * s)) for s, dy in zip(ss, dys, strict=True)]
        for n, (scale, along) in enumerate(sums):
            dys[n] = strip.spread(scale) * (dys[n] - ss[n] * strip.spread(scale * scale * along))
    # The slope of SiLU, g (1 + z (1 - g)) = g + s (1 - g).
    return [dy * (g + (s - s * g)) for s, g, dy in zip(ss, gates, dys, strict=True)]


def _backward(gmem: Any, smem: Any, *, config: Config, normalize: bool, device: Device) -> None:
    strip = _Strip(gmem, (gmem.dq, gmem.dk, gmem.dv), config, device)
    segments, T = gmem.fresh is not None, strip.T

    def visible(x: Sequence[jax.Array], token) -> list[jax.Array]:
        """Inputs of tokens token - 3 to token, those of other segments as zeros."""
        x = list(x)
        if segments:
            for n in (3, 2, 1):
                x[:n] = _cut(strip.linked(token - (WIDTH - 1) + n), x[:n])
        return x

    def walk(at, normalize: bool):
        # dz of the tokens behind the strip, nearest first; zeros behind the row.
        inputs = [strip.x(jnp.minimum(strip.end - 3 + j, T - 1)) for j in range(6)]
        tokens = []
        for n in range(WIDTH - 1):
            token = strip.end + n
            dy = rows.load_whole(at(jnp.minimum(token, T - 1)))
            tokens.append((visible(inputs[n : n + WIDTH], token), dy))
        behind = _cotangents(strip, tokens, normalize)
        behind = [jnp.where(strip.end + n < T, dz, 0.0) for n, dz in enumerate(behind)]
        if segments:
            for n in range(1, WIDTH - 1):
                behind[n:] = _cut(strip.linked(strip.end + n), behind[n:])

        def load(i):
            """Inputs and cotangents of the i-th few tokens; before the row those of its first, which nobody uses."""
            last = strip.end - 1 - i * config.ahead
            dys = (rows.load_whole(at(jnp.maximum(last - j, 0))) for j in range(config.ahead))
            return tuple((strip.read(jnp.maximum(last - j - 3, 0)), dy) for j, dy in enumerate(dys))

        def some(i, carry):
            inputs, behind, dw, (loaded, *others) = carry
            following, last = (*others, load(i + config.depth)), strip.end - 1 - i * config.ahead
            tokens = []
            for j, (x, dy) in enumerate(loaded):
                inputs = [strip.of_row(last - j - 3, x), *inputs]  # of tokens t - 3 to t
                tokens.append((visible(inputs, last - j), dy))
                inputs = inputs[: WIDTH - 1]
            dzs = _cotangents(strip, tokens, normalize)
            for j, (dz, (taps, _)) in enumerate(zip(dzs, tokens, strict=True)):
                if segments:
                    behind = _cut(strip.linked(last - j + 1), behind)
                dw = [a + dz * tap for a, tap in zip(dw, taps, strict=True)]
                around = [dz, *behind]  # dz of tokens t to t + 3
                out = gmem.dx.at[strip.row, last - j, strip.heads]
                store_any(out, _dot(strip.w[::-1], around).astype(out.dtype))
                behind = around[: WIDTH - 1]
            return tuple(inputs), tuple(behind), tuple(dw), following

        def turns(i, carry):
            for n in range(config.turns):
                carry = some(i * config.turns + n, carry)
            return carry

        start = tuple(inputs[:3]), tuple(behind)
        zero, first = rows.zeros(strip.width, HEADS), tuple(load(n) for n in range(config.depth))
        steps = lax.div(strip.end - strip.first, config.ahead * config.turns)
        *_, dw, _ = lax.fori_loop(0, steps, turns, (*start, (zero,) * WIDTH, first))
        for j in range(WIDTH):
            store_any(gmem.dw.at[strip.number, j, strip.heads], dw[j])

    strip.of_parts(walk, normalize)


@kernel("heads", "width", "normalize", "config")
def short_conv(
    x: Float[Array, "B T C"],
    weight: Float[Array, "D W"],
    fresh: Int[Array, "B T"] | None = None,
    *,
    heads: int,
    width: int,
    normalize: bool = True,
    config: Config = FORWARD,
    interpret: Any = None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H K"], Float[Array, "B T Dv"]]:
    """q, k and v = silu(conv(x)), the heads of q and k of unit length if `normalize`.

    Args:
      x: inputs that `check_supported` accepts, the channels of q, then k, then v, then others, which are not read.
      weight: filters, oldest tap first.
      fresh: not 0 at the first token of each segment of a row; None: every row is one.
      heads, width: of q and of k.
      config: how the work is cut.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    B, T, D = *x.shape[:2], weight.shape[0]
    inputs, options = _shared(width, config, x, weight, fresh)
    key = jax.ShapeDtypeStruct((B, T, heads, width), x.dtype)
    value = jax.ShapeDtypeStruct((B, T, D // width - 2 * heads, width), x.dtype)
    body = functools.partial(
        _forward, config=config, normalize=normalize, device=Device(interpret is not None)
    )
    outputs = {"q": key, "k": key, "v": value}
    results = launch("short_conv", body, inputs=inputs, outputs=outputs, interpret=interpret, **options)
    return results["q"], results["k"], results["v"].reshape(B, T, -1)


def _shared(width, config, x, weight, fresh) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs that both kernels take, and how they are launched."""
    B, T, _ = x.shape
    D = weight.shape[0]
    inputs = {
        "x": x.reshape(B, T, -1, width),
        "w": weight.astype(jnp.float32).T.reshape(WIDTH, D // width, width),
        "fresh": None if fresh is None else fresh.astype(jnp.int32),
    }
    ctas = B * -(-T // config.strip) * (D // width // HEADS)
    return inputs, {"ctas": ctas}


@kernel("normalize", "config")
def short_conv_backward(
    x: Float[Array, "B T C"],
    weight: Float[Array, "D W"],
    fresh: Int[Array, "B T"] | None,
    dq: Float[Array, "B T H K"],
    dk: Float[Array, "B T H K"],
    dv: Float[Array, "B T Dv"],
    dothers: Float[Array, "B T C"] | None = None,
    *,
    normalize: bool = True,
    config: Config | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "B T C"], Float[Array, "D W"]]:
    """Derivative of `short_conv`: dx in x's dtype and dweight in float32.

    Args:
      x, weight, fresh, normalize, config, interpret: as for `short_conv`.
      dq, dk, dv: cotangents of its results, in x's dtype.
      dothers: where x has other channels, an array like x with what dx shall hold for them. The rest of it may hold
        anything.
    """
    B, T, D = *x.shape[:2], weight.shape[0]
    width = dq.shape[-1]
    config = config or backward_config(B, T, D // width, fresh is not None)
    inputs, options = _shared(width, config, x, weight, fresh)
    strips = B * -(-T // config.strip)
    like = inputs["x"]
    results = launch(
        "short_conv_backward",
        functools.partial(
            _backward, config=config, normalize=normalize, device=Device(interpret is not None)
        ),
        inputs=inputs | {"dq": dq, "dk": dk, "dv": dv.reshape(B, T, -1, width)},
        outputs={
            "dx": jax.ShapeDtypeStruct(like.shape, like.dtype) if dothers is None else None,
            "dw": jax.ShapeDtypeStruct((strips, WIDTH, D // width, width), jnp.float32),
        },
        updated={"dx": None if dothers is None else dothers.reshape(like.shape)},
        interpret=interpret,
        **options,
    )
    dweight = jnp.sum(results["dw"], axis=0).reshape(WIDTH, D).T
    return results["dx"].reshape(x.shape), dweight
