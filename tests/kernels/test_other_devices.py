"""Devices that not all kernels run on: every call by what the device has, without an error, with one reason."""

import re
import types
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from generated_code import ptxas_report

import gdn_jax
from gdn_jax import serving
from gdn_jax.bench import measure
from gdn_jax.bench.rule import RuleBenchmark
from gdn_jax.commands import cli
from gdn_jax.layers import GatedDeltaNet
from gdn_jax.losses import linear_softmax_cross_entropy
from gdn_jax.models import LanguageModel, ModelConfig
from gdn_jax.models.inference.program import for_decoding, for_inference
from gdn_jax.parts import kernels as parts_kernels
from gdn_jax.parts.kernels import usable
from gdn_jax.parts.norms import add_norm
from gdn_jax.parts.swiglu import swiglu
from gdn_jax.shapes import Dims
from gdn_jax.training import kernels, peak
from pallas_kernels.ampere import segments, walk
from pallas_kernels.chunks import inverse, pairs
from pallas_kernels.device import grid_barrier, launch
from pallas_kernels.layer import cross_entropy, expert_gradient, expert_product, short_conv
from pallas_kernels.layer.rows import num_ctas
from pallas_kernels.rows import attention_rows, dense_stages, dense_stream, row_product
from pallas_kernels.rows.delta_decays import HeadDecay
from pallas_kernels.rows.delta_plan import plan_of
from pallas_kernels.tools.compiling import lowering_for
from pallas_kernels.work import split as work_split

REASON = "compute capability {}; these kernels need 9.0"
MMA_REASON = "compute capability {}; the kernels by mma.sync need 8.0, 8.6, 8.9, 9.0, 10.0, 10.3 or 12.0"


BY_CHANNELS = {f"mma by channels, {of}: mma_channel_gradients" for of in ("pairs", "kv, K 64, V 64")}
BY_CHANNELS |= {
    f"mma by channels, {of}, {which}: mma_channel_{kernel}"
    for of, which in (("erase", "packed"), ("segments", "erase"))
    for kernel in ("prepare", "gradients")
}
SPILLED = {
    "8.0": {x for x in BY_CHANNELS if "gradients" in x},
    "10.0": {f"verify on a ring, T 4, {of}" for of in ("vk", "int8", "vk, int8")}
    | {"decode deferred, int8", "layer of a token, qwen3.5-4b"}
    | BY_CHANNELS,
    "12.0": {"routing, 256 experts"} | BY_CHANNELS,
}
"""Calls whose kernels spill up to 88 bytes of registers, by compute capability: those of drafts, of a layer and of
gradients by channels do so on 9.0 too."""


def pretend(monkeypatch, capability: str) -> None:
    """JAX's default device says that it is a GPU of this compute capability."""
    device = types.SimpleNamespace(platform="gpu", compute_capability=capability, device_kind="NVIDIA card")
    monkeypatch.setattr(jax, "devices", lambda *_: [device])


@pytest.fixture
def rtx_4090(monkeypatch):
    """JAX's default device has compute capability 8.9, and warnings are errors."""
    pretend(monkeypatch, "8.9")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def tokens(*, B=2, T=64, D=64, dtype=jnp.bfloat16):
    """q, k, v, g and beta of a call."""
    return *[jnp.ones((B, T, 2, D), dtype)] * 3, *[jnp.zeros((B, T, 2))] * 2


def kernels_of(function, *arguments) -> int:
    """Kernels of ours in a function of arguments, traced anew: JAX remembers functions, and not for which device."""
    return str(jax.make_jaxpr(lambda *x: function(*x))(*arguments)).count("mpmd_map")


def test_which_kernels_a_device_gets(monkeypatch):
    """By its compute capability, with the reason where there are none."""
    for capability, mma in {
        "7.5": False,
        "8.0": True,
        "8.6": True,
        "8.9": True,
        "10.0": True,
        "10.3": True,
        "12.0": True,
        "12.1": False,
    }.items():
        pretend(monkeypatch, capability)
        assert gdn_jax.supported_implementations(*tokens()) == {
            "mosaic_gpu": REASON.format(capability),
            "mosaic_mma": None if mma else MMA_REASON.format(capability),
            "chunked": None,
            "recurrent": None,
        }
    pretend(monkeypatch, "9.0")
    assert set(gdn_jax.supported_implementations(*tokens()).values()) == {None}


def test_kernels_ask_for_the_device_that_runs_them(monkeypatch):
    """`jax.default_device` counts. CTAs that wait for each other fit on the smallest GPU of a process."""
    (cpu, *_), kinds = jax.devices(), (132, 114, 144)
    pretend(monkeypatch, "9.0")
    assert (
        launch.device_reason() is None
        and launch.num_sms() == launch.NUM_SMS
        and grid_barrier.most_ctas() == 0
    )
    gpus = [types.SimpleNamespace(platform="gpu", compute_capability="9.0", core_count=n) for n in kinds]
    monkeypatch.setattr(jax, "devices", lambda *_: gpus)
    monkeypatch.setattr(jax, "local_devices", lambda *_: gpus)
    assert (launch.num_sms(), grid_barrier.most_ctas()) == (132, 114)
    monkeypatch.setattr(jax, "devices", lambda *_: gpus[::-1])
    assert (launch.num_sms(), grid_barrier.most_ctas()) == (144, 114)
    assert expert_product.Config().ctas == num_ctas(1000, 1) == 144
    with jax.default_device(cpu):
        assert "default device is a cpu" in str(launch.device_reason())
        assert launch.num_sms() == launch.NUM_SMS


def test_the_rule_by_mma(rtx_4090):
    """Unasked and by its name; what its kernels do not take is XLA's, and other kernels are refused."""
    x, rule = tokens(), gdn_jax.gated_delta_rule
    assert kernels_of(rule, *x) == kernels_of(partial(rule, implementation="mosaic_mma"), *x) == 2
    with pytest.raises(NotImplementedError, match=REASON.format("8.9")):
        jax.eval_shape(partial(rule, implementation="mosaic_gpu"), *x)
    for other, reason in ((tokens(D=256), "up to 128"), (tokens(dtype=jnp.float32), "float32")):
        assert reason in str(gdn_jax.supported_implementations(*other)["mosaic_mma"])
        assert not kernels_of(rule, *other)
    channels = *x[:3], jnp.zeros((2, 64, 2, 64))
    assert kernels_of(gdn_jax.delta_rule, *channels) == 2


def test_hopper_runs_both(monkeypatch):
    """Its own unasked, and by name those by mma.sync."""
    pretend(monkeypatch, "9.0")
    x, rule = tokens(), gdn_jax.gated_delta_rule
    assert kernels_of(rule, *x) == kernels_of(partial(rule, implementation="mosaic_gpu"), *x) == 3
    assert kernels_of(partial(rule, implementation="mosaic_mma"), *x) == 2


def test_without_wgmma(monkeypatch):
    """On 10.0 every kernel but those by wgmma, which are named one by one; what they multiply is XLA's."""
    pretend(monkeypatch, "10.0")
    assert usable(None) and not usable(None, cross_entropy) and not usable("chunked")
    x, w = jnp.ones((4096, 128), jnp.bfloat16), jnp.ones((128, 128), jnp.bfloat16)
    assert kernels_of(partial(add_norm, weight=None, eps=1e-6), x, x) == 1
    assert kernels_of(swiglu, x, w, w, w) == 1
    with pytest.warns(UserWarning, match=f"the loss runs in plain JAX .*{REASON.format('10.0')}"):

        def loss(x):
            targets = jnp.zeros(4096, jnp.int32)
            return linear_softmax_cross_entropy(x, w, targets, implementation="mosaic_gpu").loss

        assert not kernels_of(jax.grad(loss), x)
    assert kernels_of(gdn_jax.gated_delta_rule, *tokens()) == 2
    with pytest.raises(NotImplementedError, match=REASON.format("10.0")):
        jax.eval_shape(partial(gdn_jax.gated_delta_rule, implementation="mosaic_gpu"), *tokens())
    (q, k, v, gate, _), pool = (y[:, 0] for y in tokens()), jnp.zeros((4, 2, 64, 64))
    head = dict(A_log=jnp.zeros(2), dt_bias=jnp.zeros(2), read_slots=jnp.arange(2))
    assert kernels_of(partial(serving.decode, **head), q, k, v, gate, gate, pool) == 1
    pretend(monkeypatch, "9.0")
    assert usable(None, cross_entropy)


def test_without_much_shared_memory(monkeypatch):
    """Kernels of layers, of single tokens and of a few drafts that fit into 99 KB run on 12.0 and below 9.0."""
    x, w = jnp.ones((4096, 128), jnp.bfloat16), jnp.ones((128, 128), jnp.bfloat16)
    (q, k, v, gate, _), pool = (y[:, 0] for y in tokens()), jnp.zeros((4, 2, 64, 64))
    head = dict(A_log=jnp.zeros(2), dt_bias=jnp.zeros(2), read_slots=jnp.arange(2))
    verified = {name: x for name, x in head.items() if name != "read_slots"}
    verified |= dict(state_slots=jnp.arange(8).reshape(2, 4) % 4, num_accepted_tokens=jnp.ones(2, jnp.int32))
    drafts = [y[:, :4] for y in (*tokens()[:3], *[tokens()[3]] * 2)]
    many = [jnp.repeat(x, 20, 1) for x in drafts]
    for capability in ("12.0", "8.9"):
        pretend(monkeypatch, capability)
        assert not usable(None)
        assert kernels_of(partial(add_norm, weight=None, eps=1e-6), x, x) == 1
        assert kernels_of(swiglu, x, w, w, w) == 1
        assert kernels_of(partial(serving.decode, **head), q, k, v, gate, gate, pool) == 1
        assert kernels_of(partial(serving.verify, **verified), *drafts, pool) == 1
        verified_many = verified | dict(state_slots=jnp.arange(160).reshape(2, 80))
        assert not kernels_of(partial(serving.verify, **verified_many), *many, pool)


@pytest.mark.parametrize("capability", ["8.0", "8.9"])
def test_rows_without_bulk_copies(capability, monkeypatch):
    """Projections and SwiGLU of a token of one row, in shapes that fit; a copy for decoding has its kernels."""
    gpu = types.SimpleNamespace(platform="gpu", compute_capability=capability, core_count=128)
    monkeypatch.setattr(jax, "devices", lambda *_: [gpu])
    monkeypatch.setattr(jax, "local_devices", lambda *_: [gpu])
    monkeypatch.setattr(parts_kernels, "expected_shards", lambda _: None)  # the tests have eight devices
    x, w = (partial(jax.ShapeDtypeStruct, dtype=dtype) for dtype in (jnp.float32, jnp.bfloat16))
    with lowering_for(capability):
        assert dense_stream.check_supported(x((1, 1024)), w((7168, 1024)), w((3584, 1024)), 128) is None
        reason = dense_stream.check_supported(x((1, 2560)), w((18432, 2560)), w((9216, 2560)), 128)
        assert "below compute capability 9.0" in str(reason)
        assert row_product.Stream.check_supported(x((1, 2048)), w((8, 2048))) is None
        assert (row_product.check_supported(x((8, 8192))) is None) == (capability == "8.0")
        for sms in (16, 28, 46, 60, 68, 76, 82, 84, 108):
            assert dense_stream.check_supported(x((1, 1024)), w((7168, 1024)), w((3584, 1024)), sms) is None
            config = dense_stages.Config.of(sms)
            sizes = dense_stages.Sizes(1024, 3584, config.warpgroups, config.slices)
            assert dense_stream._fitting(sizes, config, jnp.bfloat16).slots >= 2
            assert 1024 // sizes.columns(sms) <= sms
        sizes = dict(vocab_size=64, hidden_size=512, num_layers=1, num_heads=4, head_dim=64)
        config = ModelConfig(**sizes, dtype="bfloat16")

        def token(tokens):
            model = for_decoding(for_inference(LanguageModel(config, rngs=nnx.Rngs(0))), 1)
            return model(tokens, cache=model.init_cache(1))[0]

        text = str(jax.make_jaxpr(token)(jnp.zeros((1, 1), jnp.int32)))
        for kernel in ("conv_update", "decode_step", "heads_product", "dense_stream"):
            assert kernel in text
        assert "delta_layer" not in text


@pytest.mark.slow
@pytest.mark.parametrize("capability", [pytest.param("8.0", marks=pytest.mark.crossed), "10.0", "12.0"])
def test_kernels_without_wgmma_compile(capability):
    """All of them that a GPU gets, and those by mma.sync, without spilled registers, where gcc and ptxas are."""
    lines = ptxas_report("--capability", capability).splitlines()[1:]
    found = [re.fullmatch(r"(.*?) +(\d+) +(\d+) +(\d+) *", line) for line in lines]
    assert all(found), lines
    names = {line[1] for line in found if line}
    assert {"mma, pairs: mma_outputs", "decode", "norm", "swiglu"} <= names
    assert ("layer of a token" in names) == (capability == "10.0")
    assert {line[1] for line in found if line and line[3] != "0"} == SPILLED[capability]


@pytest.mark.parametrize(
    "capability",
    [
        *(pytest.param(capability, marks=pytest.mark.slow) for capability in ("8.0", "12.0")),
        *(pytest.param(capability, marks=pytest.mark.crossed) for capability in ("8.6", "8.9")),
    ],
)
def test_public_call_lowers(capability, monkeypatch):
    """Under jit with its gradients and the norm, for each capability."""
    pretend(monkeypatch, capability)

    def loss(*x):
        o, state = gdn_jax.gated_delta_rule(*x, use_qk_l2norm=True)
        return o.astype(jnp.float32).sum() + state.sum()

    with lowering_for(capability):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4))).trace(*tokens(T=70))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    for kernel in ("prepare", "outputs", "states", "adjoints", "gradients"):
        assert f"mma_{kernel}_mosaic_gpu" in text


@pytest.mark.slow
def test_layers_and_serving(rtx_4090):
    """The rule by mma.sync, both passes and prompts; the convolution and single tokens by their kernels."""
    graphdef, parameters = nnx.split(
        GatedDeltaNet(128, num_heads=2, head_dim=64, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    )

    def loss(parameters, x):
        return nnx.merge(graphdef, parameters)(x)[0].astype(jnp.float32).sum()

    assert kernels_of(jax.grad(loss), parameters, jnp.ones((2, 64, 128), jnp.bfloat16)) == 7
    (q, k, v, gate, _), pool = (y[:, 0] for y in tokens()), jnp.zeros((4, 2, 64, 64))
    borders, slots = np.array([0, 20, 64]), np.arange(2)
    prompts = [y[:1] for y in tokens()]
    assert (
        kernels_of(lambda *x: serving.prefill(*x[:5], borders, x[5], read_slots=slots), *prompts, pool) == 2
    )
    head = dict(A_log=jnp.zeros(2), dt_bias=jnp.zeros(2), read_slots=jnp.arange(2))
    assert kernels_of(partial(serving.decode, **head), q, k, v, gate, gate, pool) == 1


def test_benchmarks_time_what_runs(rtx_4090, monkeypatch, capsys):
    monkeypatch.setattr(measure, "on_gpu", lambda: True)
    monkeypatch.setattr("gdn_jax.bench.rule.on_gpu", lambda: True)
    benchmark = RuleBenchmark(rows=("16,32 1x32768",), passes=("forward",))
    benchmark.check()
    rows, dtype, implementations = benchmark.plan()
    assert {(row.lengths, what) for row, what in rows} == {((32768,), "forward")}
    assert (dtype, implementations) == ("bfloat16", ("mosaic_mma",))
    assert peak.of_device(peak.PEAK_FLOPS) is None
    assert cli.main(["bench", "kernels"]) != 0
    assert REASON.format("8.9") in capsys.readouterr().err


def test_training_says_why(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    pretend(monkeypatch, "8.9")
    assert "single tokens by kernels that fit" in str(kernels.note())
    pretend(monkeypatch, "7.5")
    assert kernels.note() == f"note: plain JAX, without kernels: {REASON.format('7.5')}"
    pretend(monkeypatch, "12.0")
    assert "single tokens by kernels that fit" in str(kernels.note())
    pretend(monkeypatch, "10.3")
    told = f"note: the rule by the kernels of mosaic_mma, and no kernels by wgmma: {REASON.format('10.3')}"
    assert kernels.note() == told
    pretend(monkeypatch, "9.0")
    assert kernels.note() is None
    monkeypatch.undo()
    assert kernels.note() is None


@pytest.mark.parametrize("platform", ["tpu", "rocm"])
def test_plain_forms_lower_for_other_platforms(platform):
    """With their gradients."""

    def loss(*x):
        o, state = gdn_jax.gated_delta_rule(*x, implementation="chunked")
        return o.astype(jnp.float32).sum() + state.sum()

    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4))).trace(*tokens(B=1))
    assert "stablehlo" in traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("sms", [108, 114, 132, 144, 148])
def test_grids_of_a_number_of_multiprocessors(sms, monkeypatch):
    """A kernel that goes over its work in turns has a CTA for each, one whose CTAs wait for each other no more than
    these, and cuts of long rows fill the device once. 108 is an A100, 114 and 132 are H100s, 148 is a B200."""
    gpu = types.SimpleNamespace(platform="gpu", compute_capability="9.0", core_count=sms)
    monkeypatch.setattr(jax, "devices", lambda *_: [gpu])
    monkeypatch.setattr(jax, "local_devices", lambda *_: [gpu])
    most = min(sms, launch.NUM_SMS)
    assert (launch.num_sms(), grid_barrier.most_ctas()) == (sms, most)
    for config in (expert_product, expert_gradient, inverse, pairs):
        assert config.Config().ctas == sms
    assert (num_ctas(10_000, 2), num_ctas(5, 2)) == (2 * sms, 5)
    assert dense_stages.Config.default().ctas == most >= dense_stages.Config.default().slices > most - 16
    for rows in (1, 32, 128):
        parts = attention_rows.Config.default(rows, 32768).parts
        assert 0.9 * sms * -(-rows * parts // sms) <= rows * parts or parts == 1
    for heads in (8, 16, 32):
        plan = plan_of(heads, 1, 128, 2048, 2048, (jnp.bfloat16,) * 2, HeadDecay())
        assert isinstance(plan, str) or plan.ctas <= most

    for heads, rows in ((8, 1), (16, 1), (32, 1), (64, 1), (32, 8)):
        dims = Dims(B=rows, T=32768, N=rows, Hq=heads, Hk=heads, HV=heads, HO=heads, K=128, V=128)
        chunks, walks = 32768 // 64, rows * heads
        length = segments.choose(dims, packed=False)
        assert length == 0 or -(-chunks // length) * walks * 2 <= sms
        config = walk.Config.default(128, walks, lambda _: 116_000)
        assert config.warpgroups == (2 if walks >= sms else 1)
        split = work_split.choose_split(dims, 128, 128, work_split.work_of(dims, False, None))
        warpgroups, length = split
        ctas = walks * (2 // warpgroups) * -(-chunks // (length or chunks))
        assert ctas >= sms // 2 and split == work_split.choose_split(
            dims, 128, 128, work_split.work_of(dims, False, None), sms=sms
        )
    for T, walks in ((8192, 48), (2048, 192), (32768, 12)):
        strip = short_conv.even_strip(T, walks, 4 * sms, 2)
        ctas = walks * -(-T // strip)
        assert 0.95 * 4 * sms * -(-ctas // (4 * sms)) <= ctas
