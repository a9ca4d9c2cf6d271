"""The softmax of a tile of logits and the cotangent of the logits of a cross entropy, without another pass over them.

    m = max_v l[v],   s = sum_v exp(l[v] - m),   dl[v] = a (exp(l[v] - m) / s - [v = target])

A row is read twice. The second time it comes from the GPU's cache, which holds the rows that are worked on.

Inputs (GMEM): logits [T, V] float32; targets [T] int32; a [T] float32, the weight of each row.
Outputs (GMEM): m, s [T] float32; earlier [T] float32, 1 where a logit before the target's is m; dl [T, V] bfloat16.
Grid: `CTAS_PER_SM` CTAs of one warpgroup to a multiprocessor, each of which takes row after row. No shared memory but
that of reductions. Numerics: float32; sums in an order that V alone decides. Hardware: compute capability 9.0.
Limits: `check_supported`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.device.launch import launch
from pallas_kernels.device.memory import store_any
from pallas_kernels.layer import rows as r

LINES = 8
"""Lines of a row in registers at once."""

WIDTHS = (512, 256, 128)
"""Numbers of a line: the most that divide V, of which a thread has neighbouring ones."""

CTAS_PER_SM = 2
"""More would work on more rows at once than the cache holds: 132 x 2 rows of 32768 logits are 35 MB of 50."""


def check_supported(logits: jax.ShapeDtypeStruct | jax.Array, dtype: Any) -> str | None:
    """Why the kernel cannot take logits [T, V] for a cotangent of some dtype; None if it can."""
    if logits.dtype != jnp.float32 or dtype != jnp.bfloat16:
        return f"x is {jnp.dtype(dtype).name}; the kernel takes bfloat16"
    T, V = logits.shape
    if not T or V % WIDTHS[-1] or V < LINES * WIDTHS[-1]:
        return f"{T} rows of {V} logits; the kernel takes multiples of {WIDTHS[-1]} from {LINES * WIDTHS[-1]}"
    return None


def _width(V: int) -> int:
    return next(n for n in WIDTHS if V % n == 0 and V >= LINES * n)


def _layout(width: int) -> Any:
    """Of lines [.., width], each over all four warps."""
    piece = width // (r.WARPS * r.LANES)
    tiles = ((1, width), (r.LANES * piece,), (piece,))
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def _body(gmem: Any, smem: Any) -> None:
    T, lines, width = gmem.logits.shape
    layout = _layout(width)
    along = layout.reduce(0)
    whole, rest = divmod(lines, LINES)

    def load(t, first):
        return plgpu.load(gmem.logits.at[t, pl.ds(first, LINES)], layout=layout, optimized=False)

    def spread(x):
        """Numbers of a line [width], or of a row, for every line."""
        axes = [1] if jnp.ndim(x) else []
        return plgpu.layout_cast(lax.broadcast_in_dim(x, (LINES, width), axes), layout)

    def position(first):
        """Index of each logit."""
        line, column = (
            plgpu.broadcasted_iota(jnp.int32, (LINES, width), axis, layout=layout) for axis in (0, 1)
        )
        return (line + first) * width + column

    def row(t, carry):
        # The last lines that are no multiple of LINES are read with some before them, which count only once.
        def gather(x, carry):
            m, s = carry
            larger = jnp.maximum(m, jnp.max(x, axis=0))
            return larger, s * jnp.exp(m - larger) + jnp.sum(jnp.exp(x - spread(larger)), axis=0)

        def fill(value):
            return plgpu.layout_cast(jnp.full((width,), value, jnp.float32), along)

        def gather_and_load(i, carry):
            ahead = load(t, jnp.minimum(i + 1, whole - 1) * LINES)
            return ahead, gather(*carry)

        start = fill(-jnp.inf), fill(0.0)
        _, (m, s) = lax.fori_loop(0, whole, gather_and_load, (load(t, 0), start))
        if rest:
            x, fresh = load(t, lines - LINES), position(lines - LINES) >= whole * LINES * width
            m, s = gather(jnp.where(fresh, x, -jnp.inf), (m, s))
        largest = jnp.max(m)
        total = jnp.sum(
            s * jnp.exp(m - plgpu.layout_cast(lax.broadcast_in_dim(largest, (width,), []), along))
        )
        target, a = gmem.targets[t], gmem.a[t]
        scale = a / total

        def write(first, x, earlier):
            index = position(first)
            tied = jnp.where((x == largest) & (index < target), 1.0, 0.0)
            dl = jnp.exp(x - largest) * scale
            dl = jnp.where(index == target, dl - a, dl)
            store_any(gmem.dl.at[t, pl.ds(first, LINES)], dl.astype(gmem.dl.dtype))
            return jnp.maximum(earlier, jnp.max(tied, axis=0))

        def write_and_load(i, carry):
            ahead = load(t, jnp.minimum(i + 1, whole - 1) * LINES)
            return ahead, write(i * LINES, *carry)

        _, earlier = lax.fori_loop(0, whole, write_and_load, (load(t, 0), fill(0.0)))
        if rest:
            earlier = write(lines - LINES, load(t, lines - LINES), earlier)
        gmem.m[t] = largest
        gmem.s[t] = total
        gmem.earlier[t] = jnp.max(earlier)
        return carry

    r.walk(row, T, r.num_ctas(T, CTAS_PER_SM))


def cross_entropy(
    logits: Float[Array, "T V"], targets: Int[Array, " T"], a: Float[Array, " T"], *, interpret: Any = None
) -> tuple[Float[Array, " T"], Float[Array, " T"], Float[Array, " T"], Float[Array, "T V"]]:
    """m, s, earlier and dl of the module's docstring, for logits that `check_supported` accepts."""
    run = _compiled if interpret is None else _run
    return run(interpret, logits, targets, a)


def _run(interpret, logits, targets, a):
    T, V = logits.shape
    width = _width(V)
    per_row = jax.ShapeDtypeStruct((T,), jnp.float32)
    results = launch(
        "cross_entropy",
        _body,
        inputs={"logits": logits.reshape(T, -1, width), "targets": targets.astype(jnp.int32), "a": a},
        outputs={
            "m": per_row,
            "s": per_row,
            "earlier": per_row,
            "dl": jax.ShapeDtypeStruct((T, V // width, width), jnp.bfloat16),
        },
        memory={},
        ctas=r.num_ctas(T, CTAS_PER_SM),
        interpret=interpret,
    )
    return results["m"], results["s"], results["earlier"], results["dl"].reshape(T, V)


_compiled = jax.jit(_run, static_argnums=0)
"""So that a call outside jit compiles once."""
