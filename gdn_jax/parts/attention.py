"""Causal and masked softmax attention: cuDNN where it can, XLA elsewhere."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

_WIDEST = 256
"""Width of a head that cuDNN takes at most."""


def attend(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S Hkv K"],
    v: Float[Array, "B S Hkv V"],
    *,
    causal: bool,
    lengths: Int[Array, " B"] | None = None,
    visible: Bool[Array, "B 1 T S"] | None = None,
    layer: int = 0,
    window: int | None = None,
) -> Float[Array, "B T H V"]:
    """softmax(q k^T / sqrt(K)) v, by cuDNN where it can.

    cuDNN takes 16-bit arrays with heads of a width that is a multiple of 8 up to 256 on an NVIDIA GPU of compute
    capability 9.0 or later, and `visible` for an even number of queries and of keys. XLA takes the rest, and keeps
    all scores in memory. Where K and V differ, the narrower heads are filled up with zeros, which add nothing.

    Args:
      q, k, v: queries, keys and values; query head i reads key and value head i // (H // Hkv).
      causal: query i sees keys up to i; T = S.
      lengths: keys of each row; None: all.
      visible: which keys a query sees, beside that; None: all.
      window: keys that a query sees at most, its own the last one, for causal calls; None: all up to its own.
      layer: another number for each call whose gradient is taken in one program, see `_scale`.

    Returns:
      The mixed values in q's dtype.

    Numerics: scores and softmax in float32 (float64 where q is). The weights are rounded to q's dtype before they
      multiply v, but for float16 without cuDNN, which is computed in float32 throughout.
    """
    K, V, dtype = q.shape[-1], v.shape[-1], q.dtype
    q, k, v = (_widened(x, max(K, V)) for x in (q, k, v))
    by_cudnn = takes(q, k, visible)
    if dtype == jnp.float16 and not by_cudnn:  # XLA has no such products on a CPU
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    o = jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=visible,
        scale=_scale(K, layer),
        is_causal=causal,
        key_value_seq_lengths=lengths,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn" if by_cudnn else "xla",
    )
    return o[..., :V].astype(dtype)


def _scale(K: int, layer: int) -> float:
    """K^(-1/2), which differs from layer to layer by less than the rounding of the float32 that cuDNN reads."""
    # A workaround for XLA with jax 0.11.2, not reported there: of equal backward calls it compiles one, and in
    # programs with equal bits it then finds no other (IndexError). Once this is no longer needed,
    # tests/models/test_hybrid.py::test_equal_attention_layers_by_cudnn fails.
    return (1 + layer * 2.0**-40) / math.sqrt(K)


def takes(
    q: Float[Array, "B T H D"], k: Float[Array, "B S Hkv D"], visible: Bool[Array, "B 1 T S"] | None
) -> bool:
    """Whether cuDNN takes such queries and keys on the present device; see `attend`."""
    device = jax.devices()[0]
    if device.platform != "gpu" or q.dtype not in (jnp.bfloat16, jnp.float16):
        return False
    capability = str(getattr(device, "compute_capability", "0")).split(".")[0]
    if not capability.isdecimal() or int(capability) < 9 or q.shape[-1] % 8 or q.shape[-1] > _WIDEST:
        return False
    return visible is None or (q.shape[1] % 2 == 0 and k.shape[1] % 2 == 0)


def frequencies(theta: float, width: int) -> Float[np.ndarray, " half"]:
    """Angles by which pairs of `width` dimensions turn from a token to the next, float32: theta^(-2 j / width)."""
    return (1.0 / theta ** (np.arange(width // 2) * 2 / width)).astype(np.float32)


def same_segment(segment_ids: Int[Array, "B T"] | None) -> Bool[Array, "B 1 T T"] | None:
    """Tells which tokens of a row are of one segment; an id may come back later. None: there are no segments."""
    if segment_ids is None:
        return None
    changes = jnp.cumsum(jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0, axis=1)
    return (changes[:, :, None] == changes[:, None, :])[:, None]


def _widened(x: Float[Array, "B T H D"], width: int) -> Float[Array, "B T H W"]:
    """Heads filled up with zeros."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, width - x.shape[-1]))) if x.shape[-1] < width else x
