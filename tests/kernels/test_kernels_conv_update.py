"""The convolution of a token by its kernel without a GPU, and the token behind it from one array: right and free of
races when interpreted, in place when lowered, and refused with a reason."""

import re
from functools import partial
from typing import NamedTuple

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pool_steps
import pytest
from device_arrays import put
from jax.experimental.pallas import mosaic_gpu as plgpu
from pool_steps import Case
from programs import eqns
from serving_cases import assert_same_bits
from test_kernels_decode import in_place

from gdn_jax import serving
from gdn_jax.serving import shards
from gdn_jax.serving.call import interpreted as interpreted_calls
from pallas_kernels.decode import conv_update

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
KERNELS = {"implementation": "mosaic_gpu"}
F32 = dict(rtol=1e-6, atol=1e-6)  # as in test_conv.py: another order of the same roundings
BF16 = dict(rtol=2**-7, atol=1e-6)  # such sums may be rounded to numbers side by side: a step of bfloat16


@pytest.fixture
def interpreted():
    """Public calls interpret the kernels."""
    with interpreted_calls(INTERPRET):
        yield


class Call(NamedTuple):
    """A call of four requests, the second of which is padding."""

    D: int = 128
    W: int = 4
    dtype: str = "bfloat16"
    pool_dtype: str = "bfloat16"
    weight_dtype: str = "float32"
    bias: bool = False
    activation: str | None = "silu"
    write_slots: tuple[int, ...] | None = None
    null_slot: int | None = None
    layer: int | None = None

    def draw(self) -> tuple[dict, jax.Array]:
        """Arguments, and the pool."""
        rng = np.random.default_rng(self.D + self.W)

        def normal(dtype, *shape):
            return put(rng.standard_normal(shape, np.float32), dtype)

        pool = np.array(normal(self.pool_dtype, 9, *(() if self.layer is None else (3,)), self.D, self.W - 1))
        pool[:, ::7] = -0.0
        read = np.array([5, -1 if self.null_slot is None else self.null_slot, 2, 8])
        arguments = {
            "x": normal(self.dtype, 4, self.D),
            "weight": normal(self.weight_dtype, self.D, self.W),
            "bias": normal(self.weight_dtype, self.D) if self.bias else None,
            "read_slots": read,
            "write_slots": None if self.write_slots is None else np.array(self.write_slots),
        }
        return arguments | {name: getattr(self, name) for name in ("activation", "null_slot", "layer")}, put(
            pool
        )


CALLS = {
    "plain": Call(),
    "several to a thread": Call(D=512, bias=True),
    "float32": Call(D=256, dtype="float32", pool_dtype="float32"),
    "two taps, rounded": Call(W=2, dtype="float32", activation=None),
    "three taps, widened": Call(W=3, dtype="float16", pool_dtype="float32", weight_dtype="bfloat16"),
    "no multiple": Call(D=300, bias=True),
    "nearly twice": Call(D=255, pool_dtype="float32"),
    "elsewhere": Call(D=130, write_slots=(5, 3, 1, -1)),
    "crossed": Call(write_slots=(2, 3, 5, 0)),
    "null slot": Call(null_slot=4, write_slots=(4, 0, 6, 7)),
    "layers": Call(layer=1),
}


@pytest.mark.parametrize(
    "name", harness.tiers(CALLS, ("several to a thread", "no multiple", "crossed", "null slot"))
)
@pytest.mark.usefixtures("interpreted")
def test_as_plain_jax(name):
    """The bits of every slot, written or not, are those that plain JAX leaves; y differs by rounding at most."""
    arguments, pool = CALLS[name].draw()

    def run(implementation):
        return serving.causal_conv1d_update(pool=put(pool), implementation=implementation, **arguments)

    want, plain = run("xla")
    y, new = run("mosaic_gpu")
    assert y.dtype == want.dtype and not np.asarray(y)[1].any()
    bound = F32 if y.dtype == jnp.float32 else BF16
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (want, y)), **bound)
    assert_same_bits(plain, new)
    assert (np.asarray(new) != np.asarray(pool)).any()


@pytest.mark.usefixtures("interpreted")
def test_channels_of_a_wider_array():
    """Other products behind those of the convolution; rows are slots."""
    rng = np.random.default_rng(0)
    shapes = (3, 300), (3, 256, 3), (256, 4)
    x, pool, weight = (put(rng.standard_normal(shape, np.float32)) for shape in shapes)
    slots = dict(read_slots=None, write_slots=None)
    y, new = conv_update.conv_update(x, pool, weight, **slots, interpret=INTERPRET)
    want, plain = serving.causal_conv1d_update(
        x[:, :256], pool, weight, read_slots=np.arange(3), implementation="xla"
    )
    np.testing.assert_allclose(want, y, **F32)
    assert_same_bits(plain, new)


def packed(case: Case, x: dict, **options) -> tuple:
    """`pool_steps.serve` of one token, with q, k and v in one array."""
    qkv = jnp.concatenate([x[name].reshape(case.N, -1) for name in "qkv"], -1)
    gates = {name: x[name] for name in ("A_log", "dt_bias")}
    write = x["write_slots"][:, 0] if case.elsewhere else None
    options = pool_steps.public_options(
        case, read_slots=x["read_slots"], write_slots=write, **gates, **options
    )
    o, pool = serving.decode_packed(qkv, x["a"][:, 0], x["b"][:, 0], x["pool"], **options)
    return o[:, None], pool


PACKED = (
    Case("plain"),
    Case("vk-widths", K=64, V=96, heads=(2, 2, 2), kv_layout=False, pool_dtype="bfloat16", elsewhere=True),
)


@pytest.mark.parametrize("case", harness.tiers(PACKED, ("vk-widths",)))
@pytest.mark.usefixtures("interpreted")
def test_decode_from_one_array(case):
    """The kernel gives the bits that it gives from three arrays."""
    x = pool_steps.draw(case)
    for want, got in zip(pool_steps.serve(case, x, **KERNELS), packed(case, x, **KERNELS), strict=True):
        assert_same_bits(want, got)


@pytest.mark.slow
def test_decode_from_one_array_in_plain_jax():
    """Also on a ring, of which no kernel reads one array."""
    case = Case("plain", K=32, V=32, dtype="float32")
    x = pool_steps.draw(case)
    for change in ({}, {"pool": serving.make_ring_pool(x["pool"], num_key_heads=case.heads[1])}):
        results = [jax.jit(partial(f, case))(x | change) for f in (pool_steps.serve, packed)]
        for want, got in zip(*map(jax.tree.leaves, results), strict=True):
            np.testing.assert_allclose(want, got, **F32)
    with pytest.raises(ValueError, match=r"qkv: expected 2 Hk K \+ HV V channels"):
        packed(case, x | {"v": x["v"][..., :1]})


@pytest.mark.usefixtures("hopper")
def test_a_token_is_two_kernels(monkeypatch):
    """Lowered for a GPU nothing stands between the convolution and the rule but views, and both pools are updated in
    place; with slots of their own to write, too."""
    monkeypatch.setattr(shards, "is_whole", lambda *arrays: True)
    monkeypatch.setattr(shards, "expected_shards", lambda arrays: None)
    case = Case("token", heads=(2, 2, 4))
    x = pool_steps.draw(case)
    D = 2 * 2 * 128 + 4 * 128
    pools, rest = (jnp.zeros((x["pool"].shape[0], D, 3)), x["pool"]), (jnp.zeros((3, D)), jnp.zeros((D, 4)))
    gates = {name: x[name] for name in ("A_log", "dt_bias")}

    def token(pools, rest, read, write, a, b, gates):
        at = dict(read_slots=read, write_slots=write)
        qkv, conv = serving.causal_conv1d_update(rest[0], pools[0], rest[1], **at)
        o, state = serving.decode_packed(qkv, a, b, pools[1], **gates, **at)
        return o, (conv, state)

    slots = x["read_slots"]
    for write, kernel_calls in ((None, 2), (slots, 4)):
        text = in_place(token, pools, rest, slots, write, x["a"][:, 0], x["b"][:, 0], gates)
        assert text.count("#stablehlo.output_operand_alias<") == kernel_calls
        assert "stablehlo.slice" not in text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"pool_dtype": "float64"}, "the pool is float64"),
        ({"dtype": "float64"}, "x is float64"),
        ({"weight_dtype": "float64"}, "weight is float64"),
        ({"D": 127}, "D = 127"),
        ({"W": 5}, "W = 5"),
    ],
)
def test_refusals_say_why(change, reason):
    call = Call(**change)
    S = jax.ShapeDtypeStruct
    x, pool = S((4, call.D), call.dtype), S((9, call.D, call.W - 1), call.pool_dtype)
    got = conv_update.check_supported(x, pool, S((call.D, call.W), call.weight_dtype), None)
    assert got is None if reason is None else reason in str(got)


def test_a_named_kernel_is_refused_without_a_gpu():
    arguments, pool = CALLS["plain"].draw()
    with pytest.raises(NotImplementedError, match="'mosaic_gpu': the default device is a cpu"):
        serving.causal_conv1d_update(pool=pool, **KERNELS, **arguments)
    with pytest.raises(ValueError, match="implementation: expected one of"):
        serving.causal_conv1d_update(pool=pool, implementation="triton", **arguments)


@pytest.mark.parametrize("D", [456, pytest.param(1024, marks=pytest.mark.slow)])
def test_any_size_gives_the_same(D):
    """A warpgroup that takes more channels, of which what is left has more than one piece."""
    x, pool, weight = (
        put(np.random.default_rng(0).random(s, np.float32)) for s in ((2, D), (2, D, 3), (D, 4))
    )
    options = dict(read_slots=None, write_slots=None, interpret=INTERPRET)
    results = [
        conv_update.conv_update(x, pool, weight, config=conv_update.Config(channels), **options)
        for channels in (128, 256)
    ]
    for want, got in zip(*results, strict=True):
        assert_same_bits(want, got)


@pytest.mark.parametrize("D", [300, 456])
def test_channels_that_are_taken_twice_are_read_before_any_is_written(D):
    """All threads meet in between. The interpreter looks for races between warpgroups, not between their threads."""
    S = jax.ShapeDtypeStruct
    x, pool, weight = S((2, D), jnp.float32), S((2, D, 3), jnp.float32), S((D, 4), jnp.float32)
    update = partial(conv_update.conv_update, read_slots=None, write_slots=None)
    traced = jax.make_jaxpr(update)(x, pool, weight)
    of_tokens = max(
        (eqn.params["branches"][1].jaxpr for eqn in eqns(traced.jaxpr) if eqn.primitive.name == "cond"),
        key=lambda branch: sum(eqn.primitive.name == "load" for eqn in branch.eqns),
    )  # the last warpgroup's, of a row that is no padding
    names = [eqn.primitive.name for eqn in eqns(of_tokens)]
    kinds = {"load": "r", "commit_smem": "|", "store": "w", "swap": "w"}  # swap: a store of JAX 0.11
    order = "".join(kinds.get(name, "") for name in names)
    assert re.fullmatch(r"r+\|w+", order), order


def test_default_sizes():
    assert [conv_update.Config.default(D).channels for D in (128, 300, 512, 640)] == [128, 128, 256, 128]
