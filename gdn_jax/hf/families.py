"""The families of checkpoints, and how a config.json is read by its family."""

from typing import Any, NamedTuple

from gdn_jax.commands.errors import brief
from gdn_jax.hf import bailing_hybrid, float8, kimi_linear, lara_mini, olmo_hybrid, qwen3_5, qwen3_next
from gdn_jax.hf.family import Family
from gdn_jax.hf.fields import Fields

FAMILIES = (
    qwen3_5.DENSE,
    qwen3_5.MOE,
    qwen3_next.FAMILY,
    olmo_hybrid.FAMILY,
    lara_mini.FAMILY,
    kimi_linear.FAMILY,
    bailing_hybrid.FAMILY,
)

_GLM = (
    "sparse attention with an indexer, hyper-connections and a limit of the SwiGLU are not supported; its Kimi Delta "
    "Attention is"
)

OTHERS = {
    "qwen4_exp": "hyper-connections, n-gram embeddings and sparse attention are not supported",
    "qwen4_exp_text": "hyper-connections, n-gram embeddings and sparse attention are not supported",
    "kimi_k3": "residuals by attention, experts of a latent width and the activation situ are not supported",
    "glm5_next": _GLM,
    "glm5_next_text": _GLM,
    "jev": "the Qwen3.5 inside it has a head for decisions in the place of logits, which is not supported",
}
"""Relatives that are not supported, with the reason."""

IMAGES = ("visual",)
"""Beginnings of the names of tensors for images, after `model.`, in models of a family."""
_MINICPM = ("vision_tower", "vpm", "vit_merger", "merger")
AROUND = {"minicpmv4_6": _MINICPM, "minicpmv4_7": _MINICPM, "minicpm_ocr": _MINICPM}
"""Models for images around a decoder of a family, which the model_type of their text_config names: beginnings of the
names of their other tensors, after `model.`. Source: `modular_minicpmv4_6.py` and `modular_minicpmv4_7.py` of
transformers, and the names that vLLM maps (`minicpmv4_6.py`)."""


class Described(NamedTuple):
    """A config.json as it was read.

    Fields:
      family: of the checkpoint.
      fields: of the decoder: those of `text_config` where there is one.
      nested: whether there is one.
      quantization: of matrices in 8 bits; None for a checkpoint without them.
      images: beginnings of the names of tensors for images, after `model.`.
    """

    family: Family
    fields: Fields
    nested: bool
    quantization: float8.Float8 | None = None
    images: tuple[str, ...] = IMAGES


def describe(config: dict[str, Any], where: str) -> Described:
    """The family and the decoder's fields of a config.json.

    Args:
      config: the JSON object.
      where: what errors begin with.

    Raises:
      ValueError: it is no configuration of a model.
      NotImplementedError: the family, the way of quantization, or layers with fields of their own are not supported.
    """
    text = config.get("text_config")
    nested = isinstance(text, dict)
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ValueError(f"{where}: expected model_type of type str, got {brief(kind)}")
    named, told = kind, brief(kind)
    if kind in AROUND:
        named = text.get("model_type") if nested else None
        told += f" around a text_config of model_type {brief(named)}"
    family = next((family for family in FAMILIES if named in family.model_types), None)
    if family is None:
        known = ", ".join([*(name for family in FAMILIES for name in family.model_types), *AROUND])
        reason = OTHERS.get(kind, "only hybrid models of Gated DeltaNet are opened")
        raise NotImplementedError(f"{where}: model_type {told}: {reason}. Supported are {known}")
    quantization = float8.described(config, where)
    if nested:
        # What stands outside holds for the decoder where it does not say otherwise.
        outside = {
            name: config[name] for name in ("tie_word_embeddings", "dtype", "torch_dtype") if name in config
        }
        config = outside | {name: value for name, value in text.items() if value is not None}
    fields = Fields(config, family.defaults, f"{where}: text_config" if nested else where)
    if nested:
        fields.check_quantization()
    fields.check_layers_alike()
    return Described(family, fields, nested, quantization, AROUND.get(kind, IMAGES))
