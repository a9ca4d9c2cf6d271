"""The kernels of the short convolution, without a GPU: interpreted, their seam, and where the strips lie."""

import functools

import fused_oracle
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import put
from fused_harness import close, draws
from layer_kernels import INTERPRET, convolution

from gdn_jax.parts.conv import causal_conv1d
from gdn_jax.parts.short_conv import short_conv as fused_short_conv
from pallas_kernels.layer import short_conv

BORDERS = (3, 5, 7, 9, 14, 18, 24)
"""First tokens of segments. Strips of 8 tokens begin one and two tokens behind one, one and two before one, with one
and without; 3 and 5 are nearer to each other than the filter is long."""

# Rows that end inside a strip, without segments and with; a strip longer than the row, and no norm; the defaults.
CONVOLUTIONS = {
    "defaults": (dict(B=1, T=40, HV=4), None, "bfloat16"),
    "strips": (dict(B=2, T=24, HV=4), short_conv.Config(16, 2, turns=2, depth=3), "bfloat16"),
    "segments": (dict(B=1, T=40, HV=4, borders=BORDERS), short_conv.Config(8, 2), "bfloat16"),
    "one strip": (
        dict(B=1, T=8, HV=8, width=64, borders=(1, 2, 4), normalize=False),
        short_conv.Config(64, 4),
        "float16",
    ),
}


@pytest.mark.parametrize("name", harness.tiers(CONVOLUTIONS, (), ("strips", "segments")))
def test_short_conv(name):
    sizes, config, dtype = CONVOLUTIONS[name]
    (x, weight, segments), cotangents, options, expected = convolution(dtype, **sizes)
    assert short_conv.check_supported(x, weight, options["heads"], options["width"]) is None
    fresh = None
    if segments is not None:
        fresh = jnp.diff(segments, axis=1, prepend=-1).astype(jnp.int32)
    run = dict(interpret=INTERPRET) | ({} if config is None else dict(config=config))
    for n, got in zip("qkv", short_conv.short_conv(x, weight, fresh, **options, **run), strict=True):
        assert got.dtype == x.dtype
        close(getattr(expected, n), got, n)
    dx, dweight = short_conv.short_conv_backward(
        x, weight, fresh, *cotangents, normalize=options["normalize"], **run
    )
    assert (dx.dtype, dweight.dtype) == (x.dtype, jnp.float32)
    close(expected.dx, dx, "dx")
    close(expected.dweight, dweight, "dweight")


@pytest.mark.parametrize(
    ("T", "walks"), [(8192, 48), (2048, 192), (32768, 12), (8192, 192), (8192, 24), (1000, 42), (2048, 768)]
)
def test_strips_of_the_convolution_fill_the_gpu(T, walks):
    at_once = 4 * 132
    strip = short_conv.even_strip(T, walks, at_once, 2)
    assert strip % 2 == 0 and short_conv.LEAST_STRIP <= strip <= T
    ctas = walks * -(-T // strip)
    assert 0.95 * at_once * -(-ctas // at_once) <= ctas <= short_conv.MOST_WAVES * at_once


def test_short_rows_of_the_convolution_have_strips_that_are_worth_their_sums():
    assert short_conv.even_strip(2048, 6, 4 * 132, 2) == short_conv.even_strip(8, 3, 4 * 132, 2) == 32
    assert (
        short_conv.even_strip(64, 10_000, 4 * 132, 2) == 64
    )  # more rows than run at once in any number of waves


@pytest.mark.slow
def test_seam_of_short_conv(interpreted):
    """Segments by their ids, and a final state through which gradients flow."""
    sizes = dict(B=1, T=8, HV=4, borders=(1, 2, 4))
    (x, weight, segments), cotangents, options, _ = convolution("bfloat16", **sizes)
    dfinal = draws(5)(1, x.shape[2], short_conv.WIDTH - 1, dtype="bfloat16")
    (*parts, final), back = jax.vjp(
        lambda x, weight: fused_short_conv(x, weight, **options, segment_ids=segments), x, weight
    )
    dx, dweight = back((*cotangents, dfinal))
    expected = fused_oracle.short_conv(
        x,
        weight,
        cotangents=(*cotangents, dfinal),
        pieces=fused_oracle.pieces_of_ids(np.asarray(segments)),
        **options,
    )
    for name, got in zip("qkv", parts, strict=True):
        close(getattr(expected, name), got, name)
    np.testing.assert_array_equal(final, causal_conv1d(x, weight, segment_ids=segments)[1])
    close(expected.dx, dx, "dx", 2)  # of the kernel and of its sum with what comes through the state
    close(expected.dweight, dweight, "dweight")
    assert interpreted == {"short_conv": 1, "short_conv_backward": 1}


def test_what_the_convolution_leaves_to_the_plain_form(interpreted):
    """A bias, an initial state and packed sequences."""
    (x, weight, _), _, options, _ = convolution("bfloat16", B=1, T=8, HV=4)
    for extra in (
        dict(bias=jnp.zeros(x.shape[2])),
        dict(initial_state=jnp.zeros((1, x.shape[2], 3))),
        dict(cu_seqlens=put([0, 3, 8])),
        dict(implementation="chunked"),
    ):
        jax.eval_shape(functools.partial(fused_short_conv, **options, **extra), x, weight)
    assert not interpreted
    jax.eval_shape(functools.partial(fused_short_conv, **options), x, weight)
    assert interpreted == {"short_conv": 1}
