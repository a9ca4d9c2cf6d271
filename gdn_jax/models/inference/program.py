"""Copies of a model with its weights as generation reads them, made once so that no token pays for it again."""

import itertools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from gdn_jax.layers import GatedDeltaNet, GatedLinearAttention, KimiDeltaAttention, RecurrentMixer
from gdn_jax.layers.block_weights import BlockSwiGLU
from gdn_jax.layers.blocks import RMSNorm, SwiGLU, set_product
from gdn_jax.models.attention import Attention
from gdn_jax.models.block import ReorderedBlock
from gdn_jax.models.decoder import LanguageModel
from gdn_jax.models.experts import BlockExperts, Experts
from gdn_jax.models.inference.attention import AttentionRows, WindowRows
from gdn_jax.models.inference.dense import BlockDenseRow, DenseRow
from gdn_jax.models.inference.experts import ExpertRow
from gdn_jax.models.inference.latent import LatentRows
from gdn_jax.models.inference.part import Call, Reader
from gdn_jax.models.inference.recurrent import ChannelRows, HeadRows, RecurrentRows
from gdn_jax.models.latent import LatentAttention
from gdn_jax.models.lora import merge_lora
from gdn_jax.models.window import WindowAttention
from gdn_jax.parallel.head_shards import splits_heads
from gdn_jax.parts.kernels import SMALL, usable
from gdn_jax.parts.products import PLAIN


def for_inference(model: LanguageModel) -> LanguageModel:
    """A copy whose products find their weights in the compute dtype, as they would round them at every call.

    Norms find their factors in float32, in which they read them: a compiler would widen 16-bit weights, and add 1 to
    zero-centred ones, for every token. Weights that are kept in 8 bits stay as they are. The copy gives the model's
    logits, bit for bit, unless the model multiplies in 8 bits: the copy never does. Low-rank changes are merged.
    Where a tied output projection would be rounded, the copy has one of its own; the embedding stays as it is, since
    the residual stream begins with it. What needs no conversion is shared with the model. The copy is neither for
    training nor for saving.

    Args:
      model: the model; may be traced.
    """
    model = nnx.clone(model)
    merge_lora(model)
    set_product(model, PLAIN)
    dtype = jnp.dtype(model.config.dtype)
    for _, part in nnx.iter_modules(model):
        if type(part) is nnx.Linear:
            _convert(part.kernel, dtype)
        elif isinstance(part, Experts):
            router = part.router if part.router_bias is None else None  # else it stays float32
            for weight in (router, part.gate_up, part.down, part.shared_gate):
                if isinstance(weight, nnx.Variable):
                    _convert(weight, dtype)
        elif isinstance(part, RMSNorm):
            part.weight.set_value(part.scale(jnp.float32))
            part.zero_centred = False
    if model.head_weight().dtype != dtype:
        model.head = nnx.data(nnx.Param(model.head_weight().astype(dtype)))
    return model


def _as_it_is(part: Any, call: Call) -> Any:
    """Experts that keep their weights in 8 bits, which no kernel of single tokens reads: XLA multiplies by them."""
    del call
    return part


ROWS: dict[type, Callable[[Any, Call], Any]] = {
    RecurrentMixer: RecurrentRows.of,
    GatedDeltaNet: HeadRows.of,
    KimiDeltaAttention: ChannelRows.of,
    GatedLinearAttention: RecurrentRows.of,
    Attention: AttentionRows.of,
    WindowAttention: WindowRows.of,
    LatentAttention: LatentRows.of,
    SwiGLU: DenseRow.of,
    Experts: ExpertRow.of,
    BlockSwiGLU: BlockDenseRow.of,
    BlockExperts: _as_it_is,
}
"""A class of a block's parts -> what prepares one for calls of single tokens, in place or as another part."""

ON_MESH: dict[type, Callable[[Any, Call], Any]] = {GatedDeltaNet: HeadRows.on_mesh}
"""The same on a mesh that splits heads."""


FEW_ROWS = 64
"""Rows of which XLA makes products with narrow results in parts, at most."""


def for_decoding(
    model: LanguageModel, rows: int, *, in_parts: bool = False, head_rows: int | None = None
) -> LanguageModel:
    """A copy for single tokens, whose projections of one input are one product of a transposed weight.

    Where a GPU reads few rows, its time is the number of its kernels and the bytes of the weights. The copy has
    weights of its own, and its logits are those of the model but for rounding. On a mesh that splits heads, weights
    stay as they are. Where our kernels do not run, it is the model itself.

    Args:
      model: of `for_inference`; may be traced.
      rows: that have a token in every call.
      in_parts: whether mixers and MLPs of few rows may leave their results in parts, which the norms after them add
        up: for callers that hand a mixer's results on as they are.
      head_rows: rows that have a token in every call of the head for multi-token prediction; None: it is not called.
    """
    if not usable(model.config.implementation, SMALL):
        return model
    model = nnx.clone(model)
    for block in model.blocks:
        _prepare(block, rows, in_parts)
    if rows == 1:
        _look_ahead(model)
    if head_rows is not None:
        _prepare(model.mtp.block, head_rows)
    return model


def _prepare(block: Any, rows: int, in_parts: bool = False) -> None:
    """Prepares a block for calls of single tokens, in place."""
    has_stream = not isinstance(block, ReorderedBlock)
    call = Call(rows, has_stream, in_parts and has_stream and 1 < rows <= FEW_ROWS)
    table = ON_MESH if splits_heads() else ROWS
    block.mixer, block.mlp = (_prepared(part, call, table) for part in (block.mixer, block.mlp))


def _prepared(part: Any, call: Call, table: dict[type, Callable[[Any, Call], Any]]) -> Any:
    """A part of a block for calls of single tokens; one of an unknown class stays as it is."""
    prepare = next((table[kind] for kind in type(part).__mro__ if kind in table), None)
    return part if prepare is None else prepare(part, call)


AHEAD = 6
"""Weights of other layers that a layer knows as the next ones. Kernels take the first bytes of them."""


def _look_ahead(model: LanguageModel) -> None:
    """Lets the parts of all blocks know what a token reads next."""
    parts = [part for block in model.blocks for part in (block.mixer, block.mlp) if isinstance(part, Reader)]
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
