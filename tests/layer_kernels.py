"""Helpers of the tests of the kernels around the rule: the kernels interpreted, and a convolution with its results."""

import collections
import functools

import fused_oracle
import jax.numpy as jnp
import numpy as np
from fused_harness import draws
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import launch
from pallas_kernels.layer import (
    cross_entropy,
    embedding,
    gated_norm,
    logit_cotangents,
    norm,
    short_conv,
    swiglu,
    swiglu_cotangents,
    swiglu_product,
    weight_gradient,
)

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)

KERNELS = (
    (norm, "add_norm"),
    (gated_norm, "gated_norm"),
    (swiglu, "swiglu"),
    (swiglu_product, "swiglu_product"),
    (swiglu_cotangents, "swiglu_cotangents"),
    (weight_gradient, "weight_gradient"),
    (short_conv, "short_conv"),
    (embedding, "embedding_gradient"),
    (cross_entropy, "cross_entropy"),
    (logit_cotangents, "logit_cotangents"),
)
"""Every file of a kernel, and the name of its function; that of its derivative ends in `_backward`."""


def interpret(monkeypatch) -> collections.Counter:
    """`gdn_jax.fused` takes the kernels, interpreted, as on a GPU. Returns the counts of their calls by name."""
    calls = collections.Counter()
    monkeypatch.setattr(launch, "device_reason", lambda: None)

    def counted(kernel, function, *arguments, **options):
        calls[kernel] += 1
        return function(*arguments, interpret=INTERPRET, **options)

    for module, name in KERNELS:
        for kernel in (name, f"{name}_backward"):
            if hasattr(module, kernel):
                function = functools.partial(counted, kernel, getattr(module, kernel))
                monkeypatch.setattr(module, kernel, function)
    return calls


def convolution(dtype, *, B, T, HV, heads=4, width=32, borders=None, normalize=True):
    """Arrays and options of a convolution, and what float64 makes of them.

    Returns (x, weight, segment_ids), cotangents, options of the operation, and the expected results.
    """
    draw, D = draws(T), (2 * heads + HV) * width
    segments = None
    if borders is not None:
        segments = np.cumsum(np.isin(np.arange(T), borders))[None].repeat(B, 0).astype(np.int32)
    x, weight = draw(B, T, D, dtype=dtype), draw(D, short_conv.WIDTH, scale=0.5)
    cotangents = tuple(draw(B, T, *shape, dtype=dtype) for shape in 2 * [(heads, width)] + [(HV * width,)])
    pieces = fused_oracle.whole_rows(B, T) if segments is None else fused_oracle.pieces_of_ids(segments)
    options = dict(heads=heads, width=width, normalize=normalize)
    zeros = np.zeros((B, D, short_conv.WIDTH - 1))
    expected = fused_oracle.short_conv(x, weight, cotangents=(*cotangents, zeros), pieces=pieces, **options)
    return (x, weight, None if segments is None else jnp.asarray(segments)), cotangents, options, expected
