"""Low-rank changes of projections (LoRA) in the files of PEFT.

    W + scale B A,   scale = alpha / r, or alpha / sqrt(r) with use_rslora

`adapter_model.safetensors` holds base_model.model.MODULE.lora_A.weight [r, inputs] and .lora_B.weight [outputs, r],
where MODULE.weight [outputs, inputs] is a tensor of the checkpoint. `adapter_config.json` holds r and alpha, of all
modules or by patterns of their names. The file says which modules are changed, whatever `target_modules` is. Source:
`tuners/lora/layer.py` (`get_delta_weight`) and `utils/other.py` (`get_pattern_key`) of peft.

One matrix of a checkpoint may be several of our projections, which then have the same A and parts of the rows of B.
"""

import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gdn_jax.commands.errors import brief
from gdn_jax.hf.checkpoint import read_json
from gdn_jax.hf.family import Names
from gdn_jax.hf.fields import Fields
from gdn_jax.hf.tensors import Tensor, read_header
from gdn_jax.hf.weights import Weight
from gdn_jax.models.lora import Change

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Beginning of all names."""

_FACTOR = re.compile(re.escape(PREFIX) + r"(.+)\.lora_([AB])\.weight")
_DECODERS = ("model.language_model.", "model.")
"""Where a decoder lies: in a model for images, and alone. An adapter of one is applied to the other, too."""

_SIMPLE = re.compile(r"[\w.\\^$|*+\[\]-]*")
"""Patterns without groups, which a name cannot keep busy for long."""
_NEUTRAL = frozenset(
    {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "target_modules", "exclude_modules"}
    | {
        "layers_to_transform",
        "layers_pattern",
        "base_model_name_or_path",
        "revision",
        "task_type",
        "auto_mapping",
    }
    | {
        "inference_mode",
        "lora_dropout",
        "peft_version",
        "qalora_group_size",
        "megatron_core",
        "ensure_weight_tying",
    }
)
"""Fields that are read, and those that change nothing of a trained adapter."""
_OFF = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, "gaussian", "orthogonal")}
"""Values of other fields that leave the formula as it is, as a missing, empty or false one does."""
_REASONS = {
    "peft_type": "only 'LORA' is supported",
    "use_dora": "DoRA's norms of columns are not supported",
    "bias": "trained biases are not supported",
    "lora_bias": "a bias of the change is not supported",
    "modules_to_save": "whole modules next to the changes are not supported",
    "fan_in_fan_out": "weights [inputs, outputs] are not supported",
    "target_parameters": "changes of parameters that are no projections are not supported",
    "trainable_token_indices": "trained embeddings are not supported",
    "layer_replication": "layers that come more than once are not supported",
    "init_lora_weights": "it changes the weights of the checkpoint, too",
    "alora_invocation_tokens": "a change from some token on is not supported",
}


def read_changes(folder: Path, plan: Iterable[Weight], names: Names) -> dict[str, Change]:
    """The changes of an adapter by the places of projections, see `set_lora`; factors are arrays of NumPy in float32.

    Args:
      folder: with adapter_config.json and adapter_model.safetensors.
      plan: the weights of the model.
      names: of the model's checkpoint.

    Raises:
      ValueError: files are missing or damaged, or a factor is, or has another shape; names file and tensor.
      NotImplementedError: the adapter does something else than the formula above, or to other modules.
    """
    config = Fields(read_json(folder / CONFIG), {"use_rslora": False}, str(folder / CONFIG))
    _check(config)
    ranks = _Values(config, "rank_pattern", lambda fields: fields.size("r"))
    alphas = _Values(config, "alpha_pattern", lambda fields: fields.number("lora_alpha"))
    root = config.get("use_rslora", bool)
    matrices = {
        _in_decoder(next(iter(weight.tensors)).removesuffix(".weight"), (names.prefix,)): weight
        for weight in plan
        if len(weight.tensors) == 1 and all(param.endswith(".kernel") for param in weight.params)
    }
    changes: dict[str, Change] = {}
    for module, factors in _factors(folder).items():
        weight = matrices.get(_in_decoder(module, _DECODERS))
        if weight is None:
            raise NotImplementedError(
                f"{folder / WEIGHTS}: module {module[:200]}: only projections of mixers, SwiGLUs and shared experts "
                f"of the language model have low-rank changes"
            )
        rank = ranks.of(module)
        a, b = _read(factors, next(iter(weight.tensors.values())), rank)
        scale = alphas.of(module) / (math.sqrt(rank) if root else rank)
        for param, part in zip(weight.params, weight.read(iter([b])), strict=True):
            place = param.removesuffix(".kernel")
            if place in changes:
                raise ValueError(
                    f"{folder / WEIGHTS}: expected one change of {module}, got two by different names"
                )
            changes[place] = Change(a.T, part, scale)
    if not changes:
        raise ValueError(f"{folder / WEIGHTS}: expected low-rank changes, got none")
    return changes


def placed(changes: dict[str, Change], put: Callable[[np.ndarray], jax.Array]) -> dict[str, Change]:
    """The changes with factors on devices, each an array of its own."""
    return {
        place: Change(put(np.array(a)), put(np.array(b)), scale) for place, (a, b, scale) in changes.items()
    }


def _check(config: Fields) -> None:
    """Raises NotImplementedError for a field that changes the formula, or that is not known."""
    for name, value in ({"peft_type": "none"} | config.values).items():
        if name not in _NEUTRAL and value and value not in _OFF.get(name, ()):
            reason = _REASONS.get(name, "what it changes is not known")
            raise NotImplementedError(f"{config.where}: {name} = {brief(value)}: {reason}")


class _Values:
    """A number of every module: the config's, or the first pattern's that matches the end of its name."""

    def __init__(self, config: Fields, patterns: str, value: Callable[[Fields], Any]):
        self._default = value(config)
        found = config.values.get(patterns) or {}
        if not isinstance(found, dict):
            raise ValueError(f"{config.where}: expected an object {patterns}, got {brief(found)}")
        self._patterns = []
        for key, number in found.items():
            where = f"{config.where}: {patterns}: {key[:200]}"
            if not _SIMPLE.fullmatch(key) or len(re.findall(r"[*+]", key)) > 2:
                raise NotImplementedError(f"{where}: only names and simple patterns of them are supported")
            try:
                expression = re.compile(rf"(.*\.)?({key})$")
            except re.error as error:
                raise ValueError(f"{where}: expected a pattern of names, got: {error}") from None
            self._patterns.append(
                (expression, value(Fields(dict.fromkeys(("r", "lora_alpha"), number), {}, where)))
            )

    def of(self, module: str) -> Any:
        """The number of a module."""
        return next((value for pattern, value in self._patterns if pattern.match(module)), self._default)


def _in_decoder(name: str, prefixes: tuple[str, ...]) -> str:
    """A module's name in its decoder; what lies elsewhere keeps its own."""
    return next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), name)


def _factors(folder: Path) -> dict[str, dict[str, Tensor]]:
    """The tensors of the adapter by module and letter."""
    file = folder / WEIGHTS
    if not file.exists() and any(folder.glob("*.bin")):
        raise NotImplementedError(f"{folder}: pickled weights are not supported, only {WEIGHTS}")
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in read_header(file).items():
        factor = _FACTOR.fullmatch(name)
        if factor is None:
            raise NotImplementedError(
                f"{file}: tensor {name[:200]}: only {PREFIX}MODULE.lora_A.weight and .lora_B.weight are supported"
            )
        found.setdefault(factor[1], {})[factor[2]] = tensor
    return found


def _read(factors: dict[str, Tensor], shape: tuple[int, ...], rank: int) -> list[np.ndarray]:
    """A [rank, inputs] and B [outputs, rank] of a matrix [outputs, inputs], in float32."""
    (some, *_), (outputs, inputs) = factors.values(), shape
    arrays = []
    for letter, wanted in (("A", (rank, inputs)), ("B", (outputs, rank))):
        tensor = factors.get(letter)
        if tensor is None:
            raise ValueError(f"{some.file}: expected both factors of a change, got tensor {some.name} alone")
        if tensor.shape != wanted:
            raise ValueError(
                f"{tensor.file}: expected tensor {tensor.name} of shape {wanted}, got {tensor.shape}"
            )
        arrays.append(tensor.read().astype(np.float32))
    return arrays
