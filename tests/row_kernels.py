"""Arguments of the kernels of one row and what they have to give, for tests with and without a GPU."""

import fused_oracle
import jax.numpy as jnp
import numpy as np
from fused_harness import draws
from fused_oracle import wide


def experts(E: int, D: int, F: int, S: int, k: int, seed: int = 0):
    """Arguments of `fused.experts.row_mixture` but for the shared expert's weight, and what it gives without one."""
    draw, random = draws(seed), np.random.default_rng(seed)
    row, weights = draw(1, D, dtype="bfloat16"), jnp.abs(draw(1, k))
    chosen = jnp.asarray(random.permutation(E)[None, :k], jnp.int32)
    gate_up, down, gate, up, shared_down = (
        draw(*s, dtype="bfloat16", scale=s[-2] ** -0.5)
        for s in ((E, D, 2 * F), (E, F, D), (D, S), (D, S), (S, D))
    )
    args = row, weights, chosen, gate_up, down, (gate, up, shared_down)
    x, want = wide(row), 0.0
    for e, w in zip(np.asarray(chosen)[0], wide(weights)[0], strict=True):
        a, b = np.split(x @ wide(gate_up[e]), 2, axis=-1)
        want = want + w * fused_oracle.branches(a, b) @ wide(down[e])
    shared = fused_oracle.branches(x @ wide(gate), x @ wide(up)) @ wide(shared_down)
    return args, want, shared


def scores(N: int, E: int, seed: int = 0):
    """Scores, some of them equal, and a bias that leaves every second as it is."""
    draw = draws(seed)
    x = draw(N, E)
    return x.at[0].set(jnp.round(x[0])), jnp.where(jnp.arange(E) % 2, 0.1 * draw(E), 0.0)


def stream(D: int, F: int, dtype: str, seed: int = 0):
    """Arguments of `fused.row_product.stream_product`, and s, the norm and the product."""
    draw = draws(seed)
    x, y, norm, weight = draw(1, D), draw(1, D, dtype="bfloat16"), 1 + 0.1 * draw(D), draw(F, D, dtype=dtype)
    s, n = fused_oracle.add_norm(x, y, norm, 1e-6)
    return (x, y, norm, weight), s, n, n @ wide(weight).T


def heads(H: int, V: int, others: int, F: int, activation: str, seed: int = 0):
    """Arguments of `fused.row_product.heads_product`, the gates behind other channels, and what it gives."""
    draw = draws(seed)
    o, channels, norm = (
        draw(H, V, dtype="bfloat16"),
        draw(others + H * V, dtype="bfloat16"),
        1 + 0.1 * draw(V),
    )
    weight = draw(F, H * V, dtype="bfloat16", scale=(H * V) ** -0.5)
    y = fused_oracle.gated_norm(o, channels[others:].reshape(H, V), norm, 1e-6, activation)
    return (o, channels, norm, weight), y.reshape(1, -1) @ wide(weight).T
