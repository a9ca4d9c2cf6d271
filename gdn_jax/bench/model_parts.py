"""The parts of a model around the rule and the products of its projections, with what each has to do at least.

A part is a public call of `gdn_jax.parts` or of the loss, on inputs of a model's sizes in bfloat16, with a residual
stream in float32. Its bytes are every array that the call has to read or write, once. Filters and weights of norms
are left out. The loss makes the gradient of its logits in the forward pass.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.losses import default_tile, linear_softmax_cross_entropy
from gdn_jax.models import ModelConfig
from gdn_jax.parts.embedding import embed
from gdn_jax.parts.norms import add_norm, gated_norm
from gdn_jax.parts.short_conv import short_conv
from gdn_jax.parts.swiglu import swiglu

NARROW, WIDE = jnp.bfloat16, jnp.float32


class Part(NamedTuple):
    """A public call, by the shapes of its differentiated arguments, and its bytes; None for a pass that is not timed.

    kernels: what the names of those that count begin with; "" for all.
    """

    name: str
    call: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    forward_bytes: int | None
    backward_bytes: int | None
    kernels: str = ""


class Product(NamedTuple):
    """A projection [tokens, inputs] @ [inputs, outputs] of bfloat16, with products of some dtype."""

    name: str
    tokens: int
    inputs: int
    outputs: int
    dtype: Any = NARROW


def parts(config: ModelConfig, rows: int, length: int) -> list[Part]:
    """The parts of a model on rows of one length."""
    N, D, V, F = rows * length, config.hidden_size, config.vocab_size, config.mlp_size
    HK, HV = config.num_heads, config.num_v_heads or config.num_heads
    K, KV = config.head_dim, round(config.head_dim * config.expand_v)
    C, tile = 2 * HK * K + HV * KV, min(N, default_tile(V))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, V, (rows, length)).astype(np.int32)
    targets = rng.integers(0, V, tile).astype(np.int32)

    def array(*shape: int, dtype=NARROW) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def stream(dtype=NARROW) -> jax.ShapeDtypeStruct:
        return array(rows, length, D, dtype=dtype)

    def loss(x, weight):
        return linear_softmax_cross_entropy(x, weight, jnp.asarray(targets)).loss

    heads = array(rows, length, HV, KV)
    return [
        Part(
            "convolution of q, k, v with SiLU and unit length",
            lambda x, weight: short_conv(x, weight, heads=HK, width=K)[:3],
            (array(rows, length, C), array(C, config.conv_size, dtype=WIDE)),
            2 * N * C * 2,  # x; q, k and v
            3 * N * C * 2,  # x and the cotangents of q, k and v; that of x
        ),
        Part(
            "residual sum and RMSNorm",
            # Without a weight, as before every projection whose kernel is multiplied by it.
            lambda x, y: add_norm(x, y, None, dtype=NARROW),
            (stream(WIDE), stream()),
            N * D * (4 + 2 + 4 + 2),  # x and y; their sum and its norm
            # The norm, the cotangents of both results, those of x and y; the factors of the rows.
            N * D * (2 + 4 + 2 + 4 + 2) + N * 4,
        ),
        Part(
            "RMSNorm of each head with its gate",
            gated_norm,
            (heads, heads, array(KV, dtype=WIDE)),
            3 * N * HV * KV * 2,
            5 * N * HV * KV * 2,
        ),
        Part(
            "branches of the SwiGLU and their product",
            swiglu,
            (stream(), array(D, F), array(D, F), array(F, D)),
            # x, both branches and their product, and backward dy, both branches and their cotangents. Of fewer rows
            # kernels read or write the product's cotangent instead of x and dy, which are smaller.
            N * (D + 3 * F) * 2,
            N * (D + 4 * F) * 2,
            "swiglu",
        ),
        Part(
            f"logits of a tile of {tile} x {V} and their exponentials",
            jax.value_and_grad(loss, (0, 1)),
            (array(tile, D), array(V, D)),
            (tile * D + V * D + tile * V) * 2,  # x, the projection and the exponentials
            None,
            "cross_entropy",
        ),
        Part(
            f"cotangents of a tile's logits, {tile} x {V}",
            jax.value_and_grad(loss, (0, 1)),
            (array(tile, D), array(V, D)),
            2 * tile * V * 2,  # the exponentials and the cotangents
            None,
            "logit_cotangents",
        ),
        Part(
            f"gradient of the embedding, vocabulary {V}",
            lambda embedding: embed(embedding, jnp.asarray(tokens)),
            (array(V, D, dtype=WIDE),),
            None,
            (N + V) * D * 4,
        ),
    ]


def products(config: ModelConfig, tokens: int) -> list[Product]:
    """The projections of a model."""
    D, F, V = config.hidden_size, config.mlp_size, config.vocab_size
    HK, HV = config.num_heads, config.num_v_heads or config.num_heads
    keys, values = HK * config.head_dim, HV * round(config.head_dim * config.expand_v)
    tile = min(tokens, default_tile(V))
    return [
        Product("to q, k and v", tokens, D, 2 * keys + values),
        Product("to the gates of the rule", tokens, D, 2 * HV),
        Product("to the gate of the heads", tokens, D, values),
        Product("from the heads", tokens, values, D),
        Product("to both branches of the SwiGLU", tokens, D, 2 * F),
        Product("from the SwiGLU", tokens, F, D),
        Product("logits of a tile, float32", tile, D, V, WIDE),
    ]
