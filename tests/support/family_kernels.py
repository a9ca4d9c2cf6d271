"""Calls of the family's kernels on cases, for the tests on a CPU and on a GPU, and what they should leave."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_arrays import put

from gdn_jax.checks import family_cases, family_oracle
from gdn_jax.checks.family_cases import FamilyCase, FamilyInputs
from gdn_jax.rule.call import Arrays, Call
from gdn_jax.rule.kernels.channels import Channels


def options(case: FamilyCase) -> dict[str, Any]:
    """Options of `delta_rule` and the oracle."""
    return {name: value for name, value in case.call.options.items() if name != "chunk_size"}


def truth(case: FamilyCase, x: FamilyInputs) -> dict[str, Any]:
    """The oracle's outputs and gradients by name."""
    return family_oracle.evaluate(**x.arguments, **options(case), do=x.do, dh_T=x.dh_T)


def arrays(x: FamilyInputs) -> tuple[Arrays, bool]:
    """The arguments as the seam takes them, and whether erase stands for both strengths."""
    is_beta = x.erase is None and x.write is None
    given = [None if y is None else put(y) for y in x[:10]]
    q, k, v, g, beta, erase, write, *rest = given
    return Arrays(q, k, v, g, beta if is_beta else erase, None if is_beta else write, *rest), is_beta


def call(case: FamilyCase, x: FamilyInputs, *, known: bool = False) -> tuple[Call, Arrays]:
    """A call of the seam and its arguments; known: whether cu_seqlens is known while tracing."""
    given, is_beta = arrays(x)
    lengths = np.asarray(x.cu_seqlens, np.int64).tobytes() if known else None
    scale = case.call.K**-0.5 if case.call.scale is None else case.call.scale
    settings = case.call.use_qk_l2norm, case.call.state_layout, "channels" if is_beta else "apart"
    return Call(*settings, kernels=Channels(), known_lengths=lengths, scale=scale), given


def wide(name: str, gate: str = "mixed", **kw) -> FamilyCase:
    """A case of the kernels' usual width."""
    sizes: dict[str, Any] = dict(B=1, K=128, V=128, heads=(1, 1, 2))
    strengths = {key: kw.pop(key) for key in ("erase", "write") if key in kw}
    return family_cases.FamilyCase(family_cases.Case(name, **(sizes | kw)), gate, **strengths)


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
    return family_cases._gates(recipe, np.random.default_rng(seed), shape).astype(np.float32)


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
