"""The choice of a row's experts inside a kernel: one warp of a CTA makes all of it in registers.

    s = sigmoid(x),  c = s + bias;   of the groups those with the largest sums of their two largest c are kept;
    of these the experts e with the k largest c, the first of equal ones first;   w_e = factor s_e / sum of the k s

or with softmax s = exp(x - max x) and c = x, without groups. Weights that are not normalised are s, and with softmax
s / sum of all s. A c or a sum that is NaN comes before every number, as in `rows.routing`. The shared expert has the
score after them, and its sigmoid as weight; without such a score its weight is 1.

The scores x are published by all CTAs (`device.grid_barrier`), and read as soon as they are known. Each thread of
the warp has neighbouring experts. A group's two largest pass through the threads that have it; then k times the warp
finds the largest number of all threads in one instruction, and takes it out. A kernel of its own, that of
`rows.routing`, takes longer than this choice: it ends before the experts are read.

Inputs (GMEM): scores [E] or [E + 1], and with sigmoids bias [E] float32. Shared memory: `memory`.
Numerics: float32. Limits: `check_supported`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn_jax.shapes import Choice
from pallas_kernels.device.lanes import WARP, lane_layout, load
from pallas_kernels.device.memory import Buffer, Memory
from pallas_kernels.device.warp_choice import pick
from pallas_kernels.rows.routing import nan_first

MOST = 32
"""Experts of a token at most, one for each thread."""


def check_supported(experts: int, choice: Choice) -> str | None:
    """Why a warp cannot choose among so many experts; None if it can."""
    is_softmax = choice.scoring == "softmax"
    if experts not in (sizes := (64, 128, 256, 512) if is_softmax else (64, 128, 256)):
        return f"{experts} experts; the kernel takes {sizes} of a {choice.scoring}"
    if not 0 < choice.per_token <= MOST:
        return f"{choice.per_token} experts of a token; the kernel takes up to {MOST}"
    if choice.kept_groups == choice.groups:
        return None
    if is_softmax:
        return f"{choice.groups} groups of a softmax; the kernel takes one"
    own = experts // WARP
    threads = experts // choice.groups // own
    if experts % choice.groups or threads * own * choice.groups != experts or threads & (threads - 1):
        return f"{choice.groups} groups of {experts} experts; the kernel takes 1, 2, 4 .. groups up to {WARP}"
    return None


def memory(choice: Choice) -> Memory:
    """Shared memory of a choice: numbers and weights, the last of which is the shared expert's."""
    return {"chosen": Buffer((choice.per_token,), jnp.int32), "weights": Buffer((choice.per_token + 1,))}


def choose(gmem: Any, smem: Any, choice: Choice, experts: int, interpreted: bool) -> None:
    """Writes numbers and weights of the experts to smem.chosen and smem.weights, by one warpgroup.

    Args:
      gmem: its references bias, which may be None, and seen_words are the inputs, see
        `grid_barrier.launch_stages`; router has a row for each score.
      smem: its references are those of `memory`.
      choice: how experts are chosen.
      experts: how many there are.
      interpreted: whether the kernel is.
    """
    layout = lane_layout(WARP, experts // WARP).reduce(0)  # every warp has all, and a thread neighbours
    biases = [] if gmem.bias is None else [load(gmem.bias, layout)]
    is_gated = gmem.router.shape[0] > experts
    if not interpreted:
        pick(experts, choice, is_gated)(smem.chosen, smem.weights, gmem.seen_words, *biases)
    else:
        x = gmem.seen_words[...]
        own = 1.0 / (1.0 + jnp.exp(-x[experts:])) if is_gated else jnp.ones(1)
        score, c = _scores(x[:experts], biases)
        smem.chosen[...], weights = _choose(score, c, choice)
        smem.weights[...] = jnp.concatenate([weights, own])
    plgpu.commit_smem()


def _scores(x: jax.Array, biases: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """s and c, of a softmax without a bias."""
    if not biases:
        score = jnp.exp(x - jnp.max(x))
        return score / jnp.sum(score), x
    score = 1.0 / (1.0 + jnp.exp(-x))
    return score, score + biases[0]


def _choose(score: jax.Array, c: jax.Array, choice: Choice) -> tuple[jax.Array, jax.Array]:
    """The choice by comparing all pairs, as the interpreter knows it."""
    c = nan_first(c)

    def places(x):
        """How many come before each."""
        i = jnp.arange(x.shape[0])
        return jnp.sum((x > x[:, None]) | ((x == x[:, None]) & (i < i[:, None])), axis=1)

    if choice.kept_groups < choice.groups:
        of_groups = c.reshape(choice.groups, -1)
        is_first = jnp.arange(of_groups.shape[1]) == jnp.argmax(of_groups, axis=1)[:, None]
        second = jnp.max(jnp.where(is_first, -jnp.inf, of_groups), axis=1)
        kept = places(nan_first(jnp.max(of_groups, axis=1) + second)) < choice.kept_groups
        c = jnp.where(kept[:, None], of_groups, -jnp.inf).reshape(-1)
    is_one = places(c) == jnp.arange(choice.per_token)[:, None]
    chosen = jnp.sum(jnp.where(is_one, jnp.arange(c.shape[0]), 0), axis=1)
    weights = jnp.sum(jnp.where(is_one, score, 0.0), axis=1)
    if choice.normalise:
        weights = weights / (jnp.sum(weights) + 1e-20)
    return chosen.astype(jnp.int32), weights * choice.factor
