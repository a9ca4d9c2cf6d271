"""The loss of a language model and log-probabilities, from hidden states, without the logits of all tokens in memory.

Token t with hidden state x_t, target c_t and label weight a_t has

    logits  l_t = W x_t                    [V]
    lse_t = log sum_v exp(l_t[v])
    loss = sum_t a_t (lse_t - l_t[c_t]  +  z lse_t^2)
    dl_t = a_t ((1 + 2 z lse_t) softmax(l_t) - onehot(c_t)),   dx_t = W^T dl_t,   dW = sum_t dl_t x_t^T

The logits' cotangent dl is known as soon as the logits are, so one walk over tiles of tokens gives the loss and both
gradients, and no logits are kept or computed again. All this is of unit cotangent: the backward pass only scales.

The log-probability of a token is l_t[c_t] - lse_t, minus its loss. Its cotangent is not known before the backward
pass, which then is that walk, with the cotangents as label weights.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn_jax.partitioning import vary_alike
from gdn_jax.parts.kernels import run, usable
from gdn_jax.shapes import accumulation_dtype, check_array, check_floating, check_integer

TILE_LOGITS = 2**28
"""Logits of a tile where the caller gives no tile, unless that is less than TILE_TOKENS: 1 GiB in float32."""

TILE_TOKENS, MOST_LOGITS = 2048, 2**29
"""Tokens of a tile with a large vocabulary, and logits (2 GiB in float32) that it has at most.

Every tile reads and writes dW in float32, 8 bytes for 2 * tokens operations of its product: on an H200 that takes 2.5
times as long as the product with 256 tokens, a third of it with 2048 and a twelfth with 8192. Measured (H200,
2026-11-22, `gdn bench step --model qwen3.5-0.8b`): 128 such products for a vocabulary of 248,320, of 256
tokens each, took 101 of 462 ms. The loss and its gradients of 65,536 tokens and 32768 words, in two runs of each
(H200, 2026-11-23): 27.4 and 27.9 ms with tiles of 2048 tokens, 25.8 and 26.9 with 4096, 26.4 and 25.7 with 8192.
"""


class LossSums(NamedTuple):
    """Sums over tokens, each times its label weight. Gradients flow through `loss` and `weight` only."""

    loss: Float[Array, ""]  # nats, and z_loss
    z_loss: Float[Array, ""]  # its part of loss
    correct: Float[Array, ""]  # 1 where the largest logit, the first of equal ones, is the target's
    weight: Float[Array, ""]  # 1 for each token


class _Gradients(NamedTuple):
    """Gradients of the loss, for a unit cotangent."""

    x: Float[Array, "T D"]
    weight: Float[Array, "V D"]
    label_weights: Float[Array, " T"]


def linear_softmax_cross_entropy(
    x: Float[Array, "*S D"],
    weight: Float[Array, "V D"],
    targets: Int[Array, "*S"],
    *,
    label_weights: Float[Array, "*S"] | None = None,
    z_loss: float = 0.0,
    tile: int | None = None,
    implementation: str | None = None,
) -> LossSums:
    """Sum of the weighted cross entropies of logits W x; the module docstring has the equations.

    Memory holds the logits of one tile of tokens. When it is differentiated, dx and dW are computed in the forward
    pass and kept for the backward pass, which scales them; when it is not, they are not computed.

    Args:
      x: hidden states [.., D], bfloat16, float32 or float64, finite, also where the label weight is 0.
      weight: output projection [V, D], any floating dtype; used in x's dtype.
      targets: [..] integers in [0, V). Another value gives NaN where its label weight is not 0.
      label_weights: [..] any floating dtype; 0 leaves a token out, whatever its target. Default: 1 for every token.
      z_loss: coefficient z >= 0 of lse^2.
      tile: tokens whose logits are in memory at once. Default: `default_tile`.
      implementation: None takes kernels for the logits, their exponentials and their cotangents where there are any
        and gradients are asked for (a GPU of compute capability 9.0, bfloat16, D a multiple of 64, V of 128 and a
        tile's tokens of 8), "chunked" and "recurrent" do not.

    Returns:
      LossSums of scalars in float32 (float64 for float64 x). `z_loss` and `correct` are constants to a
      differentiation; `loss` can be differentiated, once, in x, weight and label_weights (whose gradient is 0 at an
      impossible target).

    Raises:
      ValueError: an argument has a wrong shape, dtype or value; names it.
      NotImplementedError: x is float16, in which the small probabilities of dl vanish.

    Numerics: bfloat16: all three products multiply bfloat16 and sum in float32; dl is rounded to bfloat16 for the two
      of the gradients, and so is, with the kernel, what it is made of, but for the target's number. float32: products
      with precision HIGHEST. Softmax and sums are float32 (float64 for float64 x); dW is summed over the tiles in it
      and rounded to weight's dtype at the end. The same bits in every call, for a tile.
    Source: the one-pass gradient of Liger's `fused_linear_cross_entropy`.
    """
    _check(x, weight, targets, label_weights, z_loss, tile)
    dtype = accumulation_dtype(x)
    if label_weights is None:
        label_weights = jnp.ones(targets.shape, dtype)
    loss, z, correct = _loss(
        x.reshape(-1, x.shape[-1]),
        weight,
        targets.reshape(-1),
        label_weights.reshape(-1),
        float(z_loss),
        default_tile(weight.shape[0]) if tile is None else tile,
        implementation,
    )
    # Constants, because the two parts of the loss would need gradients of their own.
    z, correct = jax.lax.stop_gradient((z, correct))
    return LossSums(loss, z, correct, jnp.sum(label_weights.astype(dtype)))


def token_log_probs(
    x: Float[Array, "*S D"],
    weight: Float[Array, "V D"],
    targets: Int[Array, "*S"],
    *,
    label_weights: Float[Array, "*S"] | None = None,
    tile: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "*S"]:
    """Log-probability of every target under logits W x, in nats, times its label weight.

    Their sum is minus the loss of `linear_softmax_cross_entropy`. Memory holds the logits of one tile of tokens, in
    the forward pass and in the backward pass, which computes them again. Divide x by a temperature to have the logits
    divided by it.

    Args:
      x: as in `linear_softmax_cross_entropy`, and so are weight, tile and implementation. The forward pass has no
        kernels, so that its bits are the same with and without differentiation.
      targets: [..] integers in [0, V). Another value gives NaN where its label weight is not 0.
      label_weights: [..] any floating dtype; 0 leaves a token out, whatever its target, and gives 0. Default: 1 for
        every token.

    Returns:
      [..] float32 (float64 for float64 x). It can be differentiated, once, in x, weight and label_weights.

    Raises:
      ValueError: an argument has a wrong shape, dtype or value; names it.
      NotImplementedError: x is float16, in which the small probabilities of dl vanish.

    Numerics: as `linear_softmax_cross_entropy`; a likely token's log-probability keeps its digits near 0.
    Source: `linear_softmax_cross_entropy` has both walks, without and with gradients.
    """
    _check(x, weight, targets, label_weights, 0.0, tile)
    if label_weights is None:
        label_weights = jnp.ones(targets.shape, accumulation_dtype(x))
    found = _log_probs(
        x.reshape(-1, x.shape[-1]),
        weight,
        targets.reshape(-1),
        label_weights.reshape(-1),
        default_tile(weight.shape[0]) if tile is None else tile,
        implementation,
    )
    return found.reshape(targets.shape)


def default_tile(vocab_size: int) -> int:
    """Tokens of a tile, a power of two.

    The most with at most TILE_LOGITS logits; for a large vocabulary TILE_TOKENS, as far as MOST_LOGITS allows; at
    least 1.
    """
    most, many = (1 << max(0, (n // vocab_size).bit_length() - 1) for n in (TILE_LOGITS, MOST_LOGITS))
    return max(most, min(many, TILE_TOKENS))


def _check(x, weight, targets, label_weights, z_loss, tile) -> None:
    if getattr(x, "ndim", 0) < 1:
        raise ValueError(f"x: expected an array [.., D], got {getattr(x, 'shape', type(x).__name__)}")
    check_floating("x", x)
    if x.dtype == jnp.float16:
        raise NotImplementedError(
            "x: float16 holds no number below 6e-8, so small probabilities in the cotangent of the logits would "
            "vanish; use bfloat16 or float32"
        )
    check_array("weight", weight, (None, x.shape[-1]), "V, D")
    check_floating("weight", weight)
    if weight.shape[0] < 1:
        raise ValueError("weight: expected at least one row, got 0")
    check_array("targets", targets, x.shape[:-1], "..")
    check_integer("targets", targets)
    if label_weights is not None:
        check_array("label_weights", label_weights, x.shape[:-1], "..")
        check_floating("label_weights", label_weights)
    if not isinstance(z_loss, int | float) or not 0 <= z_loss < math.inf:
        raise ValueError(f"z_loss: expected a finite number >= 0, got {z_loss}")
    if tile is not None and (not isinstance(tile, int) or tile < 1):
        raise ValueError(f"tile: expected a whole number of tokens >= 1, got {tile}")


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _loss(x, weight, targets, label_weights, z_loss, tile, implementation):
    """(loss, z_loss, correct) of tokens x [T, D]."""
    return _walk(x, weight, targets, label_weights, z_loss, tile, implementation, gradients=False)[0]


def _loss_forward(x, weight, targets, label_weights, z_loss, tile, implementation):
    return _walk(x, weight, targets, label_weights, z_loss, tile, implementation, gradients=True)


def _loss_backward(z_loss, tile, implementation, gradients, cotangents):
    scale = cotangents[0]
    dx, dweight, dlabel_weights = ((scale * g.astype(scale.dtype)).astype(g.dtype) for g in gradients)
    return dx, dweight, None, dlabel_weights


_loss.defvjp(_loss_forward, _loss_backward)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _log_probs(x, weight, targets, label_weights, tile, implementation):
    """Weighted log-probabilities [T] of tokens x [T, D]."""
    return -_walk(x, weight, targets, label_weights, 0.0, tile, implementation, gradients=False)[1]


def _log_probs_forward(x, weight, targets, label_weights, tile, implementation):
    arguments = x, weight, targets, label_weights
    return _log_probs(*arguments, tile, implementation), arguments


def _log_probs_backward(tile, implementation, arguments, cotangents):
    x, weight, targets, label_weights = arguments
    factors = -cotangents * label_weights.astype(cotangents.dtype)
    _, gradients = _walk(x, weight, targets, factors, 0.0, tile, implementation, gradients=True)
    dlabel_weights = (-cotangents * gradients.label_weights).astype(label_weights.dtype)
    return gradients.x, gradients.weight, None, dlabel_weights


_log_probs.defvjp(_log_probs_forward, _log_probs_backward)


def _walk(x, weight, targets, label_weights, z_loss, tile, implementation, *, gradients) -> tuple[Any, Any]:
    """(loss, z_loss, correct) over tiles of tokens, and the gradients, or else every token's weighted loss."""
    T, dtype = x.shape[0], accumulation_dtype(x)
    tokens = (x, targets, label_weights)
    of_tile = partial(_tile, weight.astype(x.dtype), z_loss, gradients, implementation)
    if T <= tile:
        (sums, dweight), per_token = of_tile(tokens)
    else:
        # What is padded has label weight 0 and so adds nothing.
        pieces = jax.tree.map(lambda a: _pad(a, -T % tile).reshape(-1, tile, *a.shape[1:]), tokens)
        zero = jnp.zeros((), dtype)
        start = ((zero, zero, zero), jnp.zeros(weight.shape, dtype) if gradients else None)
        start, _ = vary_alike((start, (weight, tokens)))

        def step(total, piece):
            summed, per_token = of_tile(piece)
            return jax.tree.map(jnp.add, total, summed), per_token

        (sums, dweight), per_token = jax.lax.scan(step, start, pieces)
        per_token = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:T], per_token)
    if dweight is None:
        return sums, per_token
    dx, dlabel_weights = per_token
    return sums, _Gradients(dx, dweight.astype(weight.dtype), dlabel_weights)


def _pad(a, count):
    return jnp.pad(a, ((0, count), *((0, 0),) * (a.ndim - 1)))


def _tile(weight, z_loss, gradients, implementation, tokens) -> tuple[Any, Any]:
    """A tile's part of the sums and of dW, and its dx and dlabel_weights; without gradients None, and its losses."""
    x, targets, label_weights = tokens
    dtype = accumulation_dtype(x)
    targets = targets.astype(jnp.promote_types(targets.dtype, jnp.int32))
    inside = (targets >= 0) & (targets < weight.shape[0])
    a = label_weights.astype(dtype)
    a = jnp.where(inside | (a == 0), a, jnp.nan)
    by_kernel = gradients and _takes(implementation, x, weight)
    softmax = (_by_kernel if by_kernel else _by_xla)(x, weight, jnp.where(inside, targets, 0))
    # Not lse - of_target: their difference would lose the digits of the nats of a sure prediction.
    nats = jnp.log(softmax.total) + (softmax.largest - softmax.of_target)
    lse = softmax.largest + jnp.log(softmax.total)
    z = z_loss * lse**2
    losses = jnp.where(inside, nats + z, 0)
    correct = (softmax.best == targets) & inside
    sums = (jnp.sum(a * losses), jnp.sum(a * z), jnp.sum(a * correct))
    if not gradients:
        return (sums, None), a * losses
    scale = a * (1 + 2 * z_loss * lse)
    of_target = scale * jnp.exp(-nats) - a
    dlogits = softmax.times(scale, of_target)
    dx = _product("tv,vd->td", dlogits, weight).astype(x.dtype)
    dweight = _product("tv,td->vd", dlogits, x)
    return (sums, dweight), (dx, losses.astype(label_weights.dtype))


def _product(subscripts: str, a, b) -> jax.Array:
    """A product with sums in the accumulation dtype, which is the result's."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=accumulation_dtype(a))


class _Softmax(NamedTuple):
    """Sums over a tile of logits."""

    largest: Float[Array, " T"]
    best: Int[Array, " T"]
    """Index of the first of the largest logits."""
    total: Float[Array, " T"]
    """Sum of exp(logit - largest)."""
    of_target: Float[Array, " T"]
    """The target's logit."""
    times: Callable[[Float[Array, " T"], Float[Array, " T"]], Float[Array, "T V"]]
    """The softmax times a factor of every token, but for the target, for which there is another number."""


def _by_xla(x, weight, targets) -> _Softmax:
    logits = _product("td,vd->tv", x, weight)

    def at(index):
        return jnp.take_along_axis(logits, index[:, None], -1)[:, 0]

    # The largest logit by its index: one pass over the logits gives both.
    best = jnp.argmax(logits, -1)
    largest = at(best)
    exps = jnp.exp(logits - largest[:, None])
    total = jnp.sum(exps, -1)

    def times(factor, of_target):
        is_target = jnp.arange(weight.shape[0])[None] == targets[:, None]
        return jnp.where(is_target, of_target[:, None], (factor / total)[:, None] * exps).astype(x.dtype)

    return _Softmax(largest, best, total, at(targets), times)


def _takes(implementation, x, weight) -> bool:
    from pallas_kernels.layer import cross_entropy, logit_cotangents

    exponentials = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), x.dtype)
    reason = cross_entropy.check_supported(x, weight.shape[0]) or logit_cotangents.check_supported(
        exponentials
    )
    return usable(implementation, cross_entropy, part="the loss", reason=reason)


def _by_kernel(x, weight, targets) -> _Softmax:
    sizes = {"t": len(x) // 8}
    operands, results = ("t .", ". .", "t"), ("t .", *(". t",) * 4)
    u, m, s, best, found = run(_exponentials, None, (x, weight, targets), operands, results, sizes)
    largest = jnp.max(m, 0)
    total = jnp.sum(s * jnp.exp(m - largest), 0)

    def times(factor, of_target):
        args = u, factor * jnp.exp(m - largest) / total, targets, of_target
        return run(_cotangents, None, args, ("t .", ". t", "t", "t"), "t .", sizes)

    # Of tiles with the largest logit the first, whose first one is the first of all.
    best = jnp.min(jnp.where(m == largest, best, jnp.iinfo(best.dtype).max), 0)
    return _Softmax(largest, best, total, jnp.sum(found, 0), times)


def _exponentials(_, x, weight, targets):
    from pallas_kernels.layer import cross_entropy

    return tuple(cross_entropy.cross_entropy(x, weight, targets))


def _cotangents(_, u, factor, targets, of_target):
    from pallas_kernels.layer import logit_cotangents

    return logit_cotangents.logit_cotangents(u, factor, targets, of_target)
