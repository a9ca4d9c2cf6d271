"""Hugging Face checkpoints: what transformers computes from them, round trips, refusals, damaged files."""

import dataclasses
import json
import shutil
import struct

import hf_checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models
from flax import nnx
from harness import tiers

from gdn_jax.hf import load_hf, olmo_hybrid, qwen3_next, save_hf
from gdn_jax.hf.checkpoint import read_tensors
from gdn_jax.hf.fields import Fields
from gdn_jax.hf.tensors import read_header
from gdn_jax.losses import linear_softmax_cross_entropy
from gdn_jax.models import AttentionConfig, ExpertsConfig, ModelConfig

NAMES = hf_checkpoints.NAMES


SLOW = ("qwen3_5_released", "qwen3_next", "qwen3_5_bfloat16", "olmo_hybrid_released")
CROSSED = ("qwen3_5", "qwen3_5_moe", "olmo_hybrid")
"""Those whose parts others have too; those of which there are newer ones, as released."""


_call = nnx.jit(lambda model, tokens, mask=None: model(tokens, mask=mask)[0])


def logits(model, tokens, mask=None):
    return np.asarray(_call(model, jnp.asarray(tokens), None if mask is None else jnp.asarray(mask, bool)))


def params(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def assert_same_params(a, b):
    def same(x, y):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)

    jax.tree.map(same, params(a), params(b))


@pytest.mark.parametrize("name", tiers(NAMES, {*NAMES} - {*SLOW, *CROSSED}, SLOW))
def test_a_checkpoint_computes_what_transformers_does_and_is_written_as_it_was(name, tmp_path):
    want = hf_checkpoints.expected(name)
    chunked = name in ("qwen3_5", "qwen3_5_released")  # compiles slowly
    model = load_hf(
        hf_checkpoints.FOLDER / name, dtype="float32", implementation="chunked" if chunked else "recurrent"
    )
    # All rows at once: the first two whole, the others with padding on the left, of which one is long.
    mask = np.concatenate([np.ones_like(want["mask"]), want["mask"]]).astype(bool)
    got = logits(model, np.concatenate([want["ids"], want["ids"]]), mask)
    hf_checkpoints.assert_same_logits(got[:2], want["logits"])
    hf_checkpoints.assert_same_logits(got[2:][mask[2:]], want["padded_logits"][mask[2:]])

    model = load_hf(hf_checkpoints.FOLDER / name)
    save_hf(model, tmp_path / "saved")
    before, after = (read_tensors(folder) for folder in (hf_checkpoints.FOLDER / name, tmp_path / "saved"))
    assert before.keys() == after.keys()
    floats = ("A_log", "dt_bias")
    for key, tensor in before.items():
        if not key.endswith(floats):  # float32 with us, whatever the others are
            assert after[key].dtype == tensor.dtype
        np.testing.assert_array_equal(after[key].read().astype(np.float32), tensor.read().astype(np.float32))
    configs = (folder / "config.json" for folder in (hf_checkpoints.FOLDER / name, tmp_path / "saved"))
    assert json.loads(next(configs).read_text()) == json.loads(next(configs).read_text())
    assert (tmp_path / "saved" / "generation_config.json").exists()
    assert_same_params(model, load_hf(tmp_path / "saved"))


@pytest.mark.slow
def test_without_a_mask_and_for_few_tokens():
    want = hf_checkpoints.expected("qwen3_5")
    model = load_hf(hf_checkpoints.FOLDER / "qwen3_5", implementation="recurrent")
    hf_checkpoints.assert_same_logits(logits(model, want["ids"][:, :3]), want["logits"][:, :3])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("qwen3_5", marks=pytest.mark.slow),
        pytest.param("qwen3_next", marks=pytest.mark.crossed),
        pytest.param("olmo_hybrid_released", marks=pytest.mark.slow),
    ],
)
def test_greedy_continuation(name):
    want = hf_checkpoints.expected(name)
    model = load_hf(hf_checkpoints.FOLDER / name, implementation="recurrent")
    hf_checkpoints.assert_continued(model, want["ids"][:, :9], want["generated"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["qwen3_5_moe_released", pytest.param("olmo_hybrid", marks=pytest.mark.crossed)]
)
def test_gradients_reach_every_parameter(name):
    model = load_hf(hf_checkpoints.FOLDER / name, implementation="recurrent")
    ids = jnp.asarray(hf_checkpoints.expected(name)["ids"][:, :33])
    graphdef, state = nnx.split(model)

    @jax.jit
    @jax.grad
    def gradient(state, ids):
        model = nnx.merge(graphdef, state)
        x, _ = model.hidden_states(ids[:, :-1])
        return linear_softmax_cross_entropy(x, model.head_weight(), ids[:, 1:]).loss

    for path, g in jax.tree.leaves_with_path(nnx.to_pure_dict(gradient(state, ids))):
        assert np.isfinite(g).all() and np.abs(g).max() > 0, jax.tree_util.keystr(path)


def test_what_a_language_model_does_not_use_is_listed_and_kept(tmp_path):
    folder = hf_checkpoints.FOLDER / "qwen3_5_released"
    model = load_hf(folder)
    skipped = model.origin.skipped
    assert "mtp.fc.weight" in skipped and "model.visual.pos_embed.weight" in skipped
    assert not [name for name in skipped if "language_model" in name]
    source = hf_checkpoints.copy("qwen3_5_released", tmp_path)
    model = load_hf(source)
    shutil.rmtree(source)
    with pytest.raises(
        ValueError, match=rf"model: expected {source}, .* with the 22 tensors that are copied"
    ):
        save_hf(model, tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == []


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.float32])
def test_dtype(dtype):
    model = load_hf(hf_checkpoints.FOLDER / "qwen3_5", dtype=dtype)
    for path, value in jax.tree.leaves_with_path(params(model)):
        always = any(name in jax.tree_util.keystr(path) for name in ("A_log", "dt_bias"))
        assert value.dtype == (jnp.float32 if always else dtype), path
    assert model.config.dtype == model.config.weight_dtype == jnp.dtype(dtype).name


def test_the_dtype_of_the_checkpoint_is_the_default():
    model = load_hf(hf_checkpoints.FOLDER / "qwen3_5_bfloat16", implementation="recurrent")
    assert model.config.weight_dtype == "bfloat16" and model.embedding.dtype == jnp.bfloat16
    want = hf_checkpoints.expected("qwen3_5_bfloat16")  # from these weights in float32
    got = logits(model, want["ids"])
    assert got.dtype == np.float32
    # Three blocks of some ten roundings of 2^-9 each, and a factor of 3; transformers' own bfloat16 is off by 0.023.
    assert np.sqrt(np.mean((got - want["logits"]) ** 2) / np.mean(want["logits"] ** 2)) < 5e-2


@pytest.mark.slow
def test_onto_a_mesh():
    """Every matrix lies in two parts on two devices, and the model computes the same."""
    mesh = jax.make_mesh((2,), ("model",))
    name = "qwen3_5_moe_released"
    model = load_hf(hf_checkpoints.FOLDER / name, mesh=mesh, implementation="recurrent")
    for path, value in jax.tree.leaves_with_path(params(model)):
        assert len(value.sharding.device_set) == 2, path
        parts = 2 if value.ndim > 1 else 1
        assert value.addressable_shards[0].data.size == value.size // parts, path
    want = hf_checkpoints.expected(name)
    hf_checkpoints.assert_same_logits(logits(model, want["ids"][:, :20]), want["logits"][:, :20])


HYBRID = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    num_layers=2,
    layer_types=("gated_delta_net", "attention"),
    num_heads=2,
    head_dim=8,
    intermediate_size=40,
    attention=AttentionConfig(4, 2, 16, "head", output_gate=True, rotary_dim=4),
    zero_centred_norms=True,
    scale_embedding=False,
    implementation="recurrent",
)


MOE = dataclasses.replace(HYBRID, experts=ExpertsConfig(4, 2, 12, 20), num_v_heads=4, tie_embeddings=True)


NEXT = dataclasses.replace(
    MOE, dense_layers=(1,), attention=AttentionConfig(4, 2, 16, "head", True, 4, bias=True)
)


OLMO = dataclasses.replace(
    HYBRID,
    zero_centred_norms=False,
    mixer_norm_eps=1e-5,
    norm_eps=1e-6,
    allow_neg_eigval=True,
    attention=AttentionConfig(4, 2, 16, "width", reordered_norm=True),
)


OWN = {"qwen3_5_text": HYBRID, "qwen3_5_moe_text": MOE, "qwen3_next": NEXT, "olmo_hybrid": OLMO}


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=pytest.mark.crossed) if name == "qwen3_5_text" else name for name in OWN],
)
def test_a_model_of_our_own(model_type, tmp_path):
    """It is written as the family that has such models, in several files where they are large."""
    model = small_models.made(OWN[model_type])
    save_hf(model, tmp_path / "saved", max_file_bytes=20_000)
    files = [*tmp_path.glob("saved/model-*.safetensors")]
    assert len(files) > 2
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    tensors = [tensor for file in files for tensor in read_header(file).values()]
    assert index["metadata"]["total_size"] == sum(tensor.end - tensor.begin for tensor in tensors)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["model_type"] == model_type
    loaded = load_hf(tmp_path / "saved", implementation="recurrent")
    assert_same_params(model, loaded)
    # Whoever has no dense layer has no use for intermediate_size; num_v_heads is told.
    told = {"num_v_heads": loaded.config.num_v_heads, "intermediate_size": loaded.config.intermediate_size}
    assert loaded.config == dataclasses.replace(model.config, **told)


@pytest.mark.parametrize("model_type", OWN)
def test_transformers_opens_a_model_of_our_own(model_type, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers and torch")
    torch = pytest.importorskip("torch", reason="needs transformers and torch")
    model = small_models.made(OWN[model_type])
    save_hf(model, tmp_path / "saved")
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", output_loading_info=True
    )
    assert not any(info.values()), info
    ids = np.random.default_rng(0).integers(0, 61, (2, 40)).astype(np.int32)
    with torch.no_grad():
        want = theirs(torch.from_numpy(ids).long()).logits.numpy()
    np.testing.assert_allclose(logits(model, ids), want, rtol=0, atol=hf_checkpoints.LOGITS)


def test_no_family_has_a_model_without_attention(tmp_path):
    model = small_models.made(ModelConfig(hidden_size=16, num_layers=1, head_dim=4))
    with pytest.raises(
        NotImplementedError, match=r"model: no family has .*Qwen3_5ForCausalLM: zero_centred_norms"
    ):
        save_hf(model, tmp_path / "saved")


def test_the_format_is_that_of_the_package(tmp_path):
    package = pytest.importorskip("safetensors.numpy", reason="needs safetensors")
    model = load_hf(hf_checkpoints.FOLDER / "qwen3_next")
    save_hf(model, tmp_path / "saved")
    theirs = package.load_file(tmp_path / "saved" / "model.safetensors")
    ours = read_tensors(tmp_path / "saved")
    assert theirs.keys() == ours.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name].read(), value)


def test_what_a_config_leaves_out():
    """Fields have the values that transformers gives them."""
    assert qwen3_next.DEFAULTS["rms_norm_eps"] == 1e-6
    assert qwen3_next.DEFAULTS["norm_topk_prob"] is True
    assert qwen3_next.DEFAULTS["partial_rotary_factor"] == 0.25 and qwen3_next.DEFAULTS["rope_theta"] == 1e4
    values = json.loads((hf_checkpoints.FOLDER / "qwen3_next" / "config.json").read_text())
    gone = {name: value for name, value in values.items() if name not in ("rms_norm_eps", "norm_topk_prob")}
    fields = Fields(
        gone | {"decoder_sparse_step": 2, "mlp_only_layers": []}, qwen3_next.DEFAULTS, "config.json"
    )
    config = qwen3_next.FAMILY.config(fields)
    assert config.norm_eps == 1e-6 and config.experts.normalise
    assert config.dense_layers == tuple(range(0, config.num_layers, 2))  # every second layer has experts


@pytest.mark.parametrize("layers, attend", [(1, [0]), (3, [2]), (4, [3]), (6, [3])])
def test_a_short_olmo_hybrid_attends_at_last(layers, attend):
    """Without layer_types, as transformers does: every fourth layer, or the last one where there are fewer."""
    values = {"num_hidden_layers": layers}
    types = Fields(values, olmo_hybrid.DEFAULTS, "config.json").layer_types(attends_at_last=True)
    assert [i for i, kind in enumerate(types) if kind == "attention"] == attend
    qwen = Fields(values, qwen3_next.DEFAULTS, "config.json").layer_types()
    assert [i for i, kind in enumerate(qwen) if kind == "attention"] == (attend if layers > 3 else [])


def test_older_fields_and_a_head_of_its_own(tmp_path):
    """What transformers makes of them is what we do."""
    want = load_hf(hf_checkpoints.FOLDER / "qwen3_5").config
    folder = hf_checkpoints.copy("qwen3_5", tmp_path)
    older = {"rope_theta": 1e4, "rope_scaling": None, "torch_dtype": "float32", "full_attention_interval": 4}
    gone = {"rope_parameters": None, "layer_types": None, "dtype": None}
    hf_checkpoints.change_config(folder, **older, **gone)
    assert load_hf(folder).config == want
    # A tied embedding with a head beside it: transformers ties them where they are equal.
    file = folder / "model.safetensors"
    header = read_header(file)
    embedding = header["model.embed_tokens.weight"].read()
    for scale in (1, 2):
        folder = hf_checkpoints.copy("qwen3_5", tmp_path / str(scale))
        file = folder / "model.safetensors"
        content = file.read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        entries = json.loads(content[8 : 8 + length])
        size = len(content) - 8 - length
        place = {"dtype": "F32", "shape": [64, 32], "data_offsets": [size, size + 64 * 32 * 4]}
        text = json.dumps(entries | {"lm_head.weight": place}).encode()
        more = (embedding * scale).tobytes()
        file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :] + more)
        model = load_hf(folder)
        assert model.config.tie_embeddings == (scale == 1) == (model.head is None)
