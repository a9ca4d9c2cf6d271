"""Adapters of PEFT: what transformers computes with them, any ranks and scales, written again, refused."""

import json
import math
from pathlib import Path

import hf_checkpoints
import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors_files import write
from test_hf_float8 import params

from gdn_jax.hf import load_hf, save_adapter, save_hf
from gdn_jax.hf.tensors import read_header
from gdn_jax.models.lora import add_lora, lora_changes, merge_lora

LORA = Path(__file__).parents[1] / "data" / "lora"
ADAPTERS = {"qwen3_5_lora": "qwen3_5", "qwen3_5_lora_ranks": "qwen3_5_released"}
"""Adapters that PEFT wrote, and their checkpoints."""
BASE = "base_model.model."


@nnx.jit
def _merged(model):
    merge_lora(model)
    return nnx.state(model, nnx.Param)


def merged(model):
    """Merges the changes of a model, by one program, and returns its parameters."""
    found = nnx.to_pure_dict(_merged(model))
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(found)}


def factors(folder):
    return {name: tensor.read() for name, tensor in read_header(folder / "adapter_model.safetensors").items()}


def assert_near(got, want, atol):
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(np.float32(got[name]), np.float32(value), rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("name", ADAPTERS)
def test_logits_are_those_of_the_merged_model(name):
    """With the changes next to the weights; rows with padding on the left, too."""
    want = hf_checkpoints.expected_of(LORA / name)
    model = load_hf(LORA / ADAPTERS[name], implementation="recurrent", adapter=LORA / name)
    hf_checkpoints.assert_same_as_expected(model, want)


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTERS)
def test_greedy_continuation(name):
    tokens = hf_checkpoints.expected_of(LORA / name)["generated"]
    model = load_hf(LORA / ADAPTERS[name], implementation="recurrent", adapter=LORA / name)
    hf_checkpoints.assert_continued(model, tokens[:, :21], tokens[:, 21:])


def merged_by_numpy(base, adapter, to):
    """The checkpoint with W + scale B A in float64, by the rules of PEFT for endings of names."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = {name: tensor.read() for name, tensor in read_header(base / "model.safetensors").items()}
    found = factors(adapter)
    for name, a in found.items():
        if ".lora_A." not in name:
            continue
        module = name.removeprefix(BASE).removesuffix(".lora_A.weight")
        r, alpha = config["r"], config["lora_alpha"]
        for key, value in config["rank_pattern"].items():
            r = value if f".{module}".endswith(f".{key}") else r
        for key, value in config["alpha_pattern"].items():
            alpha = value if f".{module}".endswith(f".{key}") else alpha
        assert a.shape[0] == r
        scale = alpha / (math.sqrt(r) if config["use_rslora"] else r)
        b = found[name.replace("lora_A", "lora_B")].astype(np.float64)
        place = next(n for n in tensors if n.split("layers.")[-1] == f"{module}.weight".split("layers.")[-1])
        tensors[place] = (tensors[place] + scale * b @ a.astype(np.float64)).astype(np.float32)
    to.mkdir()
    (to / "config.json").write_bytes((base / "config.json").read_bytes())
    write(to / "model.safetensors", {name: ("F32", array) for name, array in tensors.items()})
    return to


@pytest.mark.parametrize("name", ADAPTERS)
def test_merged_weights_are_those_of_the_formula(name, tmp_path):
    base = LORA / ADAPTERS[name]
    model = load_hf(base, adapter=LORA / name)
    want = params(load_hf(merged_by_numpy(base, LORA / name, tmp_path / "merged")))
    assert_near(merged(model), want, 2e-6)  # sums of up to ten products of unit size
    save_hf(model, tmp_path / "saved")
    assert_near(params(load_hf(tmp_path / "saved")), want, 2e-6)


def drawn(modules, r, dtype=np.float32, seed=0):
    """Tensors of an adapter for modules with these shapes [outputs, inputs], and ranks."""
    rng, kind = np.random.default_rng(seed), {"float32": "F32", "bfloat16": "BF16"}[np.dtype(dtype).name]
    tensors = {}
    for module, (outputs, inputs) in modules.items():
        for letter, shape in (("A", (r(module), inputs)), ("B", (outputs, r(module)))):
            array = rng.standard_normal(shape).astype(dtype) / 4
            tensors[f"{BASE}{module}.lora_{letter}.weight"] = kind, array.astype(dtype)
    return tensors


def adapter(folder, tensors, **fields):
    """Writes an adapter with these tensors and fields of its config, None for a field that is not there."""
    folder.mkdir(parents=True)
    plain = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "use_rslora": False, "bias": "none"}
    plain |= {"rank_pattern": {}, "alpha_pattern": {}, "target_modules": "all-linear", "use_dora": False}
    config = {name: value for name, value in (plain | fields).items() if value is not None}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    write(folder / "adapter_model.safetensors", tensors)
    return folder


MOE = hf_checkpoints.FOLDER / "qwen3_5_moe"
EXPERT = "model.layers.1.mlp.shared_expert.up_proj"
QUERIES = "model.layers.3.self_attn.q_proj"
MIXED = "model.layers.0.linear_attn.in_proj_qkv"
SHAPES = {EXPERT: (20, 32), QUERIES: (128, 32), MIXED: (160, 32)}


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("inside", [False, True])
def test_ranks_scales_and_spellings(inside, dtype, tmp_path):
    """A shared expert, matrices that are several of ours, names inside a model for images; patterns in turn."""
    spell = (lambda name: name.replace("model.", "model.language_model.", 1)) if inside else str
    ranks = {"up_proj": 5, "layers.3.self_attn.q_proj": 2, "proj": 9}
    fields = dict(rank_pattern=ranks, alpha_pattern={"q_proj": 1.5}, use_rslora=True, r=4)
    r = {EXPERT: 5, QUERIES: 2, MIXED: 4}
    modules = {spell(name): shape for name, shape in SHAPES.items()}
    tensors = drawn(modules, {spell(name): rank for name, rank in r.items()}.get, dtype)
    folder = adapter(tmp_path / "adapter", tensors, **fields)
    want = merged_by_numpy(MOE, folder, tmp_path / "merged")
    assert_near(merged(load_hf(MOE, adapter=folder)), params(load_hf(want)), 2e-6)


def test_patterns_of_names(tmp_path):
    r"""Expressions as PEFT has them, up to two of * and +: `(.*\.)?(key)$`. The first that matches counts."""
    patterns = {r"layers\.[0-9]+\.mlp.*": 2, "^model.layers.3.*": 5, "self_attn.q_proj": 7}
    tensors = drawn(SHAPES, {EXPERT: 2, QUERIES: 5, MIXED: 3}.get)
    model = load_hf(MOE, adapter=adapter(tmp_path / "adapter", tensors, rank_pattern=patterns))
    scales = {place: change.scale for place, change in lora_changes(model).items()}
    assert scales["blocks.1.mlp.shared.up_proj"] == 3 and scales["blocks.3.mixer.g_proj"] == 6 / 5
    assert scales["blocks.0.mixer.v_proj"] == 2 and len(scales) == 6


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_is_written_as_it_was_read(name, tmp_path):
    """The same factors to the bit, in the same ranks, with scales that are the same numbers in another spelling."""
    model = load_hf(LORA / ADAPTERS[name], adapter=LORA / name)
    save_adapter(model, tmp_path / "saved")
    before, after = factors(LORA / name), factors(tmp_path / "saved")
    assert before.keys() == after.keys()
    for key, value in before.items():
        np.testing.assert_array_equal(after[key], value)
    again = load_hf(LORA / ADAPTERS[name], adapter=tmp_path / "saved")
    for place, change in lora_changes(model).items():
        other = lora_changes(again)[place]
        assert math.isclose(other.scale, change.scale, rel_tol=1e-15)
        np.testing.assert_array_equal(other.a, change.a)
        np.testing.assert_array_equal(other.b, change.b)
    config = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == ADAPTERS[name]
    assert {f"{BASE}{module}.lora_A.weight" for module in config["target_modules"]} <= before.keys()


@pytest.mark.parametrize("projections", [("q_proj", "k_proj", "g_proj", "down_proj"), ("v_proj", "a_proj")])
def test_changes_that_were_trained_apart_are_joined(projections, tmp_path):
    """Parts of a matrix with an A of their own, and parts without any change: W is changed by the same numbers."""
    model = load_hf(LORA / "qwen3_5")
    nnx.jit(lambda model: add_lora(model, 2, projections=projections, alpha=3.0, rngs=nnx.Rngs(0)))(model)
    rng = np.random.default_rng(0)
    for i, block in enumerate(model.blocks):
        for name in projections:
            part = getattr(block.mixer, name, None) or getattr(block.mlp, name, None)
            if part is not None:
                part.b[...] = jax.device_put(rng.standard_normal(part.b.shape).astype(np.float32))
                part.scale *= 1 + i % 2  # another factor in every second layer
    if "q_proj" in projections:
        model.blocks[0].mixer.q_proj.scale *= 5
    save_adapter(model, tmp_path / "adapter")
    again = load_hf(LORA / "qwen3_5", adapter=tmp_path / "adapter")
    ranks = {a.shape[0] for name, a in factors(tmp_path / "adapter").items() if "lora_A" in name}
    assert ranks == ({2, 4} if "q_proj" in projections else {2})
    assert_near(merged(again), merged(model), 5e-6)


def test_a_model_with_changes_generates_and_is_saved_merged(tmp_path):
    model = load_hf(LORA / "qwen3_5", adapter=LORA / "qwen3_5_lora", dtype="bfloat16")
    changes = lora_changes(model)
    assert {change.a.dtype for change in changes.values()} == {np.dtype("float32")}
    arrays = [id(x) for change in changes.values() for x in change[:2]]
    assert len({*arrays}) == len(arrays)  # each of its own: training may give them away
    with pytest.raises(ValueError, match=r"got also blocks\.0\.\S+\.a; call merge_lora first"):
        save_hf(model, tmp_path / "saved")
    merged(model)
    with pytest.raises(ValueError, match="model: expected one with low-rank changes, got none"):
        save_adapter(model, tmp_path / "adapter")
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="path: expected a folder that does not exist"):
        save_adapter(model, tmp_path / "there")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_linked_adapter_is_not_published(tmp_path):
    """Merged weights hold what the file did that a link named."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    for file in (LORA / "qwen3_5_lora").iterdir():
        (folder / file.name).symlink_to(file)
    model = load_hf(LORA / "qwen3_5", adapter=folder)
    merged(model)
    with pytest.raises(ValueError, match=r"adapter_config\.json, whose content is written, in the folder"):
        save_hf(model, tmp_path / "saved")


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(peft_type="LOHA"), "peft_type = 'LOHA': only 'LORA' is supported"),
        (dict(peft_type=None), "peft_type = 'none': only 'LORA' is supported"),
        (dict(use_dora=True), "use_dora = True: DoRA's norms of columns are not supported"),
        (dict(bias="all"), "bias = 'all': trained biases are not supported"),
        (dict(modules_to_save=["lm_head"]), r"modules_to_save = \['lm_head'\]: whole modules next to"),
        (dict(fan_in_fan_out=True), r"fan_in_fan_out = True: weights \[inputs, outputs\]"),
        (
            dict(target_parameters=["mlp.experts.gate_up_proj"]),
            "target_parameters = .*: changes of parameters",
        ),
        (dict(trainable_token_indices=[3]), r"trainable_token_indices = \[3\]: trained embeddings"),
        (dict(lora_bias=True), "lora_bias = True: a bias of the change"),
        (dict(layer_replication=[[0, 2]]), "layer_replication = .*: layers that come more than once"),
        (
            dict(init_lora_weights="pissa"),
            "init_lora_weights = 'pissa': it changes the weights of the checkpoint",
        ),
        (dict(use_new_thing=1), "use_new_thing = 1: what it changes is not known"),
        (dict(rank_pattern={"(a+)+": 3}), "rank_pattern: .*: only names and simple patterns"),
        (dict(rank_pattern={"a.*b.*c.*": 3}), "rank_pattern: .*: only names and simple patterns"),
        (dict(rank_pattern={"[": 3}), "rank_pattern: .*: expected a pattern of names"),
        (dict(rank_pattern=[3]), r"expected an object rank_pattern, got \[3\]"),
        (dict(rank_pattern={"q_proj": 0}), "rank_pattern: q_proj: expected r above 0, got 0"),
        (dict(r=2.5), "expected r of type int, got 2.5"),
        (dict(r=4), rf"expected tensor {BASE}{EXPERT}\.lora_A\.weight of shape \(4, 32\), got \(3, 32\)"),
        (dict(lora_alpha=float("inf")), "expected a finite lora_alpha, got inf"),
        (dict(use_rslora="yes"), "expected use_rslora of type bool, got 'yes'"),
    ],
)
def test_other_adapters_are_refused(fields, message, tmp_path):
    folder = adapter(tmp_path / "adapter", drawn(SHAPES, lambda _: 3), **fields)
    with pytest.raises((ValueError, NotImplementedError), match=rf"adapter.*: .*{message}"):
        load_hf(MOE, adapter=folder)


A, B = (f"{BASE}{EXPERT}.lora_{letter}.weight" for letter in "AB")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop(A), rf"expected both factors of a change, got tensor {B} alone"),
        (
            lambda t: t.update({A: ("F32", t[A][1].T)}),
            rf"expected tensor {A} of shape \(3, 32\), got \(32, 3\)",
        ),
        (
            lambda t: t.update({B: ("F32", t[B][1][1:])}),
            rf"expected tensor {B} of shape \(20, 3\), got \(19, 3\)",
        ),
        (lambda t: t.update({B: ("I32", t[B][1].view(np.int32))}), rf"tensor {B} has dtype I32"),
        (
            lambda t: t.update({"lm_head.lora_A.weight": t[A]}),
            r"tensor lm_head\.lora_A\.weight: only base_model",
        ),
        (
            lambda t: t.update({f"{BASE}{EXPERT}.lora_magnitude_vector": t[A]}),
            "tensor .*magnitude_vector: only",
        ),
        (lambda t: t.update(drawn({"lm_head": (64, 32)}, lambda _: 3)), "module lm_head: only projections"),
        (
            lambda t: t.update(drawn({"model.layers.0.mlp.gate": (6, 32)}, lambda _: 3)),
            r"module \S+gate: only proj",
        ),
        (
            lambda t: t.update(
                drawn({EXPERT.replace("model.", "model.language_model.", 1): (20, 32)}, lambda _: 3)
            ),
            "expected one change of .*, got two by different names",
        ),
        (lambda t: t.clear(), "expected low-rank changes, got none"),
    ],
)
def test_damaged_adapters_are_refused(change, message, tmp_path):
    tensors = drawn(SHAPES, lambda _: 3)
    change(tensors)
    folder = adapter(tmp_path / "adapter", tensors)
    with pytest.raises((ValueError, NotImplementedError), match=rf"adapter_model\.safetensors: .*{message}"):
        load_hf(MOE, adapter=folder)


def test_missing_files(tmp_path):
    with pytest.raises(ValueError, match=r"expected a folder with adapter_config\.json, got none"):
        load_hf(MOE, adapter=tmp_path)
    folder = adapter(tmp_path / "adapter", drawn(SHAPES, lambda _: 3))
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(NotImplementedError, match="pickled weights are not supported"):
        load_hf(MOE, adapter=folder)
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors: expected a safetensors file"):
        load_hf(MOE, adapter=folder)
