"""Warps of a warpgroup meet: stores to shared memory before it are seen by loads after it, of plain accesses only."""
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu


@plgpu.inline_mgpu()
def meet(ctx):
    utils.warpgroup_barrier()
