"""The small checkpoints of tests/data/hf, and copies of them to damage."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gdn_jax.hf.tensors import read_header
from gdn_jax.models import generate

FOLDER = Path(__file__).parents[1] / "data" / "hf"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/config.json"))

LOGITS = 2e-4
"""Absolute difference of float32 logits of unit size. Two float32 computations of some fifty layers of sums each."""
KL = 1e-6


def expected(name):
    """Transformers' results: ids, logits, mask, padded_logits and the greedy continuation of ids[:, :9]."""
    return expected_of(FOLDER / name)


def expected_of(folder):
    """Arrays of a checkpoint's expected.safetensors by name."""
    dtypes = {"F32": np.float32, "I32": np.int32}
    found = {}
    for tensor in read_header(folder / "expected.safetensors").values():
        count = int(np.prod(tensor.shape))
        values = np.fromfile(tensor.file, dtypes[tensor.dtype], count, offset=tensor.begin)
        found[tensor.name] = values.reshape(tensor.shape)
    return found


def copy(name, to):
    """A copy of a checkpoint whose files may be changed."""
    folder = Path(to) / name
    shutil.copytree(FOLDER / name if name in NAMES else FOLDER.parent / name, folder)
    return folder


def change_config(folder, **fields):
    """Sets fields of config.json; those with the value None are removed."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def assert_same_logits(got, want):
    """Logits, KL divergence and the five likeliest tokens, but for two whose logits are nearly equal."""
    np.testing.assert_allclose(got, want, rtol=0, atol=LOGITS)
    p, q = (np.asarray(jax.nn.log_softmax(x.astype(np.float64))) for x in (want, got))
    assert np.max(np.sum(np.exp(p) * (p - q), axis=-1)) <= KL
    best = np.take_along_axis(want, np.argsort(got)[..., -5:], axis=-1)
    np.testing.assert_allclose(best, np.sort(want)[..., -5:], rtol=0, atol=2 * LOGITS)


def assert_same_as_expected(model, want):
    """Logits of whole rows, and of rows with padding on the left, at their tokens."""
    ids = np.concatenate([want["input_ids"], want["left_padded_ids"]])
    mask = np.concatenate([np.ones_like(want["input_ids"]), want["left_padded_mask"]]).astype(bool)
    got, n = np.asarray(_masked_logits(model, ids, mask)), len(want["input_ids"])
    assert_same_logits(got[:n], want["logits"])
    assert_same_logits(got[n:][mask[n:]], want["left_padded_logits"][mask[n:]])


@nnx.jit
def _masked_logits(model, tokens, mask):
    return model(tokens, mask=mask)[0]


def assert_continued(model, prompt, generated):
    """The likeliest tokens after two prompts [2, T] are these, bare and, at once, with padding on the left."""
    T, pad = prompt.shape[1], 5
    rows = np.zeros((4, T + pad), np.int32)
    rows[:2, :T] = rows[2:, pad:] = prompt
    mask = np.zeros((4, T + pad), bool)
    mask[:2, :T] = mask[2:, pad:] = True
    got = np.asarray(generate(model, jnp.asarray(rows), generated.shape[1], mask=jnp.asarray(mask)))
    np.testing.assert_array_equal(got, np.concatenate([generated] * 2))
