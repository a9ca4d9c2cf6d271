"""Writing the low-rank changes of a `LanguageModel` as an adapter that PEFT opens."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gdn_jax.commands.files import replacing, write_text
from gdn_jax.hf.adapter import CONFIG, PREFIX, WEIGHTS
from gdn_jax.hf.checkpoint import new_folder, writing
from gdn_jax.hf.families import describe
from gdn_jax.hf.load import weights_of
from gdn_jax.hf.origin import Origin
from gdn_jax.hf.save import own_family
from gdn_jax.hf.tensors import Entry, write_file
from gdn_jax.hf.weights import Weight
from gdn_jax.models.decoder import LanguageModel
from gdn_jax.models.lora import Change, lora_changes


def save_adapter(model: LanguageModel, path: str | Path) -> None:
    """Writes the low-rank changes of a model (LoRA): adapter_config.json and adapter_model.safetensors.

    `load_hf(checkpoint, adapter=path)` reads them, and so does PEFT, onto the checkpoint that the model was loaded
    from or, for a model of our own, that `save_hf` makes of it without the changes; names are those there.

    Projections of ours that are one matrix of the checkpoint, such as q_proj, k_proj and v_proj of a Qwen3.5's
    in_proj_qkv, are written as one change: with the rank of one where they have the same A, as in an adapter that was
    loaded, else with the sum of their ranks.

    Args:
      model: a language model with low-rank changes, of `add_lora` or of an adapter that was loaded.
      path: folder, which must not exist.

    Raises:
      ValueError: the folder exists, or the model has no low-rank changes.
      NotImplementedError: no family has such a model, with the reason for each.
    """
    folder = Path(path)
    temporary = new_folder(folder)
    changes = lora_changes(model)
    if not changes:
        raise ValueError("model: expected one with low-rank changes, got none; save_hf writes whole models")
    origin = model.origin
    if origin is None:
        family, _, names = own_family(model.config)
    else:
        family, names = describe(origin.config, CONFIG).family, origin.names
    entries, arrays, kinds = [], [], {}
    for weight in weights_of(family, model.config, names):
        found = [changes.pop(param.removesuffix(".kernel"), None) for param in weight.params]
        if any(change is not None for change in found):
            (tensor,) = weight.tensors
            module = tensor.removesuffix(".weight")
            a, b, scale = _joined(weight, found)
            kinds[module] = len(a), scale * len(a)
            for letter, array in (("A", a), ("B", b)):
                entries.append(Entry(f"{PREFIX}{module}.lora_{letter}.weight", array.dtype, array.shape))
                arrays.append(array)
    assert not changes, f"changes that the checkpoint has no matrix for: {[*changes]}"
    with writing(temporary, folder):
        with replacing(temporary / WEIGHTS) as stream:
            write_file(stream, entries, arrays)
        write_text(temporary / CONFIG, json.dumps(_config(kinds, origin), indent=2) + "\n")


def _joined(weight: Weight, found: Sequence[Change | None]) -> tuple[np.ndarray, np.ndarray, float]:
    """A [rank, inputs], B [outputs, rank] and the factor of a matrix whose parts have these changes."""
    scale = next(change.scale for change in found if change is not None)
    factors = [None if c is None else (np.asarray(c.a), np.asarray(c.b) * (c.scale / scale)) for c in found]
    present = [factor for factor in factors if factor is not None]
    first = present[0][0]
    if len(present) == len(factors) and all(np.array_equal(a, first) for a, _ in present):
        (b,) = weight.write([b for _, b in present])
        return first.T, b, scale
    rank, end, parts = sum(a.shape[1] for a, _ in present), 0, []
    ((outputs, _),) = weight.tensors.values()
    widths = [part.shape[1] for part in weight.read(iter([np.empty((outputs, 1), np.float32)]))]
    for factor, width in zip(factors, widths, strict=True):
        part = np.zeros((rank, width), np.float32)
        if factor is not None:
            part[end : end + len(factor[1])] = factor[1]
            end += len(factor[1])
        parts.append(part)
    (b,) = weight.write(parts)
    return np.concatenate([a for a, _ in present], 1).T, b, scale


def _config(kinds: dict[str, tuple[int, float]], origin: Origin | None) -> dict[str, Any]:
    """The adapter_config.json of modules with these ranks and alphas."""
    (rank, alpha), _ = Counter(kinds.values()).most_common(1)[0]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if origin is None else _name(origin.path),
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _number(alpha),
        "rank_pattern": {re.escape(module): r for module, (r, _) in kinds.items() if r != rank},
        "alpha_pattern": {re.escape(module): _number(a) for module, (_, a) in kinds.items() if a != alpha},
        "use_rslora": False,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": [*kinds],
    }


def _number(alpha: float) -> int | float:
    return int(alpha) if alpha == int(alpha) else alpha


def _name(path: Path) -> str:
    """The name of a checkpoint's folder, or of the hub's repository that it lies in the cache for."""
    if path.parent.name != "snapshots":
        return path.name
    return path.parents[1].name.removeprefix("models--").replace("--", "/")
