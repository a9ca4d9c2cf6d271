"""The head for the token after the next: what transformers computes with it, drafts, saved back, left out."""

import dataclasses
from pathlib import Path

import hf_checkpoints
import jax
import numpy as np
import pytest
import small_models
from flax import nnx
from harness import tiers
from safetensors_files import write
from test_hf import MOE, NEXT
from test_hf_float8 import assert_same, params

from gdn_jax.hf import load_hf, save_hf
from gdn_jax.hf.checkpoint import read_tensors
from gdn_jax.models import generate
from gdn_jax.models.mtp import MTPHead

DATA = Path(__file__).parents[1] / "data"
HEADS = ("qwen3_5_mtp", "qwen3_5_moe_mtp")
FP8 = ("qwen3_5_fp8", "qwen3_5_moe_fp8")


@nnx.jit
def _mtp_logits(model, tokens, mask=None):
    return model.mtp_logits(tokens, mask=mask)


@pytest.mark.parametrize("name", tiers(HEADS, HEADS[:1], HEADS[1:]))
def test_logits_are_those_of_transformers(name):
    """Whole rows, and after padding on the left the logits of the bare row."""
    want = hf_checkpoints.expected_of(DATA / name)
    model = load_hf(DATA / name, implementation="recurrent")
    ids = want["input_ids"]
    assert _mtp_logits(model, ids).shape == (2, 63, 199)
    hf_checkpoints.assert_same_logits(np.asarray(_mtp_logits(model, ids)), want["mtp_logits"])
    padded, mask = np.full_like(ids, 3), np.arange(64) >= np.array([[7], [0]])
    padded[0, 7:], padded[1] = ids[0, :57], ids[1]
    got = np.asarray(_mtp_logits(model, padded, mask))
    hf_checkpoints.assert_same_logits(got[0, 7:], want["mtp_logits"][0, :56])
    hf_checkpoints.assert_same_logits(got[1], want["mtp_logits"][1])


@pytest.mark.parametrize("name", tiers(FP8, (), FP8))
def test_a_head_in_8_bits(name):
    want = hf_checkpoints.expected_of(DATA / name)
    model = load_hf(DATA / name, dtype="float32", implementation="recurrent")
    hf_checkpoints.assert_same_logits(
        np.asarray(_mtp_logits(model, want["short_ids"])), want["mtp_short_logits"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_drafts(name):
    """Three greedy drafts after n tokens and the next one: the head goes on from its own hidden state and cache."""
    want = hf_checkpoints.expected_of(DATA / name)
    model = load_hf(DATA / name, implementation="recurrent")

    @nnx.jit
    def drafts(model, tokens, first):
        hidden, _ = model.hidden_states(tokens)
        following = jax.numpy.concatenate([tokens[:, 1:], first[:, None]], axis=1)
        m, cache = model.mtp(model.embedding[...][following], hidden, return_cache=True)
        found, m = [model.logits(m[:, -1])], m[:, -1:]
        for _ in range(2):
            token = found[-1].argmax(-1)[:, None]
            m, cache = model.mtp(model.embedding[...][token], m, cache=cache)
            found.append(model.logits(m[:, -1]))
        return jax.numpy.stack(found, 1)

    for i in np.flatnonzero(want["draft_lengths"] <= 64)[:2]:
        n = int(want["draft_lengths"][i])
        got = np.asarray(drafts(model, want["input_ids"][:, :n], want["draft_first"][:, i]))
        hf_checkpoints.assert_same_logits(got, want["draft_logits"][:, i])
        np.testing.assert_array_equal(got.argmax(-1), want["draft_tokens"][:, i])


@pytest.mark.parametrize("name", tiers(HEADS, HEADS[1:], HEADS[:1]))
def test_a_head_changes_nothing_else_and_is_saved_back(name, tmp_path):
    """Also from a model that has lost it, with the tensors of the checkpoint."""
    model = load_hf(DATA / name, implementation="recurrent")
    assert isinstance(model.mtp, MTPHead) and not [n for n in model.origin.skipped if n.startswith("mtp.")]
    save_hf(model, tmp_path / "saved")
    prompt = jax.device_put(np.arange(2 * 9, dtype=np.int32).reshape(2, 9))
    with_head = np.asarray(generate(model, prompt, 4))
    model.mtp = None
    np.testing.assert_array_equal(generate(model, prompt, 4), with_head)
    with pytest.raises(ValueError, match="model: expected one with a head for the token after the next"):
        model.mtp_logits(prompt)
    save_hf(model, tmp_path / "without")
    before = read_tensors(DATA / name)
    for folder in (tmp_path / "saved", tmp_path / "without"):
        after = read_tensors(folder)
        assert before.keys() == after.keys()
        for key, tensor in before.items():
            np.testing.assert_array_equal(after[key].read(), tensor.read(), err_msg=key)


@pytest.mark.parametrize(
    "config", [MOE, dataclasses.replace(NEXT, tie_embeddings=False)], ids=["moe", "next"]
)
def test_a_head_of_our_own_is_written(config, tmp_path):
    """In both forms, with a bias where attention has one, and a dense layer where the model has one."""
    model = small_models.made(config)
    head = nnx.jit(lambda rngs: MTPHead(config, rngs=rngs))(nnx.Rngs(1))
    model.mtp = nnx.data(head)
    save_hf(model, tmp_path / "saved")
    assert_same(params(load_hf(tmp_path / "saved")), params(model))
    save_hf(model, tmp_path / "narrow", weight_dtype="float8")
    tensors = read_tensors(tmp_path / "narrow")
    assert tensors["mtp.layers.0.mlp.experts.3.down_proj.weight"].dtype == "F8_E4M3"
    assert tensors["mtp.fc.weight"].dtype == "F32"
    assert load_hf(tmp_path / "narrow").mtp is not None


def test_a_part_of_a_head_is_kept_and_not_used(tmp_path):
    """As before there were heads; a tensor of a wrong shape in a whole head is an error."""
    folder = tmp_path / "part"
    folder.mkdir()
    source = DATA / "qwen3_5_mtp"
    tensors = {name: (tensor.dtype, tensor.read()) for name, tensor in read_tensors(source).items()}
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    norm = tensors.pop("mtp.norm.weight")
    write(folder / "model.safetensors", tensors)
    model = load_hf(folder)
    assert model.mtp is None and "mtp.fc.weight" in model.origin.skipped
    tensors["mtp.norm.weight"] = norm[0], norm[1][:-1]
    write(folder / "model.safetensors", tensors)
    with pytest.raises(ValueError, match=r"expected tensor mtp\.norm\.weight of shape \(64,\), got \(63,\)"):
        load_hf(folder)


def test_one_token_is_not_enough():
    model = load_hf(DATA / "qwen3_5_mtp")
    with pytest.raises(ValueError, match="tokens: expected rows of at least two tokens, got 1"):
        model.mtp_logits(jax.device_put(np.zeros((1, 1), np.int32)))
