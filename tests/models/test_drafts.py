"""Drafts of the head for multi-token prediction, and what a model writes with them."""

import dataclasses
from functools import partial
from pathlib import Path

import hf_checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gdn_jax.hf import load_hf
from gdn_jax.models import (
    AttentionConfig,
    ExpertsConfig,
    LanguageModel,
    ModelConfig,
    generate,
)
from gdn_jax.models.attention import AttentionCache, reserve
from gdn_jax.models.config import LatentAttentionConfig
from gdn_jax.models.drafts import Prompt, decode_with_drafts
from gdn_jax.models.inference import program
from gdn_jax.models.mtp import MTPHead

DATA = Path(__file__).parents[1] / "data"
NAMES = "qwen3_5_mtp", pytest.param("qwen3_5_moe_mtp", marks=pytest.mark.slow)
ROW = jax.device_put(np.random.default_rng(0).integers(0, 32, (2, 7)).astype(np.int32))
CONFIG = ModelConfig(
    **dict(vocab_size=32, hidden_size=32, num_layers=2, num_heads=2, head_dim=8, intermediate_size=48),
    layer_types=("gated_delta_net", "attention"),
    implementation="recurrent",
    attention=AttentionConfig(4, num_kv_heads=2, head_dim=8, rotary_dim=8, qk_norm="head"),
    scale_embedding=False,
)


@pytest.fixture(scope="module", params=NAMES)
def checkpoint(request):
    """A checkpoint's model, and what transformers makes of it."""
    folder = DATA / request.param
    return load_hf(folder, implementation="recurrent"), hf_checkpoints.expected_of(folder)


def with_head(config, seed=0):
    model = LanguageModel(config, rngs=nnx.Rngs(seed))
    model.mtp = nnx.data(MTPHead(config, rngs=nnx.Rngs(seed + 1)))
    return model


def made(config=CONFIG, seed=0):
    return nnx.jit(lambda: with_head(config, seed))()


def test_rounds_are_those_of_transformers(checkpoint):
    """Drafts and how many of them are right, round by round; the text is that without drafts."""
    model, expected = checkpoint
    text, (drafts, accepted) = expected["generated"], (expected["spec_drafts"], expected["spec_accepted"])

    @nnx.jit
    def run(model, prompt):
        x, cache = model.hidden_states(prompt, return_cache=True)
        cache = tuple(reserve(c, 27) if isinstance(c, AttentionCache) else c for c in cache)
        token, last = jnp.argmax(model.logits(x[:, -1]), -1), jnp.full(2, 20)
        choose = lambda logits, _: jnp.argmax(logits, -1)  # noqa: E731
        return decode_with_drafts(model, Prompt(prompt, None, x, last), token, cache, 24, 3, choose=choose)

    prompt = jax.device_put(text[:, :21])
    tokens, rounds = run(model, prompt)
    np.testing.assert_array_equal(tokens, text[:, 21:])
    S = drafts.shape[1]
    np.testing.assert_array_equal(rounds.accepted[:, :S], accepted)
    np.testing.assert_array_equal(rounds.drafts[:, :S], drafts)
    assert (np.asarray(rounds.accepted[:, S:]) == -1).all() and {0, 1, 2, 3} >= {*accepted.flat} - {-1}


KINDS = {
    "gated_delta_net": {},
    "experts and a window": dict(
        layer_types=("window_attention", "attention"),
        window_attention=AttentionConfig(4, head_dim=8, window=5),
        experts=ExpertsConfig(4, 2, 16, 16),
    ),
    "kda and latents": dict(
        mixer="kda",
        layer_types=("kda", "attention"),
        attention=LatentAttentionConfig(2, 8, 4, 8, 8, q_rank=8, rope_theta=100.0),
    ),
    "product": dict(mixer="gated_delta_product", layer_types=("gated_delta_product", "attention")),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(n, marks=() if n == "gated_delta_net" else pytest.mark.slow) for n in KINDS]
)
def test_the_text_is_that_without_drafts(kind, monkeypatch):
    """Rows with padding on the left; one ends early."""
    model = made(dataclasses.replace(CONFIG, **KINDS[kind]))
    mask = jax.device_put(np.arange(7) >= np.array([[0], [3]]))
    want = np.array(generate(model, ROW, 12, mask=mask))
    stop = want[0, 4]
    for row in want:
        row[[*row, stop].index(stop) :] = stop
    options: dict = dict(mask=mask, drafts="mtp", stop_tokens=[int(stop)])
    np.testing.assert_array_equal(generate(model, ROW, 12, num_drafts=2, **options), want)
    if kind == "gated_delta_net":  # in the copy for few tokens, too
        monkeypatch.setattr(program, "usable", lambda *_: True)
        np.testing.assert_array_equal(generate(model, ROW, 12, num_drafts=1, **options), want)


def test_drafts_among_the_first_words():
    """The first draft is the likeliest of them by the head; the tokens are those of drafts among all."""
    model, words = made(seed=4), 5

    @partial(nnx.jit, static_argnums=1)
    def run(model, words):
        x, cache = model.hidden_states(ROW, return_cache=True)
        cache = tuple(reserve(c, 16) if isinstance(c, AttentionCache) else c for c in cache)
        token, last = jnp.argmax(model.logits(x[:, -1]), -1), jnp.full(2, 6)
        choose = lambda logits, _: jnp.argmax(logits, -1)  # noqa: E731
        drawn = decode_with_drafts(
            model, Prompt(ROW, None, x, last), token, cache, 12, 2, words, choose=choose
        )
        rows = jnp.concatenate([ROW, token[:, None]], axis=1)
        first = model.mtp_logits(rows)[:, -1]
        return (token, first), drawn

    (token, first), (tokens, rounds) = run(model, words)
    np.testing.assert_array_equal(rounds.drafts[:, 0, 0], np.asarray(first)[:, :words].argmax(-1))
    assert rounds.drafts.max() < words
    np.testing.assert_array_equal(tokens, run(model, None)[1][0])
    np.testing.assert_array_equal(tokens[:, 0], token)


def test_a_listener_is_told_token_by_token(checkpoint):
    """The tokens that are returned, a stop token the last one. Where the listener stops, inside a round too, the last
    token is repeated."""
    model, expected = checkpoint
    prompt, want = expected["generated"][:1, :21], expected["generated"][0, 21:].tolist()

    def run(most=None, stops=()):
        heard: list[int] = []

        def listen(token):
            heard.append(int(token[0]))
            return len(heard) == most

        options: dict = dict(on_token=listen, stop_tokens=stops, drafts="mtp", num_drafts=3)
        return heard, np.asarray(generate(model, jax.device_put(prompt), len(want), **options))[0].tolist()

    assert run() == (want, want) and expected["spec_accepted"][0].max() > 1
    stop, end = want[9], want.index(want[9]) + 1
    assert run(stops=(stop,)) == (want[:end], want[:end] + [stop] * (len(want) - end))
    for most in (1, 2, 3, 4, 5):
        assert run(most) == (want[:most], want[:most] + want[most - 1 : most] * (len(want) - most))


@pytest.mark.parametrize("words", [None, 2])
def test_drawn_tokens_have_the_probabilities_of_the_model(words):
    """Three tokens after one prompt, in 4096 rows: how often each of 125 triples comes, by a test of chi squared. Of
    five words two alone may be drafted, too."""
    model, N, V = made(dataclasses.replace(CONFIG, vocab_size=5)), 4096, 5
    prompt = np.tile(np.array([[1, 4, 2]], np.int32), (N, 1))
    options: dict = dict(
        rng=jax.random.key(1), temperature=3.0, drafts="mtp", num_drafts=2, draft_vocab=words
    )
    got = np.asarray(generate(model, jax.device_put(prompt), 3, **options))
    every = np.array(np.meshgrid(*[range(V)] * 3, indexing="ij")).reshape(3, -1).T
    rows = np.concatenate([np.tile(prompt[:1], (V**3, 1)), every], axis=1)
    logits = np.asarray(nnx.jit(lambda model, rows: model(rows)[0])(model, rows), np.float64)[:, 2:5] / 3.0
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p = np.take_along_axis(p / p.sum(-1, keepdims=True), every[..., None], axis=2)[..., 0].prod(1)
    counts = np.bincount(got @ [V * V, V, 1], minlength=V**3)
    assert p.min() * N > 5
    # 124 degrees of freedom: above 186 with a probability of 3e-4.
    assert ((counts - N * p) ** 2 / (N * p)).sum() < 186
    assert len({*counts.tolist()}) > 10


def test_what_cannot_be():
    own, plain = (
        nnx.eval_shape(make)
        for make in (partial(with_head, CONFIG), lambda: LanguageModel(CONFIG, rngs=nnx.Rngs(0)))
    )
    for model, options, said in (
        (plain, dict(drafts="mtp"), "drafts: expected None for a model without a head"),
        (plain, dict(drafts="ngram"), "drafts: expected one of"),
        (own, dict(drafts="mtp", num_drafts=0), "num_drafts"),
        (own, dict(drafts="mtp", draft_vocab=0), "draft_vocab: expected"),
        (own, dict(drafts="mtp", draft_vocab=33), "draft_vocab: expected"),
        (own, dict(drafts="mtp", on_token=print), "on_token: expected None with drafts of several rows"),
    ):
        with pytest.raises(ValueError, match=said):
            generate(model, ROW, 2, **options)
