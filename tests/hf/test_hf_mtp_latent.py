"""The head for the token after the next of Ling 3.0, which lies after the decoder's layers: read, called, written."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
import small_models
from flax import nnx
from safetensors_files import write
from test_hf_float8 import assert_same, params

from gdn_jax import serving
from gdn_jax.hf import load_hf, save_hf
from gdn_jax.hf.checkpoint import read_tensors
from gdn_jax.models import generate
from gdn_jax.models.mtp import MTPHead
from gdn_jax.models.served import ServedModel

LING = Path(__file__).parents[1] / "data" / "bailing_hybrid_released"
KIMI = LING.parent / "kimi_linear_released"


def with_head(source, folder, without=()):
    """A copy of a checkpoint whose layer after the last is its layer of attention with experts once more."""
    model = load_hf(source)
    layer = next(
        i for i, kind in enumerate(model.config.types) if kind == "attention" and model.config.has_experts(i)
    )
    tensors = {name: (x.dtype, x.read()) for name, x in read_tensors(source).items()}
    after, of = f"model.layers.{model.config.num_layers}.", f"model.layers.{layer}."
    tensors |= {name.replace(of, after): x for name, x in tensors.items() if name.startswith(of)}
    rng, D = np.random.default_rng(0), model.config.hidden_size
    tensors[f"{after}eh_proj.weight"] = "F32", (rng.normal(size=(D, 2 * D)) / D**0.5).astype(np.float32)
    for name in ("enorm", "hnorm", "final_layernorm"):
        tensors[f"{after}{name}.weight"] = "F32", rng.uniform(0.5, 1.5, D).astype(np.float32)
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    write(
        folder / "model.safetensors",
        {name: x for name, x in tensors.items() if name.removeprefix(after) not in without},
    )
    return layer, {name.removeprefix(after): x[1] for name, x in tensors.items() if name.startswith(after)}


@pytest.fixture(scope="module")
def ling(tmp_path_factory):
    """The folder, the layer that the head has, its tensors, and the model."""
    folder = tmp_path_factory.mktemp("ling") / "head"
    layer, tensors = with_head(LING, folder)
    return folder, layer, tensors, load_hf(folder, implementation="recurrent")


def test_logits_follow_from_the_tensors(ling):
    """norm(eh_proj [norm(E x_(t+1)); norm(h_t)] through the layer), with the model's output projection."""
    _, layer, tensors, model = ling
    tokens = np.random.default_rng(1).integers(0, model.config.vocab_size, (2, 12)).astype(np.int32)
    eps = model.config.norm_eps

    def norm(x, name):
        x = np.asarray(x, np.float64)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * tensors[f"{name}.weight"]

    @nnx.jit
    def made(model, tokens):
        return model.mtp_logits(tokens), model.embedding[...], model.hidden_states(tokens)[0]

    @nnx.jit
    def through(model, u):
        x, y, _ = model.blocks[layer](u, None)
        return x + y

    got, embedding, hidden = made(model, tokens)
    both = norm(np.asarray(embedding)[tokens[:, 1:]], "enorm"), norm(np.asarray(hidden)[:, :-1], "hnorm")
    u = np.concatenate(both, -1) @ tensors["eh_proj.weight"].T.astype(np.float64)
    m = norm(through(model, jax.device_put(u.astype(np.float32))), "final_layernorm")
    head = read_tensors(ling[0])["lm_head.weight"].read().astype(np.float64)
    np.testing.assert_allclose(np.asarray(got), m @ head.T, rtol=0, atol=2e-4)


@pytest.mark.slow
def test_it_drafts_and_is_written_back(ling, tmp_path):
    """In `generate` and in a server the text is that without drafts; tensors come back as they were."""
    folder, _, _, model = ling
    prompt = np.arange(2 * 9, dtype=np.int32).reshape(2, 9)
    want = np.asarray(generate(model, jax.device_put(prompt), 6))
    got = generate(model, jax.device_put(prompt), 6, drafts="mtp", num_drafts=2)
    np.testing.assert_array_equal(got, want)
    served = ServedModel(model, drafts="mtp", num_drafts=2)
    server = serving.Server(
        served.prefill, served.decode, served.params, served.make_pools(2, capacity=32), max_batch=2
    )
    numbers = [server.submit(row, 6) for row in prompt]
    answers = server.run()
    np.testing.assert_array_equal([answers[number] for number in numbers], want)
    save_hf(model, tmp_path / "saved")
    before, after = read_tensors(folder), read_tensors(tmp_path / "saved")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        np.testing.assert_array_equal(after[key].read(), tensor.read(), err_msg=key)


def test_a_head_of_our_own_is_written(ling, tmp_path):
    config = dataclasses.replace(ling[3].config)
    model = small_models.made(config)
    model.mtp = nnx.data(nnx.jit(lambda rngs: MTPHead(config, rngs=rngs))(nnx.Rngs(1)))
    save_hf(model, tmp_path / "saved")
    loaded = load_hf(tmp_path / "saved")
    assert loaded.origin.config["num_nextn_predict_layers"] == 1
    assert_same(params(loaded), params(model))


def test_what_is_not_used(tmp_path):
    """A part of a head is kept and not called. No head of Kimi Linear is known: a layer after its own is an error."""
    with_head(LING, tmp_path / "part", without=("hnorm.weight",))
    model = load_hf(tmp_path / "part")
    assert model.mtp is None and [name for name in model.origin.skipped if name.endswith("eh_proj.weight")]
    with pytest.raises(ValueError, match=r"of Qwen or Ling 3\.0 has all its tensors"):
        model.mtp_logits(jax.device_put(np.zeros((1, 2), np.int32)))
    with_head(KIMI, tmp_path / "kimi")
    with pytest.raises(ValueError, match=r"expected no tensor model\.layers\.\d+\."):
        load_hf(tmp_path / "kimi")
