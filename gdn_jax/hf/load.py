"""Loading a Hugging Face checkpoint into a `LanguageModel`."""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from gdn_jax.hf import adapter as lora_files
from gdn_jax.hf import kept
from gdn_jax.hf.checkpoint import CONFIG, read_json, read_tensors, stays_inside
from gdn_jax.hf.families import Described, describe
from gdn_jax.hf.family import Family, Names
from gdn_jax.hf.float8 import Scaled
from gdn_jax.hf.origin import Origin
from gdn_jax.hf.tensors import Tensor
from gdn_jax.hf.weights import Weight, same
from gdn_jax.layers.block_weights import BlockWeight
from gdn_jax.models.config import ModelConfig
from gdn_jax.models.decoder import LanguageModel
from gdn_jax.models.lora import set_lora
from gdn_jax.models.mtp import MTPHead

HEAD = "lm_head.weight"


def tensors_of(folder: Path, described: Described) -> dict[str, Tensor | Scaled]:
    """The tensors of a checkpoint by name, matrices in 8 bits with their scales; reads headers only.

    Raises:
      ValueError, NotImplementedError: see `read_tensors` and `Float8.joined`.
    """
    tensors = read_tensors(folder)
    if described.quantization is None:
        return {**tensors}
    return described.quantization.joined(folder, tensors)


def head_of(described: Described, config: ModelConfig, tensors: dict[str, Any], names: Names) -> list[Weight]:
    """The weights of the head for the token after the next; none where the checkpoint lacks one of its tensors."""
    if described.family.mtp is None or "attention" not in config.types:
        return []
    weights = [*described.family.mtp(config, names)]
    return weights if all(name in tensors for weight in weights for name in weight.tensors) else []


def skipped_of(
    described: Described, tensors: dict[str, Any], names: Names, head: Iterable[Weight] = ()
) -> tuple[str, ...]:
    """Names of the tensors of parts that our models do not have: of images, and of the prediction of several tokens.

    The latter may be layers after the decoder's, as many as `num_nextn_predict_layers`. The `head` is one of
    our parts.
    """
    read = {name for weight in head for name in weight.tensors}
    more = described.fields.values.get("num_nextn_predict_layers")
    first, more = described.fields.size("num_hidden_layers"), more if isinstance(more, int) else 0
    of_layer = re.compile(re.escape(names.prefix) + r"layers\.(0|[1-9][0-9]{0,9})\.")
    of_part = re.compile(rf"(model\.)?({'|'.join(described.images)}|mtp)\.")

    def comes_after(name: str) -> bool:
        layer = of_layer.match(name)
        return layer is not None and first <= int(layer[1]) < first + more

    found = (name for name in tensors if of_part.match(name) or comes_after(name))
    return tuple(name for name in found if name not in read)


def load_hf(
    path: str | Path,
    *,
    dtype: DTypeLike | None = None,
    weight_dtype: DTypeLike | None = None,
    weights: str | None = None,
    mesh: Mesh | None = None,
    implementation: str | None = None,
    remat: str = "none",
    adapter: str | Path | None = None,
) -> LanguageModel:
    """Loads a checkpoint of the families Qwen3-Next, Qwen3.5, OLMo-Hybrid, Lara, Kimi Linear or Ling 3.0, also the
    Qwen3.5 inside a MiniCPM-V 4.6, 4.7 or MiniCPM-OCR.

    The call reads one tensor at a time and puts it on its devices before the next: the host needs memory for the
    model and its largest tensor. A vision-language model is loaded as its language model; `model.origin.skipped`
    lists the tensors that are left out.

    If a checkpoint of Qwen's or of Ling 3.0 has a multi-token-prediction head, it is loaded as `model.mtp`, and
    `model.mtp_logits(tokens)` calls it. A loss on the model's own logits does not train it: set `model.mtp = None`
    before you train all parameters.

    Args:
      path: folder with config.json and model.safetensors, or with files that an index lists.
      dtype: dtype of weights and products, float32 or bfloat16; None: the checkpoint's. A_log, dt_bias, norms, gates,
        states and logits are always float32.
      weight_dtype: dtype of the weights, if products shall have another one. The weights of an FP8 checkpoint, in
        E4M3 with a scale for each block, are dequantised to it: float32(values) * float32(scale), rounded once.
      weights: "float8": keeps matrices in 8 bits, as FP8 checkpoints of Qwen's models store them. An FP8 checkpoint
        keeps its codes and scales; other weights are rounded in blocks of 128 x 128, as `save_hf` does. The model
        needs about half the memory and cannot be trained. None: all weights are in `weight_dtype`.
      mesh: devices for the weights: a matrix is split along its longest axis that the number of devices divides, and
        everything else is replicated. None: JAX's default device.
      implementation: of the rule, see `gated_delta_rule`.
      remat: how much of a block the backward pass recomputes, see `ModelConfig`.
      adapter: folder with adapter_config.json and adapter_model.safetensors, a LoRA adapter that PEFT wrote for this
        checkpoint, as a language model or inside a vision-language model. The projections get it as by `add_lora`, in
        float32: you can train it, and `merge_lora` makes an ordinary model.

    Returns:
      The model, called as any other: `model(tokens)`, `generate(model, tokens, num_tokens)`.

    Raises:
      ValueError: the folder holds no whole checkpoint: a file is missing, damaged or cut off, a tensor is missing,
        unknown or of a wrong shape, a scale is no finite number. Names tensor and file.
      NotImplementedError: the checkpoint is of another family, quantized in another way than by FP8 blocks, or has a
        variant that is not supported; the adapter changes more than projections, or in another way (DoRA, biases).
    """
    folder = Path(path)
    if weights not in (None, "float8"):
        raise ValueError(f"weights: expected None or 'float8', got {weights!r}")
    if weights is not None and adapter is not None:
        raise ValueError(
            f"adapter: expected None with weights = {weights!r}, which are not trained, got {adapter}"
        )
    found = read_json(folder / CONFIG)
    described = describe(found, str(folder / CONFIG))
    if weights is not None and described.family.eight_bits is None:
        raise NotImplementedError(
            f"weights: no FP8 checkpoints of {described.family.architecture} are known, only of Qwen's hybrid models"
        )
    tensors = tensors_of(folder, described)
    names = names_of(described, tensors)
    config = config_of(described, dtype, tensors, names)
    options = {"implementation": implementation, "remat": remat, "weights": weights or config.weights}
    config = dataclasses.replace(config, weight_dtype=weight_dtype or config.weight_dtype, **options)
    head = head_of(described, config, tensors, names)
    skipped = skipped_of(described, tensors, names, head)
    plan = itertools.chain(weights_of(described.family, config, names), head)
    plan = check_tensors(folder, plan, tensors, skipped)
    changes = {} if adapter is None else lora_files.read_changes(Path(adapter), plan, names)
    abstract = nnx.eval_shape(lambda: _made(config, bool(head)))
    graphdef, state = nnx.split(abstract)
    shapes = {name_of(key): leaf for key, leaf in jax.tree.leaves_with_path(nnx.to_pure_dict(state))}
    placed = dict(_place(plan, tensors, shapes, mesh))
    values = jax.tree.map_with_path(lambda key, _: placed.pop(name_of(key)), nnx.to_pure_dict(state))
    assert not placed, f"parameters that the model does not have: {[*placed]}"
    nnx.replace_by_pure_dict(state, values)
    model = nnx.merge(graphdef, state)
    if described.quantization is not None:
        for _, part in nnx.iter_modules(model):
            if isinstance(part, BlockWeight):
                part.rows = described.quantization.block[0]
    if changes:
        set_lora(model, lora_files.placed(changes, partial(_put, mesh=mesh)))
    read = dict.fromkeys(
        (folder / CONFIG, *(part.file for tensor in tensors.values() for part in tensor.stored))
    )
    outside = tuple(file for file in read if not stays_inside(file, folder))
    if adapter is not None:
        read = (Path(adapter) / name for name in (lora_files.CONFIG, lora_files.WEIGHTS))
        outside += tuple(file for file in read if not stays_inside(file, Path(adapter)))
    names_of_head = tuple(name for weight in head for name in weight.tensors)
    model.origin = Origin(folder.resolve(), found, names, skipped, outside, names_of_head)
    return model


def _made(config: ModelConfig, head: bool) -> LanguageModel:
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    if head:
        model.mtp = nnx.data(MTPHead(config, rngs=nnx.Rngs(0)))
    return model


def names_of(described: Described, tensors: dict[str, Any]) -> Names:
    """Names of the tensors of a checkpoint."""
    inner = "model.language_model."
    nested = any(name.startswith(inner) for name in tensors)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return Names(inner if nested else "model.", shapes)


def config_of(
    described: Described, dtype: DTypeLike | None, tensors: dict[str, Tensor | Scaled], names: Names
) -> ModelConfig:
    """The configuration of a checkpoint's model."""
    where = described.fields.where
    if dtype is None:
        dtype = described.fields.dtype()
        if dtype == "float16":
            raise NotImplementedError(
                f"{where}: weights in float16 are computed in another dtype: say dtype='float32' or 'bfloat16'"
            )
    # What is counted is what takes bytes: a tensor with a zero in its shape takes none, however many it tells of.
    bytes_ = [part.end - part.begin for tensor in tensors.values() for part in tensor.stored]
    most = sum(size > 0 for size in bytes_)
    if (layers := described.fields.size("num_hidden_layers")) > most:
        raise ValueError(
            f"{where}: expected at most {most} num_hidden_layers, as there are tensors that hold numbers, got "
            f"{layers}"
        )
    try:
        config = described.family.config(described.fields)
        config = dataclasses.replace(config, dtype=dtype, weight_dtype=dtype)
    except ValueError as error:
        raise ValueError(str(error) if where in str(error) else f"{where}: {error}") from None
    size = sum(bytes_)
    if config.experts is not None and (experts := config.experts.num_experts) > size:
        raise ValueError(
            f"{where}: expected at most {size} num_experts, as there are bytes of tensors, got {experts}"
        )
    if config.tie_embeddings and _differ(
        tensors.get(HEAD), tensors.get(f"{names.prefix}{described.family.embedding}.weight")
    ):
        return dataclasses.replace(config, tie_embeddings=False)
    return config


def _differ(head: Tensor | Scaled | None, embedding: Tensor | Scaled | None) -> bool:
    """Tells whether a checkpoint with a "tied" embedding has a head of its own, which transformers then uses."""
    if head is None or embedding is None:
        return False
    return head.shape != embedding.shape or not np.array_equal(head.read(), embedding.read())


def weights_of(family: Family, config: ModelConfig, names: Names) -> Iterator[Weight]:
    """All weights of a model, each made when it is asked for: a config.json may tell of more than there are."""
    shape = (config.vocab_size, config.hidden_size)
    yield same(f"{names.prefix}{family.embedding}.weight", "embedding", *shape)
    yield from family.weights(config, names)
    yield same(f"{names.prefix}norm.weight", "norm.weight", config.hidden_size)
    if not config.tie_embeddings:
        yield same(HEAD, "head", *shape)


def name_of(key: tuple[Any, ...]) -> str:
    """A parameter's name, as in "blocks.0.mixer.q_proj.kernel"."""
    return ".".join(str(getattr(part, "key", part)) for part in key)


def check_tensors(
    folder: Path, plan: Iterable[Weight], tensors: dict[str, Tensor | Scaled], skipped: tuple[str, ...]
) -> list[Weight]:
    """The whole plan, of which no more is made than there are tensors.

    Raises:
      ValueError: the tensors of a checkpoint are not those of the plan, each of its shape.
    """
    checked, wanted = [], set()
    for weight in plan:
        for name, shape in weight.tensors.items():
            if name not in tensors:
                raise ValueError(f"{folder}: expected tensor {name} of shape {shape}, got none in any file")
            if tensors[name].shape != shape:
                raise ValueError(
                    f"{tensors[name].file}: expected tensor {name} of shape {shape}, got {tensors[name].shape}"
                )
            wanted.add(name)
        checked.append(weight)
    known = {*wanted, *skipped, HEAD}  # a head that is not in the plan is equal to the embedding
    for name, tensor in tensors.items():
        if name not in known:
            raise ValueError(
                f"{tensor.file}: expected no tensor {name[:200]}: a model of this config.json has none"
            )
    return checked


def _place(
    plan: list[Weight], tensors: dict[str, Tensor | Scaled], shapes: dict[str, Any], mesh: Mesh | None
) -> Iterator[tuple[str, jax.Array]]:
    """The parameters by name, on their devices."""
    for weight in plan:
        if weight.params[0] + kept.CODES in shapes:
            for name, array in kept.read(weight, tensors):
                yield name, _placed(array, shapes[name], name, mesh)
            continue
        # Rounded before they are laid out: several experts in one array take its memory once, in this dtype.
        dtype = shapes[weight.params[0]].dtype
        arrays = weight.read(tensors[name].read().astype(dtype, copy=False) for name in weight.tensors)
        for name, array in zip(weight.params, arrays, strict=True):
            yield name, _placed(array, shapes[name], name, mesh)


def _placed(array: np.ndarray, like: Any, name: str, mesh: Mesh | None) -> jax.Array:
    """A parameter on its devices. It is waited for, or arrays that wait for their transfer would pile up."""
    assert (array.shape, array.dtype) == (like.shape, like.dtype), (name, array.shape, array.dtype)
    return _put(np.ascontiguousarray(array), mesh).block_until_ready()


def _put(array: np.ndarray, mesh: Mesh | None) -> jax.Array:
    return jax.device_put(array, None if mesh is None else sharding_of(array.shape, mesh))


def sharding_of(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Returns where a parameter lies: cut along its longest axis that the devices divide, or whole on each.

    The axes of the mesh are left to the compiler (`AxisType.Auto`).
    """
    auto = (jax.sharding.AxisType.Auto,) * len(mesh.axis_names)
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=auto)
    divided = [axis for axis, size in enumerate(shape) if size % mesh.size == 0]
    if len(shape) < 2 or not divided:
        return NamedSharding(mesh, PartitionSpec())
    longest = max(divided, key=lambda axis: shape[axis])
    return NamedSharding(mesh, PartitionSpec(*(None,) * longest, mesh.axis_names))
