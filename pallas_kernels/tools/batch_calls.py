"""Calls of the kernels that several rows of a batch need: their experts, and the latents that they attend to."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp

from pallas_kernels.device.needs import Needs
from pallas_kernels.layer.expert_gradient import expert_gradient
from pallas_kernels.layer.expert_product import Config as ExpertConfig
from pallas_kernels.layer.expert_product import expert_product
from pallas_kernels.rows.attention_rows import attention_rows
from pallas_kernels.rows.cached_heads import Norms, Rotation, cached_heads
from pallas_kernels.rows.expert_swiglu import Config as SwigluConfig
from pallas_kernels.rows.expert_swiglu import expert_swiglu
from pallas_kernels.rows.expert_tiles import expert_tiles
from pallas_kernels.rows.few_product import few_product
from pallas_kernels.rows.parts_norm import parts_norm
from pallas_kernels.tools.call import Call, call


def configured(kernel: Callable[..., Any], config: Callable[[], Any], *arrays: Any, **options: Any) -> Any:
    """A kernel with the configuration of the device, which is asked for when it is called."""
    return kernel(*arrays, config=config(), **options)


def latents(kernel: Callable[..., Any], q: Any, r: Any, c: Any, k: Any, length: Any) -> Any:
    """Latent attention of a token of each row, of one key head."""
    return kernel((q[:, None], r[:, None]), (c[:, :, None], k[:, :, None]), length, scale=0.07)


def grouped(kernel: Callable[..., Any], q: Any, k: Any, v: Any, length: Any) -> Any:
    """The same of grouped queries [B, N, G, K]."""
    return kernel((q,), (k, v), length, scale=0.07)


def into_cache(heads: int, x: Any, k: Any, v: Any, slots: Any, frequencies: Any, *norms: Any) -> Any:
    """Heads of a token of each row, rotated and normalised."""
    return cached_heads(
        x, (k, v), slots, None, Norms(*norms), Rotation(slots, frequencies), heads=heads, eps=1e-6
    )


BATCH_CALLS: dict[str, Call] = {
    "experts, 32 rows into tiles": call(
        partial(expert_tiles, experts=128, size=8), "bf16[32,1536] i32[32,8]"
    ),
    "experts, 128 rows into tiles": call(
        partial(expert_tiles, experts=128, size=32), "bf16[128,1536] i32[128,8]"
    ),
    **{
        f"experts, tiles of {size} rows": call(
            partial(configured, expert_swiglu, partial(SwigluConfig.default, size, 1536)),
            f"bf16[{tiles * size},1536] bf16[128,1536,1024] bf16[128,512,1536] i32[{tiles}] i32[{tiles}] i32[1] "
            f"f32[{rows},8] i32[{rows},8]",
        )
        for size, rows, tiles in ((8, 32, 144), (16, 64, 152), (32, 128, 156))
    },
    "product of 32 rows, 0.4b": call(few_product, "bf16[32,1024] bf16[4224,1024]"),
    "product of 32 rows, Qwen3.5-0.8b": call(few_product, "bf16[32,1024] bf16[8320,1024]"),
    "experts, many rows": call(
        partial(configured, expert_product, ExpertConfig, swiglu=True),
        "bf16[8192,1536] bf16[128,1536,1024] i32[64] i32[1]",
    ),
    "experts, many rows, down": call(
        partial(configured, expert_product, ExpertConfig),
        "bf16[8192,512] bf16[128,512,1536] i32[64] i32[1]",
    ),
    "experts, many rows, transposed": call(
        partial(configured, expert_product, ExpertConfig, transpose=True),
        "bf16[8192,1024] bf16[128,1536,1024] i32[64] i32[1]",
    ),
    "experts, gradient": call(
        partial(expert_gradient, rows=128), "bf16[8192,1536] bf16[8192,1024] i32[128] i32[128]"
    ),
    "latents of 32 rows": call(
        partial(latents, attention_rows),
        "bf16[32,16,512] bf16[32,16,64] bf16[32,32832,512] bf16[32,32832,64] i32[32]",
    ),
    "latents of 128 rows, 32 heads": call(
        partial(latents, attention_rows),
        "bf16[128,32,512] bf16[128,32,64] bf16[128,4096,512] bf16[128,4096,64] i32[128]",
    ),
    "attention of one row, Qwen3.5-0.8b": call(
        partial(grouped, attention_rows),
        "bf16[1,2,4,256] bf16[1,32832,2,256] bf16[1,32832,2,256] i32[1]",
    ),
    "norm of 32 rows after parts": call(
        partial(parts_norm, eps=1e-6, dtype=jnp.bfloat16), "f32[32,2560] f32[8,32,2560] f32[2560]"
    ),
    "heads of 32 rows into a cache, Qwen3.5-0.8b": call(
        partial(into_cache, 8),
        "bf16[32,5120] bf16[32,4096,2,256] bf16[32,4096,2,256] i32[32] f32[32] f32[256] f32[256]",
        Needs.TMA,
    ),
}
"""Name -> a call."""
