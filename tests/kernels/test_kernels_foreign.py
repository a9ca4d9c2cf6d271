"""Masks of a chunk that several sequences share, in tiles of every shape that the kernels have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import put
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.launch import launch
from pallas_kernels.device.memory import Barriers, Buffer
from pallas_kernels.work.foreign import mask_foreign
from pallas_kernels.work.spans import Span

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)

SHAPES = {"tile": (64, 192), "square": (64, 64)}


def masked(arrays, begin: int, end: int):
    """The arrays as a span of the tokens [begin, end) of one chunk sees them."""

    def body(gmem, smem):
        zero, one = put(0, "int32"), put(1, "int32")
        span = Span(zero, None, jnp.int32(begin), jnp.int32(end), zero, one, None, False)
        for name in SHAPES:
            plgpu.copy_gmem_to_smem(getattr(gmem, name), getattr(smem, name), smem.loaded)
        plgpu.barrier_wait(smem.loaded)
        mask_foreign(span, zero, (smem.tile, smem.square), square=smem.square)
        for name in SHAPES:
            plgpu.copy_smem_to_gmem(getattr(smem, name), getattr(gmem, f"{name}_out"))
        plgpu.wait_smem_to_gmem(0)

    results = launch(
        "masked",
        body,
        inputs=arrays,
        outputs={f"{name}_out": jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in SHAPES.items()},
        memory={name: Buffer(shape, jnp.bfloat16, swizzle=128) for name, shape in SHAPES.items()}
        | {"loaded": Barriers(arrivals=len(SHAPES))},
        ctas=1,
        auto_barriers=True,
        interpret=INTERPRET,
    )
    return {name: np.asarray(results[f"{name}_out"]) for name in SHAPES}


@pytest.mark.parametrize(("begin", "end"), [(0, 64), (0, 1), (5, 64), (17, 40), (63, 64)])
def test_only_owned_rows_stay_and_in_a_square_only_owned_columns(begin, end):
    """Exactly, and what is not owned may be anything."""
    rng = np.random.default_rng(0)
    arrays = {name: put(rng.normal(size=shape), jnp.bfloat16) for name, shape in SHAPES.items()}
    row = np.arange(64)
    owned = (row >= begin) & (row < end)
    keep = {"tile": owned[:, None], "square": owned[:, None] & owned}
    expected = {name: np.where(keep[name], np.asarray(x), 0) for name, x in arrays.items()}
    spoilt = {name: jnp.where(keep[name], x, jnp.nan) for name, x in arrays.items()}
    found = masked(spoilt, begin, end)
    for name in SHAPES:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
