"""Calls of the kernels for a decay of each channel, for tests on a CPU and on a GPU, and what they should leave."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_arrays import put

from gdn_jax.checks import cases
from gdn_jax.rule.call import Arrays, Call
from gdn_jax.rule.kernels.channels import Channels


def call(case: cases.Case, x: cases.Inputs, *, known: bool = False) -> tuple[Call, Arrays]:
    """A call of the seam and its arguments; known: whether cu_seqlens is known while tracing."""
    is_beta = x.erase is None and x.write is None
    strengths = (x.beta, None) if is_beta else (x.erase, x.write)
    arrays = x.q, x.k, x.v, x.g, *strengths, x.initial_state, x.cu_seqlens, x.segment_ids
    lengths = np.asarray(x.cu_seqlens, np.int64).tobytes() if known else None
    scale = case.K**-0.5 if case.scale is None else case.scale
    settings = case.use_qk_l2norm, case.state_layout, "channels" if is_beta else "apart"
    given = Arrays._make(None if y is None else put(y) for y in arrays)
    return Call(*settings, kernels=Channels(), known_lengths=lengths, scale=scale), given


def wide(name: str, channel_g: str = "mixed", **options) -> cases.Case:
    """A case of the kernels' usual width."""
    sizes: dict[str, Any] = dict(B=1, K=128, V=128, heads=(1, 1, 2))
    return cases.Case(name, channel_g=channel_g, **(sizes | options))


TABLE = [case for case in cases.CHANNELS if case.chunk_size == 64 and case.K <= 128]
"""Cases of the table that the kernels take."""
WIDE = (
    wide("wide-kinds", "kinds", T=2048),
    wide("wide-mixed", "mixed", T=2000, heads=(2, 1, 4)),
    wide("wide-bound", "bound", T=700),
    wide("wide-erase", "mixed", T=700, erase="channel", write="channel"),
    wide("wide-normalised", "kinds", T=700, use_qk_l2norm=True, keys="any"),
    wide("wide-packed", "kinds", T=1500, lengths=(0, 1, 64, 300, 0, 640, 63, 129)),
    wide("wide-equal-lengths", "kinds", T=512, lengths=(128,) * 4),
    wide("wide-V256", "mixed", T=200, V=256),
    wide("wide-K64", "mixed", T=200, K=64),
)


def products_of_a_chunk(q, k, e, g, beta, scale) -> dict[str, np.ndarray]:
    """The results of `channel_pairs` for one chunk of one head, pair by pair, in float64. q, k, e, g [C, K]."""
    C, alpha = len(q), np.exp(g)
    reads, kkt = np.zeros((C, C)), np.zeros((C, C))
    for i in range(C):
        decay = np.ones(k.shape[1])
        for j in range(i, -1, -1):
            reads[i, j] = (q[i] * k[j] * decay).sum()
            kkt[i, j] = (e[i] * k[j] * decay).sum()
            decay = decay * alpha[j]
    from_start, to_end = np.cumprod(alpha, 0), np.ones_like(alpha)
    for t in range(C - 2, -1, -1):
        to_end[t] = to_end[t + 1] * alpha[t + 1]
    t = np.linalg.inv(np.eye(C) + np.tril(kkt, -1) * beta)
    gl = from_start[-1]
    return dict(
        t=t, p=scale * reads * beta, kg=e * from_start, qg=scale * q * from_start, kr=k * to_end, gl=gl
    )


def gates(recipe: str, seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Log decays of a recipe of the cases."""
    return cases.channel_decays(recipe, np.random.default_rng(seed), shape).astype(np.float32)


def unit(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random vectors of length 1, as bfloat16 holds them."""
    x = rng.standard_normal(shape)
    return np.asarray(jnp.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True), jnp.bfloat16), np.float64)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two pytrees of arrays hold the same bits."""
    return all(
        np.array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def random_call(T: int, gate: str, heads: int = 4, seed: int = 0):
    """Arguments of `delta_rule` with widths of 128."""
    rng = np.random.default_rng(seed)
    q, k = (put(unit(rng, 1, T, heads, 128), jnp.bfloat16) for _ in range(2))
    v = put(rng.standard_normal((1, T, heads, 128)), jnp.bfloat16)
    g = put(gates(gate, seed, (1, T, heads, 128)))
    beta = put(rng.uniform(0, 1, (1, T, heads)), jnp.float32)
    return q, k, v, g, beta
