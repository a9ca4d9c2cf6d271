"""Copies of a model with its weights as generation reads them, made once so that no token pays for it again."""

import itertools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from gdn_jax.layers import RecurrentMixer, single_token
from gdn_jax.layers.blocks import RMSNorm, group_projections, set_product
from gdn_jax.layers.channel_decay import ChannelDecayMixer
from gdn_jax.models.attention import Attention
from gdn_jax.models.block import Block, ReorderedBlock
from gdn_jax.models.decoder import LanguageModel
from gdn_jax.models.experts import Experts
from gdn_jax.models.inference.attention import AttentionRows, WindowRows
from gdn_jax.models.inference.dense import DenseRow
from gdn_jax.models.inference.experts import ExpertRows
from gdn_jax.models.inference.latent import LatentRows
from gdn_jax.models.latent import LatentAttention
from gdn_jax.models.lora import merge_lora
from gdn_jax.models.window import WindowAttention
from gdn_jax.parallel.head_shards import splits_heads
from gdn_jax.parts.kernels import usable
from gdn_jax.parts.products import PLAIN


def for_inference(model: LanguageModel) -> LanguageModel:
    """A copy whose products find their weights in the compute dtype, as they would round them at every call.

    Norms find their factors in float32, in which they read them: a compiler would widen 16-bit weights, and add 1 to
    zero-centred ones, for every token. Its logits are those of the model, bit for bit, unless that multiplies in 8
    bits: the copy never does. Low-rank changes are merged. Where a tied output projection would be rounded, the copy
    has one of its own; the embedding stays as it is, since the residual stream begins with it. What needs no
    conversion is shared with the model. The copy is neither for training nor for saving.

    Args:
      model: the model; may be traced.
    """
    model = nnx.clone(model)
    merge_lora(model)
    set_product(model, PLAIN)
    dtype = jnp.dtype(model.config.dtype)
    for _, part in nnx.iter_modules(model):
        if isinstance(part, nnx.Linear):
            _convert(part.kernel, dtype)
        elif isinstance(part, Experts):
            router = part.router if part.router_bias is None else None  # else it stays float32
            for weight in (router, part.gate_up, part.down, part.shared_gate):
                if weight is not None:
                    _convert(weight, dtype)
        elif isinstance(part, RMSNorm):
            part.weight.set_value(part.scale(jnp.float32))
            part.zero_centred = False
    if model.head_weight().dtype != dtype:
        model.head = nnx.data(nnx.Param(model.head_weight().astype(dtype)))
    return model


GROUPS = (
    (
        *("q_proj", "k_proj", "v_proj", "a_proj", "f_proj", "f_a_proj", "g_a_proj", "b_proj", "w_proj"),
        *("q_a_proj", "kv_a_proj", "g_proj"),
    ),
    ("o_proj",),
)
"""Projections of a mixer that have one input, by their names, in the order in which its kernels take them. First
factors are neighbours: what multiplies both, `RecurrentMixer.join_factors`, reads them where they lie."""

MLP_GROUPS = (("gate_proj", "up_proj"), ("down_proj",))
"""The same of a SwiGLU."""


def for_decoding(model: LanguageModel, rows: int) -> LanguageModel:
    """A copy for single tokens, whose projections of one input are one product of a transposed weight.

    Where a GPU reads few rows, its time is the number of its kernels and the bytes of the weights. The copy has
    weights of its own, and its logits are those of the model but for rounding. Under a mesh, and where our kernels
    do not run, it is the model itself.

    Args:
      model: of `for_inference`; may be traced.
      rows: that have a token in every call.
    """
    if not usable(model.config.implementation) or splits_heads():
        return model
    model = nnx.clone(model)
    for block in model.blocks:
        block.mixer = _mixer_for_decoding(block.mixer, rows)
        block.mlp = _mlp_for_decoding(block, rows)
    if rows == 1:
        _look_ahead(model)
    return model


ROWS: dict[type, Callable[[Any], nnx.Module]] = {
    Attention: AttentionRows,
    WindowAttention: WindowRows,
    LatentAttention: LatentRows,
}
"""A mixer's type -> the one that takes its place in a copy for single tokens. Others stay, changed in place."""


def _mixer_for_decoding(mixer: Any, rows: int) -> Any:
    """A token mixer with one product for projections of one input, changed in place or another in its place."""
    if rows == 1 and isinstance(mixer, ChannelDecayMixer):
        whole = nnx.clone(mixer)
        whole.multiply_factors()
        _group(whole)
        if single_token.takes(whole):
            return whole
    _group(mixer)
    if isinstance(mixer, RecurrentMixer):
        mixer.join_factors()
    kind = ROWS.get(type(mixer))
    return mixer if kind is None else kind(mixer)


def _group(mixer: Any) -> None:
    # Whole heads, so that a kernel can take the last ones as those of the output gate.
    unit = mixer.head_v_dim if isinstance(mixer, RecurrentMixer) else 1
    for names in GROUPS:
        group_projections(mixer, names, unit if "g_proj" in names else 1)


def _mlp_for_decoding(block: Block, rows: int) -> Any:
    """The same of what follows the mixer."""
    mlp = block.mlp
    if isinstance(mlp, Experts):
        return ExpertRows(mlp, rows)
    if rows == 1 and not isinstance(block, ReorderedBlock):  # which norms nothing before it
        if (row := DenseRow.of(mlp)) is not None:
            return row
    for names in MLP_GROUPS:
        group_projections(mlp, names)
    return mlp


AHEAD = 6
"""Weights of other layers that a layer knows as the next ones. Kernels take the first bytes of them."""


def _look_ahead(model: LanguageModel) -> None:
    """Lets the parts of all blocks know what a token reads next."""
    parts = [part for block in model.blocks for part in (block.mixer, block.mlp) if hasattr(part, "ahead")]
    read = [part.token_weights() for part in parts]
    all_weights = [
        *itertools.chain.from_iterable(read),
        model.embedding if model.head is None else model.head,
    ]
    begin = 0
    for part, own in zip(parts, read, strict=True):
        part.ahead = nnx.data(tuple(all_weights[begin : begin + len(own) + AHEAD]) if own else ())
        begin += len(own)


def _convert(weight: nnx.Variable, dtype: DTypeLike) -> None:
    weight.set_value(weight[...].astype(dtype))
