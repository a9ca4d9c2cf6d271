"""Writing a `LanguageModel` as a checkpoint that transformers opens."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from gdn_jax.commands.files import replacing, write_text
from gdn_jax.hf import float8, kept
from gdn_jax.hf.checkpoint import CONFIG, INDEX, WEIGHTS, new_folder, stays_inside, writing
from gdn_jax.hf.families import FAMILIES, Described, describe
from gdn_jax.hf.family import Family, Names
from gdn_jax.hf.float8 import Scaled
from gdn_jax.hf.load import name_of, tensors_of, weights_of
from gdn_jax.hf.origin import Origin
from gdn_jax.hf.storage import InBlocks, Part, Plain
from gdn_jax.hf.tensors import Tensor, write_file
from gdn_jax.models.config import ModelConfig
from gdn_jax.models.decoder import LanguageModel
from gdn_jax.models.lora import LoRALinear

COMPANIONS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json"),
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
)
"""Files of a checkpoint that are copied from the one that was loaded."""

ARITHMETIC = {"dtype", "residual_dtype", "weight_dtype", "implementation", "remat"}
ARITHMETIC |= {"scan_layers", "matmul", "weights"}
"""Fields of a ModelConfig that no checkpoint holds."""


def save_hf(
    model: LanguageModel,
    path: str | Path,
    *,
    weight_dtype: str | None = None,
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Writes a checkpoint: config.json and safetensors files.

    A loaded model is written in the layout that was read, with the tensors that it does not use and the tokenizer
    copied from there. A model of our own is written as the family that has such models: Qwen3.5, Qwen3-Next,
    OLMo-Hybrid, Lara, Kimi Linear or Ling 3.0. Tensors are written one by one, under a temporary name until all are
    there.

    Args:
      model: a language model with attention layers.
      path: folder, which must not exist.
      weight_dtype: of the tensors; None: as the model is, float32 or bfloat16, or "float8" where it keeps weights in
        8 bits; what it keeps is written as it is. With "float8" Qwen's models are written as their FP8 checkpoints
        are published: matrices of mixers, SwiGLUs and experts, these one by one, in E4M3 with a bfloat16 scale for
        each block of 128 x 128, the rest in the model's dtype. A scale brings its block's largest number to 448, and
        numbers are rounded to nearest.
      max_file_bytes: of one file; beyond that there are several and an index.

    Raises:
      ValueError: the folder exists, an option is wrong, the model is no longer the one that was loaded, a weight that
        is to be written in 8 bits is not finite, or the model was read through a link out of its folder and out of
        the hub's cache, to a file that the user may not mean to publish.
      NotImplementedError: no family has such a model, with the reason for each, or the family has no FP8 checkpoints.
    """
    folder = Path(path)
    temporary = new_folder(folder)
    if not isinstance(max_file_bytes, int) or max_file_bytes < 1:
        raise ValueError(f"max_file_bytes: expected a whole number, 1 or more, got {max_file_bytes!r}")
    if weight_dtype not in (None, model.config.weight_dtype, "float8"):
        raise ValueError(
            f"weight_dtype: expected {model.config.weight_dtype!r}, as the model is, or 'float8', got "
            f"{weight_dtype!r}"
        )
    origin = model.origin
    described = None if origin is None else describe(origin.config, CONFIG)
    if origin is None or described is None:
        family, fields, names = own_family(model.config)
    else:
        family, fields, names = described.family, _as_read(model.config, origin, described), origin.names
    storage: Plain = Plain(np.dtype(model.config.weight_dtype))
    if weight_dtype == "float8" or (weight_dtype is None and model.config.weights == "float8"):
        storage, names = _in_blocks(storage, family, described), Names(names.prefix)  # experts one by one
    plan = [*weights_of(family, model.config, names)]
    if model.mtp is not None and family.mtp is not None:
        plan += family.mtp(model.config, names)
        fields |= family.mtp_fields if described is None else {}
    state = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    params: dict[str, Any] = {name_of(key): array for key, array in jax.tree.leaves_with_path(state)}
    params = kept.named(params, storage.dtype)
    if extra := params.keys() - {name for weight in plan for name in weight.params}:
        changed = any(isinstance(module, LoRALinear) for _, module in nnx.iter_graph(model))
        raise ValueError(
            f"model: expected only the parameters of its config, got also {sorted(extra)[0]}"
            + ("; call merge_lora first" if changed else "")
        )
    parts = [part for weight in plan for part in storage.parts(weight, params)]
    skipped = [] if origin is None or described is None else _skipped(origin, described, model.mtp is None)
    parts += [part for tensor in skipped for part in storage.copied(tensor)]
    fields |= storage.fields([entry for part in parts for entry in part.entries])
    companions = [] if origin is None else _companions(origin)
    with writing(temporary, folder):
        _write(temporary, parts, max_file_bytes)
        for file in companions:
            shutil.copyfile(file, temporary / file.name)
        write_text(temporary / CONFIG, json.dumps(fields, indent=2) + "\n")


def _in_blocks(storage: Plain, family: Family, described: Described | None) -> InBlocks:
    """FP8 blocks of the size that a checkpoint had, or published ones have."""
    if family.eight_bits is None:
        raise NotImplementedError(
            f"weight_dtype: no FP8 checkpoints of {family.architecture} are known, only of Qwen's hybrid models"
        )
    known = None if described is None else described.quantization
    return InBlocks(storage.dtype, float8.BLOCK if known is None else known.block, family.eight_bits)


def _as_read(config: ModelConfig, origin: Origin, described: Described) -> dict[str, Any]:
    """The config.json of a loaded model, without its quantization."""
    theirs = described.family.config(described.fields)
    for field in dataclasses.fields(ModelConfig):
        name = field.name
        if name not in {*ARITHMETIC, "tie_embeddings"} and getattr(theirs, name) != getattr(config, name):
            raise ValueError(
                f"model: expected {name} = {getattr(theirs, name)!r} as in the checkpoint that it was loaded from, "
                f"got {getattr(config, name)!r}"
            )
    fields = json.loads(json.dumps(origin.config))  # a copy
    for part in (fields, *([fields["text_config"]] if described.nested else [])):
        if part is fields or part.keys() & {"dtype", "torch_dtype"}:
            part.pop("torch_dtype", None)
            part["dtype"] = config.weight_dtype
    fields.pop("quantization_config", None)
    return fields


def own_family(config: ModelConfig) -> tuple[Family, dict[str, Any], Names]:
    """Family, config.json and names of a model that was not loaded.

    Raises:
      NotImplementedError: no family has such a model.
    """
    reasons = []
    for family in FAMILIES:
        try:
            fields = family.fields(config)
        except NotImplementedError as error:
            reasons.append(f"{family.architecture}: {error}")
            continue
        head = {"architectures": [family.architecture], "model_type": family.model_types[0]}
        return family, head | {"dtype": config.weight_dtype} | fields, Names()
    raise NotImplementedError(
        "model: no family has such a model; a hybrid, as `gdn train --model hybrid` makes it, can be written. "
        + ". ".join(reasons)
    )


def _companions(origin: Origin) -> list[Path]:
    """Files that are copied from the checkpoint that was loaded.

    Raises:
      ValueError: one of them, or of the files that the model was read from, is a link to somewhere else, whose
        content the user may not mean to publish.
    """
    if origin.outside:
        file = origin.outside[0]
        raise ValueError(
            f"model: expected {file}, whose content is written, in the folder that it was loaded from or in the "
            f"hub's cache, got a link to {file.resolve()}; load a folder that holds the file itself"
        )
    files = [origin.path / name for name in COMPANIONS if (origin.path / name).is_file()]
    for file in files:
        if not stays_inside(file, origin.path):
            raise ValueError(
                f"model: expected {file}, which is copied, in the folder that it was loaded from or in the hub's "
                f"cache, got a link to {file.resolve()}"
            )
    return files


def _skipped(origin: Origin, described: Described, headless: bool) -> list[Tensor | Scaled]:
    """The tensors that a loaded model does not use, where they lie; its head's, too, if it has lost the head."""
    names = origin.skipped + (origin.head if headless else ())
    if not names:
        return []
    try:
        tensors = tensors_of(origin.path, described)
        found = [tensors[name] for name in names]
        for file in {part.file for tensor in found for part in tensor.stored}:
            if not stays_inside(file, origin.path):
                raise ValueError(f"{file} is a link to {file.resolve()}")
        return found
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(
            f"model: expected {origin.path}, from which it was loaded, with the {len(names)} tensors that "
            f"are copied, got: {error}"
        ) from None


def _write(folder: Path, parts: list[Part], max_file_bytes: int) -> None:
    """Writes the tensors to one file, or to several and an index.

    In a file tensors of wide numbers are first: transformers opens none at a place that its dtype's width does not
    divide.
    """
    files: list[list[Part]] = [[]]
    size = 0
    for part in parts:
        more = sum(entry.size for entry in part.entries)
        if files[-1] and size + more > max_file_bytes:
            files.append([])
            size = 0
        files[-1].append(part)
        size += more
    places: dict[str, str] = {}
    total = 0
    for number, content in enumerate(files, 1):
        name = WEIGHTS if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        content.sort(key=lambda part: -part.entries[0].dtype.itemsize)
        entries = [entry for part in content for entry in part.entries]
        with replacing(folder / name) as stream:
            write_file(stream, entries, (array for part in content for array in part.arrays()))
        places |= {entry.name: name for entry in entries}
        total += sum(entry.size for entry in entries)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
