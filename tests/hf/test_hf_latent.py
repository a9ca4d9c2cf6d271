"""Checkpoints of Kimi Linear and Ling: latent attention with its cache, experts by sigmoids, decays of channels."""

import dataclasses
import json
from pathlib import Path

import hf_checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from gdn_jax.commands import cli
from gdn_jax.hf import bailing_hybrid, load_hf, save_hf
from gdn_jax.hf.checkpoint import read_tensors
from gdn_jax.hf.families import describe
from gdn_jax.hf.fields import Fields
from gdn_jax.hf.save import own_family
from gdn_jax.inspect import analysis
from gdn_jax.models import ExpertsConfig, LanguageModel, costs
from gdn_jax.models.config import LatentAttentionConfig, SigmoidRouting
from gdn_jax.models.experts import Experts
from gdn_jax.models.latent import LatentAttention
from gdn_jax.models.lora import LoRALinear
from gdn_jax.models.presets import PRESETS
from gdn_jax.parallel.mesh import MeshShape
from gdn_jax.parallel.sharding import numbers_of_a_device, parameter_specs

DATA = Path(__file__).parents[1] / "data"
KIMI, LING = DATA / "kimi_linear_released", DATA / "bailing_hybrid_released"


@pytest.fixture(
    scope="module", params=[pytest.param(KIMI, marks=pytest.mark.slow), LING], ids=["kimi", "ling"]
)
def folder(request):
    return request.param


one_of_both = pytest.mark.parametrize(
    "folder",
    [pytest.param(KIMI, marks=pytest.mark.crossed), pytest.param(LING, marks=pytest.mark.slow)],
    ids=["kimi", "ling"],
    indirect=True,
)
"""Of what the layers do, which both have: logits and continuations are compared for each."""


@pytest.fixture(scope="module")
def expected(folder):
    """Transformers' results, of whole rows their first 64 tokens: nothing after a token changes it."""
    return hf_checkpoints.expected_of(folder)


@pytest.fixture(scope="module")
def model(folder):
    return load_hf(folder, implementation="recurrent")


def leaves(model):
    return jax.tree.leaves(nnx.state(model, nnx.Param))


def test_logits_are_those_of_transformers(model, expected):
    """Whole rows, rows with padding on the left, and a row of three tokens."""
    call = nnx.jit(lambda model, tokens, mask: model(tokens, mask=mask)[0])
    short = np.zeros((1, 64), np.int32)
    short[:, -3:] = expected["short_ids"]
    ids = np.concatenate([expected["input_ids"], expected["left_padded_ids"], short])
    mask = np.concatenate([np.ones((2, 64)), expected["left_padded_mask"], np.arange(64)[None] >= 61])
    mask = mask.astype(bool)
    got = np.asarray(call(model, ids, mask))
    want = np.concatenate([expected["logits"], expected["left_padded_logits"]])
    hf_checkpoints.assert_same_logits(got[:4][mask[:4]], want[mask[:4]])
    hf_checkpoints.assert_same_logits(got[4:, -3:], expected["short_logits"])


@pytest.mark.slow
def test_greedy_continuation(model, expected):
    """Bare, and with padding on the left, through the cache of latents."""
    tokens = expected["generated"]
    hf_checkpoints.assert_continued(model, tokens[:, :21], tokens[:, 21:])


def test_a_checkpoint_is_written_as_it_was_and_an_own_one_as_transformers_does(folder, model, tmp_path):
    save_hf(model, tmp_path / "saved")
    before, after = (read_tensors(path) for path in (folder, tmp_path / "saved"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(after[name].read(), tensor.read())
    configs = [json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "saved")]
    assert configs[0] == configs[1]
    own = nnx.clone(model)
    own.origin = None
    save_hf(own, tmp_path / "own")
    name = "block_sparse_moe.gate_proj" if folder == KIMI else "attention.dense"  # published: mlp, o_proj
    assert f"model.layers.0.{name}.weight" in read_tensors(tmp_path / "own")
    for name in ("saved", "own"):
        again = load_hf(tmp_path / name, implementation="recurrent")
        assert again.config == model.config
        assert all(np.array_equal(a, b) for a, b in zip(leaves(model), leaves(again), strict=True))


def test_experts_are_chosen_by_groups_and_weighted_without_the_bias():
    """Against a loop in NumPy, with negative biased scores, which a group left out must not beat."""
    routing = SigmoidRouting(groups=3, kept_groups=2, factor=2.5)
    config = ExpertsConfig(12, 5, 4, 4, shared_gate=False, routing=routing)
    layer = Experts(8, config, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    layer.router_bias[...] = jnp.asarray(rng.normal(-2, 1, 12), jnp.float32)
    x = rng.normal(size=(20, 8)).astype(np.float32)
    weights, chosen = layer.route(jnp.asarray(x))
    for row, w, experts in zip(x, np.asarray(weights), np.asarray(chosen), strict=True):
        s = 1 / (1 + np.exp(-row.astype(np.float64) @ np.asarray(layer.router[...], np.float64)))
        c = s + np.asarray(layer.router_bias[...], np.float64)
        best = sorted(range(3), key=lambda g: -np.sort(c[4 * g : 4 * g + 4])[-2:].sum())[:2]
        left = sorted((e for e in range(12) if e // 4 in best), key=lambda e: -c[e])[:5]
        assert [*experts] == left
        np.testing.assert_allclose(w, 2.5 * s[left] / s[left].sum(), rtol=1e-5)


@pytest.mark.slow
def test_latent_attention_is_its_definition_with_every_part_and_in_any_pieces():
    """Rotation, compressed queries and a gate, against float64; through the cache, with a low-rank change too."""
    a = LatentAttentionConfig(2, 6, 4, 5, 7, q_rank=8, rope_theta=100.0, head_gate=True)
    layer = LatentAttention(16, a, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 9, 16))
    p = {k: np.asarray(v, np.float64) for k, v in nnx.to_flat_state(nnx.state(layer, nnx.Param))}
    p = {k[0]: v for k, v in p.items()}

    def norm(y):
        return y / np.sqrt(np.mean(y**2, -1, keepdims=True) + 1e-6)

    def turned(y):
        angle = np.arange(9)[:, None, None] * 100.0 ** (-np.arange(2) / 2)
        z = (y[..., 0::2] + 1j * y[..., 1::2]) * np.exp(1j * angle)
        return np.stack([z.real, z.imag], -1).reshape(y.shape)

    x64 = np.asarray(x, np.float64)
    q = (norm(x64 @ p["q_a_proj"]) @ p["q_b_proj"]).reshape(2, 9, 2, 10)
    kv = x64 @ p["kv_a_proj"]
    up = (norm(kv[..., :7]) @ p["kv_b_proj"]).reshape(2, 9, 2, 11)
    k_r = np.repeat(turned(kv[:, :, None, 7:]), 2, axis=2)
    scores = np.einsum("bihd,bjhd->bhij", q[..., :6], up[..., :6])
    scores = (scores + np.einsum("bihd,bjhd->bhij", turned(q[..., 6:]), k_r)) / 10**0.5
    w = np.exp(np.where(np.tril(np.ones((9, 9), bool)), scores, -np.inf))
    w /= w.sum(-1, keepdims=True)
    o = np.einsum("bhij,bjhd->bihd", w, up[..., 6:]) / (1 + np.exp(-(x64 @ p["g_proj"])))[..., None]
    want = o.reshape(2, 9, 10) @ p["o_proj"]
    call = nnx.jit(lambda layer, x, past: layer(x, cache=past, return_cache=True))
    whole, cache = call(layer, x, None)
    np.testing.assert_allclose(whole, want, atol=1e-5)
    np.testing.assert_allclose(nnx.jit(lambda layer, x: layer.weights(x))(layer, x), w, atol=1e-5)
    assert cache.k.shape == (2, 9, 1, 4) and cache.v.shape == (2, 9, 1, 7)
    past, begin = layer.init_cache(2), 0
    for tokens in (1, 5, 1, 2):
        y, past = call(layer, x[:, begin : begin + tokens], past)
        np.testing.assert_allclose(y, want[:, begin : begin + tokens], atol=1e-5)
        begin += tokens
    half = LatentAttention(16, a, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert half.init_cache(1).k.dtype == half.init_cache(1, 5).v.dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ["gate_lower_bound", "attn_res_block_size"])
def test_a_text_model_of_kimi_k3_is_refused(name):
    config = json.loads((KIMI / "config.json").read_text())
    (config["linear_attn_config"] if name == "gate_lower_bound" else config)[name] = -5
    described = describe(config, "config.json")
    with pytest.raises(NotImplementedError, match=f"{name} = -5: a part of Kimi K3"):
        described.family.config(described.fields)


def test_costs_and_info(folder, model, capsys):
    cache = next(c for c in model.init_cache(1, capacity=50) if hasattr(c, "k"))
    kept = costs.layer_costs(model.config, "attention", 50).cache_bytes
    assert cache.k.nbytes + cache.v.nbytes == kept == 50 * (32 + 8 if folder == KIMI else 24 + 16) * 4
    assert sum(costs.parameters(model.config).values()) == sum(x.size for x in leaves(model))
    assert cli.main(["info", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "KimiDeltaAttention" in out and ("not used: 18 tensors" in out) == (folder == LING)


def refusal(**changes):
    """What is said of Ling's config.json with other fields."""
    config = json.loads((LING / "config.json").read_text()) | changes
    with pytest.raises(NotImplementedError) as error:
        described = describe({k: v for k, v in config.items() if v is not None}, "config.json")
        described.family.config(described.fields)
    return str(error.value)


def test_the_older_generation_and_other_variants_of_ling_are_refused():
    older = {name: None for name in bailing_hybrid.MARKS} | {"architectures": ["BailingMoeV2_5ForCausalLM"]}
    for changes in (older, older | {"architectures": None}, {"architectures": older["architectures"]}):
        assert "model_type 'bailing_hybrid' of Ling 2.5 and 2.6: their lightning" in refusal(**changes)
    assert "no_kda_lora = False: narrow projections" in refusal(no_kda_lora=False)
    assert "score_function = 'softmax': only 'sigmoid'" in refusal(score_function="softmax")
    assert "rope_type 'yarn' is not supported" in refusal(rope_scaling={"rope_type": "yarn"})
    assert "rope_interleave = False: only neighbours" in refusal(rope_interleave=False)


def test_a_gate_without_bound_and_queries_of_full_rank():
    config = json.loads((LING / "config.json").read_text()) | {"kda_safe_gate": False, "q_lora_rank": None}
    described = describe(config, "config.json")
    read = described.family.config(described.fields)
    assert read.mixer.gate == "softplus" and read.attention.q_rank is None
    family, fields, names = own_family(read)
    assert family is described.family and family.config(Fields(fields, family.defaults, "own")) == read
    written = {name for weight in family.weights(read, names) for name in weight.tensors}
    assert "model.layers.2.attention.q_proj.weight" in written


def test_what_kimi_linear_reads_and_what_it_cannot_write():
    """Types of layers that are named go before numbers of layers; other latent attention has no fields there."""
    config = json.loads((KIMI / "config.json").read_text())
    types = ["full_attention"] + ["linear_attention"] * (config["num_hidden_layers"] - 1)
    read, other = (
        described.family.config(described.fields)
        for described in (describe(config | more, "config.json") for more in ({}, {"layer_types": types}))
    )
    assert read.types[0] == "kda"
    assert other.types[0] == "attention" and "attention" not in other.types[1:]
    for changes, said in (({"head_gate": True}, "head_gate"), ({"rope_theta": 1e4}, "rope_theta")):
        changed = dataclasses.replace(read, attention=dataclasses.replace(read.attention, **changes))
        with pytest.raises(NotImplementedError, match=f"{said}: models of the family Kimi Linear have"):
            own_family(changed)
    with pytest.raises(
        NotImplementedError, match="num_v_heads, mixer_norm_eps: Kimi Linear has the same for all"
    ):
        own_family(dataclasses.replace(read, mixer_norm_eps=2 * read.norm_eps))
    _, fields, _ = own_family(dataclasses.replace(read, dense_layers=(0, 2)))
    assert fields["first_k_dense_replace"] == 1  # the layers before the first that has experts


def read_with(folder, **changes):
    """The configuration of a config.json with other fields, without those that are None."""
    config = json.loads((folder / "config.json").read_text()) | changes
    described = describe({name: value for name, value in config.items() if value is not None}, "config.json")
    return described.family.config(described.fields)


def test_fields_that_are_missing_or_have_another_name_are_what_transformers_takes(folder):
    """As transformers 5.24.0 reads them; nothing in the shapes of the tensors shows these."""
    said = ("num_expert_group", "n_group", "topk_group", "moe_renormalize", "norm_topk_prob")
    said += (
        "first_k_dense_replace",
        "routed_scaling_factor",
        "num_experts_per_token",
        "num_experts_per_tok",
    )
    read = read_with(folder, **dict.fromkeys(said), num_experts=16)
    kimi = folder == KIMI
    assert read.experts.routing == (SigmoidRouting(1, 1, 2.446) if kimi else SigmoidRouting(8, 4, 2.5))
    assert read.dense_layers == ((0,) if kimi else (0, 1))
    assert read.experts.normalise and read.experts.per_token == 8
    others = dict(
        n_group=2,
        topk_group=1,
        norm_topk_prob=False,
        num_experts_per_tok=1,
        num_local_experts=8,
        n_shared_experts=2,
    )
    read = read_with(folder, **dict.fromkeys((*said, "num_experts", "num_shared_experts")) | others)
    e = read.experts
    assert (e.num_experts, e.per_token, e.routing.groups, e.normalise) == (8, 1, 2, False)
    assert e.shared_size == 2 * e.expert_size
    both = read_with(folder, **others | {"num_experts_per_token": 3, "moe_renormalize": True})
    assert both.experts.per_token == 3 and both.experts.normalise


def test_groups_have_two_experts_or_more():
    with pytest.raises(ValueError, match="groups: expected groups of 2 or more of 8 experts"):
        ExpertsConfig(8, 2, 4, 4, routing=SigmoidRouting(groups=3))


def test_a_low_rank_change_is_seen_through_the_cache():
    layer = LatentAttention(16, LatentAttentionConfig(2, 6, 4, 5, 7), rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (1, 4, 16))
    call = nnx.jit(lambda layer, x, past: (layer(x)[0], layer(x, cache=past)[0]))
    before, _ = call(layer, x, layer.init_cache(1))
    layer.kv_b_proj = LoRALinear(layer.kv_b_proj, 2, 1.0, rngs=nnx.Rngs(0))
    layer.kv_b_proj.b[...] = jnp.ones_like(layer.kv_b_proj.b[...])
    after, by_cache = call(layer, x, layer.init_cache(1))
    np.testing.assert_allclose(after, by_cache, atol=1e-5)
    assert np.abs(after - before).max() > 1e-2


@pytest.mark.slow
def test_onto_eight_devices():
    """Every matrix lies in eight parts that has an axis to cut, and the model computes the same."""
    model = load_hf(LING, mesh=jax.make_mesh((8,), ("model",)), implementation="recurrent")
    for x in leaves(model):
        cut = x.ndim > 1 and any(n % 8 == 0 for n in x.shape)
        assert len(x.sharding.device_set) == 8
        assert x.addressable_shards[0].data.size == x.size // (8 if cut else 1)
    want = hf_checkpoints.expected_of(LING)
    got = nnx.jit(lambda model, tokens: model(tokens)[0])(model, want["short_ids"])
    hf_checkpoints.assert_same_logits(np.asarray(got), want["short_logits"])


@one_of_both
def test_the_views_of_notebook_06(model, expected):
    """Half-lives of each channel, write strengths, maps of the latent attention, and gates that are changed."""
    tokens = jnp.asarray(expected["input_ids"][:, :24])
    maps = {}

    def keep(i, mixer, x, **options):
        if mixer.attends:
            maps[i] = mixer.weights(x)
        return mixer(x, **options)

    logits, _ = model(tokens, around=keep)
    inputs = analysis.model_rule_inputs(model, tokens)
    assert [x is None for x in inputs] == [kind == "attention" for kind in model.config.types]
    assert [*maps] == [i for i, x in enumerate(inputs) if x is None]
    for looks in maps.values():
        assert looks.shape[2:] == (24, 24) and looks.min() >= 0
        np.testing.assert_allclose(looks.sum(-1), 1, atol=1e-5)
    ruled = [x for x in inputs if x is not None]
    for x in ruled:
        lives = analysis.layer_half_lives(x.g)
        assert lives.median.shape == (2, 32) and bool(jnp.all(lives.p10 <= lives.p90))
        assert x.beta.shape == (2, 24, 2) and 0 < x.beta.min() and x.beta.max() < 1
    if model.config.mixer.gate == "lower_bound":
        assert min(x.g.min() for x in ruled) >= -5
    unchanged = analysis.logits_with_gates(model, tokens, change=lambda i, g, beta: (g, beta))
    np.testing.assert_allclose(unchanged, logits, atol=1e-4)
    forgets = analysis.logits_with_gates(
        model, tokens, change=lambda i, g, beta: (jnp.full_like(g, -jnp.inf), beta)
    )
    assert jnp.abs(forgets - logits).max() > 0.1


TRANSFORMERS_BFLOAT16 = {KIMI: 0.15, LING: 0.27}
"""Rms error of transformers' own logits in bfloat16 (`tests/neighbours/transformers_models.py`, CPU, 2026-11-26).
Where two scores are nearly equal a rounding decides which expert a token gets."""


@one_of_both
def test_in_bfloat16(folder, expected):
    """What decides stays in float32, and the logits are at most twice as far off as transformers'."""
    model = load_hf(folder, dtype="bfloat16", implementation="recurrent")
    exact = {"A_log", "dt_bias", "router_bias"}
    for path, x in jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(model, nnx.Param))):
        name = path[-1].key
        if name in exact or name == "router":
            assert x.dtype == jnp.float32, name
    call = nnx.jit(lambda model, tokens: (model(tokens)[0], analysis.model_rule_inputs(model, tokens)[0].g))
    got, g = call(model, expected["input_ids"])
    assert g.dtype == jnp.float32
    error = np.sqrt(np.mean((np.asarray(got, np.float64) - expected["logits"]) ** 2))
    assert error < 2 * TRANSFORMERS_BFLOAT16[folder]


@pytest.mark.slow
def test_the_published_sizes_of_kimi_linear_are_partitioned_without_weights():
    """The program of a batch on eight devices, each of which is given an eighth of all that divides."""
    sizes = dict(dtype="bfloat16", weight_dtype="bfloat16", implementation="recurrent")  # compiles fast
    config = dataclasses.replace(PRESETS["kimi-linear-48b-a3b"], **sizes)
    graphdef, params = nnx.split(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))))
    shape = MeshShape.parse("data=8,sharded")
    mesh = shape.make()

    def lie(x, where):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, where))

    params = jax.tree.map(lie, params, parameter_specs(params, shape))
    tokens = lie(jax.ShapeDtypeStruct((8, 128), jnp.int32), PartitionSpec("data"))
    with jax.set_mesh(mesh):
        program = jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens)[0][:, -1]).lower(
            params, tokens
        )
        memory = program.compile().memory_analysis()
    given, parameters = memory.argument_size_in_bytes, numbers_of_a_device(params, shape)
    print(
        f"{given / 2**30:.2f} GiB of arguments a device, {memory.temp_size_in_bytes / 2**30:.2f} of temporaries"
    )
    assert 2 * parameters <= given <= 2 * parameters * 1.01  # some are float32
    assert costs.count(params) / 8 <= parameters <= 1.001 * costs.count(params) / 8
