"""The experts of a few rows: the largest of sigmoids with a bias, in groups, and their weights.

    s = sigmoid(x),  c = s + bias;   of the groups those with the largest sums of their two largest c are kept;
    of these the experts e with the k largest c, the first of equal ones first;   w_e = factor s_e / sum of the k s

A c or a sum that is NaN comes before every number. So the k experts of a row differ, whatever its scores are.

Inputs (GMEM): x [N, E] float32; bias [E] float32. Outputs (GMEM): w [N, k] float32, the largest c first, and the
numbers e [N, k] int32, below E.
Grid: a CTA of one warpgroup for each row. A place is found by counting what comes before: all pairs of experts are
compared, `BLOCK` columns at a time, and vectors change from rows to columns through shared memory.
Numerics: float32. Hardware: `NEEDS`. Limits:
`check_supported`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from gdn_jax.shapes import Choice
from pallas_kernels.device.launch import grid_index, kernel, launch
from pallas_kernels.device.layouts import COL, ROW, along_columns, along_rows, iota, round_up
from pallas_kernels.device.memory import Buffer, store_any
from pallas_kernels.device.needs import Needs

NEEDS = Needs.TMA

ROWS = 64
"""Experts whose places are counted at once."""

BLOCK = 128
"""Experts that they are compared with at once."""

MOST = 256
"""Experts at most: the program grows with the square of their number."""

WORD = 4
"""k is a multiple of this: what is copied at once has 16 bytes."""

COLUMNS = 8
"""Columns of an array in registers are a multiple of this."""


def check_supported(experts: int, choice: Choice) -> str | None:
    """Why the kernel cannot choose among so many experts; None if it can."""
    if choice.scoring != "sigmoid":
        return f"weights by {choice.scoring}; the kernel takes sigmoids"
    if experts % ROWS or not 0 < experts <= MOST or (experts > BLOCK and experts % BLOCK):
        return f"{experts} experts; the kernel takes 64, 128 and 256"
    if choice.per_token % WORD or choice.per_token > ROWS:
        return f"{choice.per_token} experts of a token; the kernel takes multiples of {WORD} up to {ROWS}"
    if experts % choice.groups or choice.groups > ROWS or experts // choice.groups < 2:
        return f"{choice.groups} groups of {experts} experts; the kernel takes up to {ROWS}, of 2 experts or more"
    return None


class _Cta:
    """The knowledge of a row's warpgroup."""

    def __init__(self, gmem: Any, smem: Any, choice: Choice):
        self.gmem, self.smem, self.choice, self.row = gmem, smem, choice, grid_index()
        self.experts = gmem.x.shape[1]
        self.group = self.experts // choice.groups
        """Experts of a group."""

    def count(self, block: Callable[..., jax.Array], *columns: Any, width: int | None = None) -> jax.Array:
        """The sum of block(first column, *columns repeated for each row) along each of 64 rows.

        Args:
          columns: vectors in shared memory, along the columns.
          width: their length; None: the number of experts.
        """
        width = self.experts if width is None else width
        step, total = min(width, BLOCK), None
        for first in range(0, width, step):
            parts = [
                along_columns(plgpu.load(x.at[pl.ds(first, step)], layout=COL, optimized=False), ROWS)
                for x in columns
            ]
            part = jnp.sum(block(first, *parts), axis=1)
            total = part if total is None else total + part
        assert total is not None
        return total

    def before(self, own: jax.Array, first_row: int, others: Any, width: int | None = None, **limits: Any):
        """How many of `others` come before each of `own`: larger ones, and equal ones of a lower number.

        Args:
          own: [64], numbers from first_row on.
          others: vector in shared memory.
          limits: `same`: only those of the same group count; `below`: only those of a lower number than this.
        """

        def block(first, other):
            shape = other.shape
            mine, i, j = along_rows(own, shape[1]), iota(shape, 0) + first_row, iota(shape, 1) + first
            is_first = jnp.where(j < i, 1.0, 0.0)
            count = jnp.where(other > mine, 1.0, jnp.where(other == mine, is_first, 0.0))
            if limits.get("same"):
                count = jnp.where(lax.div(j, self.group) == lax.div(i, self.group), count, 0.0)
            if "below" in limits:
                count = jnp.where(j < limits["below"], count, 0.0)
            return count

        return self.count(block, others, width=width)


def nan_first(x: jax.Array) -> jax.Array:
    """x, but inf for NaN, which is neither larger than a number nor smaller: numbers by which all can be ordered."""
    return jnp.where(x == x, x, jnp.inf)


def _rows(cta: _Cta, ref: Any, first: int) -> jax.Array:
    return plgpu.load(ref.at[pl.ds(first, ROWS)], layout=ROW, optimized=False)


def _keep_groups(cta: _Cta) -> None:
    """Makes -inf of the biased scores of groups that are not kept."""
    smem, choice, groups = cta.smem, cta.choice, round_up(cta.choice.groups, COLUMNS)
    for first in range(0, cta.experts, ROWS):
        own = _rows(cta, smem.biased, first)
        place = cta.before(own, first, smem.biased, same=True)
        store_any(smem.places.at[pl.ds(first, ROWS)], jnp.where(place < 2.0, own, 0.0))
    plgpu.commit_smem()

    def of_group(first, x):
        return jnp.where(lax.div(iota(x.shape, 1) + first, cta.group) == iota(x.shape, 0), x, 0.0)

    sums = nan_first(cta.count(of_group, smem.places))
    store_any(smem.groups, sums)
    plgpu.commit_smem()
    place = cta.before(sums, 0, smem.groups, groups, below=choice.groups)
    store_any(smem.kept, jnp.where(place < float(choice.kept_groups), 1.0, 0.0))
    plgpu.commit_smem()
    for first in range(0, cta.experts, ROWS):

        def is_kept(_, x, first=first):
            return jnp.where(lax.div(iota(x.shape, 0) + first, cta.group) == iota(x.shape, 1), x, 0.0)

        kept = cta.count(is_kept, smem.kept, width=groups)
        own = _rows(cta, smem.biased, first)
        store_any(smem.biased.at[pl.ds(first, ROWS)], jnp.where(kept > 0.0, own, -jnp.inf))
    plgpu.commit_smem()


def _body(gmem: Any, smem: Any, *, choice: Choice) -> None:
    cta = _Cta(gmem, smem, choice)
    for first in range(0, cta.experts, ROWS):
        score = 1.0 / (1.0 + jnp.exp(-_rows(cta, gmem.x.at[cta.row], first)))
        store_any(smem.scores.at[pl.ds(first, ROWS)], score)
        store_any(smem.biased.at[pl.ds(first, ROWS)], nan_first(score + _rows(cta, gmem.bias, first)))
    plgpu.commit_smem()
    if choice.kept_groups < choice.groups:
        _keep_groups(cta)
    for first in range(0, cta.experts, ROWS):
        place = cta.before(_rows(cta, smem.biased, first), first, smem.biased)
        store_any(smem.places.at[pl.ds(first, ROWS)], place)
    plgpu.commit_smem()

    def number(first, place):
        return jnp.where(place == iota(place.shape, 0).astype(jnp.float32), _numbers(place.shape, first), 0.0)

    def weight(_, place, score):
        return jnp.where(place == iota(place.shape, 0).astype(jnp.float32), score, 0.0)

    def chosen(_, place, score):
        return jnp.where(place < float(choice.per_token), score, 0.0)

    w = cta.count(weight, smem.places, smem.scores)
    if choice.normalise:
        w = w / (cta.count(chosen, smem.places, smem.scores) + 1e-20)
    store_any(smem.w, w * choice.factor)
    store_any(smem.e, cta.count(number, smem.places).astype(jnp.int32))
    plgpu.commit_smem()
    own = pl.ds(0, choice.per_token)
    plgpu.copy_smem_to_gmem(smem.w.at[own], gmem.w.at[cta.row])
    plgpu.copy_smem_to_gmem(smem.e.at[own], gmem.e.at[cta.row])
    plgpu.wait_smem_to_gmem(0)


def _numbers(shape: tuple[int, int], first: int) -> jax.Array:
    """The number of each column."""
    return (iota(shape, 1) + first).astype(jnp.float32)


@kernel("choice")
def choose(
    x: Float[Array, "N E"], bias: Float[Array, " E"], choice: Choice, *, interpret: Any = None
) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
    """Weights and numbers of the experts of each row, where `check_supported` says so.

    Args:
      x: scores before the sigmoid.
      bias: what is added to sigmoids to choose by.
      choice: how experts are chosen.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    (N, E), k = x.shape, choice.per_token
    results = launch(
        "routing",
        functools.partial(_body, choice=choice),
        inputs={"x": x, "bias": bias},
        outputs={
            "w": jax.ShapeDtypeStruct((N, k), jnp.float32),
            "e": jax.ShapeDtypeStruct((N, k), jnp.int32),
        },
        memory={
            **dict.fromkeys(("scores", "biased", "places"), Buffer((E,))),
            **dict.fromkeys(("groups", "kept", "w"), Buffer((ROWS,))),
            "e": Buffer((ROWS,), jnp.int32),
        },
        ctas=N,
        interpret=interpret,
    )
    return results["w"], results["e"]
