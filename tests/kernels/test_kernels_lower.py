"""The kernels of the rule without a GPU: every program lowers for one, alone and inside of the public call."""

import re

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import gdn_jax
from gdn_jax.checks import cases
from gdn_jax.checks.check import value_and_gradients
from gdn_jax.rule import seam
from gdn_jax.rule.call import Arrays, Call
from gdn_jax.shapes import Dims
from pallas_kernels.device import launch
from pallas_kernels.device.needs import Needs
from pallas_kernels.forward import rule as forward_rule
from pallas_kernels.tools import calls
from pallas_kernels.tools.calls import CALLS
from pallas_kernels.tools.compiling import _modules

SLOW_CALLS = (
    "rule, packed", "rule, pool", "rule, open", "channels, packed, segments", "channels, backwards"
)  # fmt: skip


def usual(name: str) -> bool:
    """Each kernel in its usual form, whole and packed."""
    if name.startswith(("rule", "channels")):
        return name in ("rule", "rule, normalised", "channels", *SLOW_CALLS)
    return not re.search(r", (?!T 8).*,|K \d|float16|segments", name)


LOWERED = [name for name in CALLS if CALLS[name].needs != Needs.MMA]


@pytest.mark.parametrize(
    "name", harness.tiers(LOWERED, {*filter(usual, LOWERED)} - {*SLOW_CALLS}, SLOW_CALLS)
)
def test_lowers_for_compute_capability_9(name):
    """With wgmma in it only where the kernels say that they need it."""
    lowered = CALLS[name].lower()
    assert lowered.as_text().count("mosaic_gpu") >= 1
    has_wgmma = any(b"wgmma" in module for module in _modules(lowered))
    assert has_wgmma == (Needs.WGMMA in CALLS[name].needs)


def gradients_lower(
    heads=(2, 2, 2), T=256, N=None, dtype=jnp.bfloat16, specs=None, transform=lambda f: f, **options
) -> str:
    """The public call and its gradients, lowered for an NVIDIA GPU: two rows, or N packed sequences.

    specs: how q, k, v, g, beta and the initial state lie on a mesh of two devices, for shard_map.
    transform: of the call.
    options: of the call.
    """
    B, (Hq, Hk, HV), K = 2 if N is None else 1, heads, 64
    S, f32, HO = jax.ShapeDtypeStruct, jnp.float32, max(heads)
    q, k, v = (S((B, T, H, K), dtype) for H in (Hq, Hk, HV))
    gate, state = S((B, T, HO), f32), S((N or B, HO, K, K), f32)
    cu = None if N is None else S((N + 1,), jnp.int32)

    @transform
    def call(q, k, v, g, beta, state, cu):
        states = dict(initial_state=state, cu_seqlens=cu)
        return gdn_jax.gated_delta_rule(
            q, k, v, g, beta, **states, implementation="mosaic_gpu", use_qk_l2norm=True, **options
        )

    if specs is not None:
        mesh = jax.make_mesh((2,), ("shard",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
        in_specs, out_specs = (*specs, PartitionSpec()), (specs[0], specs[-1])
        call = jax.shard_map(call, mesh=mesh, in_specs=in_specs, out_specs=out_specs)

    def both(inputs, cotangents, cu):
        outputs, vjp = jax.vjp(lambda *inputs: call(*inputs, cu), *inputs)
        return outputs, vjp(cotangents)

    arguments = ((q, k, v, gate, gate, state), (S((B, T, HO, K), dtype), state), cu)
    if transform is jax.vmap:
        arguments = jax.tree.map(lambda x: S((4, *x.shape), x.dtype), arguments)
    return jax.jit(both).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (calls.channels_call, dict(T=256, packed=True, N=2, segment_chunks=1, layout="kv")),
        (calls.mma_call, dict(layout="vk")),
    ],
    ids=["channels in segments", "mma"],
)
def test_states_are_not_square(make, options):
    """With K other than V a state in the wrong layout has the wrong shape, and its kernel does not lower."""
    assert make(K=64, V=128, **options).lower().as_text().count("mosaic_gpu") >= 1


ROWS, HEADS, REPLICATED = PartitionSpec("shard"), PartitionSpec(None, None, "shard"), PartitionSpec()


OVER_HEADS = (*(HEADS,) * 5, PartitionSpec(None, "shard"))


@pytest.mark.parametrize(
    ("options", "sums"),
    [
        pytest.param(dict(specs=(ROWS,) * 6), 0, id="rows", marks=pytest.mark.crossed),
        pytest.param(
            dict(specs=(ROWS,) * 6, transform=jax.vmap), 0, id="rows, vmap inside", marks=pytest.mark.slow
        ),
        pytest.param(
            dict(specs=(HEADS, REPLICATED, *OVER_HEADS[2:]), heads=(2, 1, 2), dtype=jnp.float16),
            1,
            id="heads, one key head for all",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            dict(specs=OVER_HEADS, N=3, T=32768), 0, id="heads, packed in segments", marks=pytest.mark.crossed
        ),
    ],
)
def test_public_call_lowers_inside_shard_map(options, sums, monkeypatch):
    """With gradients, of which those of a replicated input are summed over the devices."""
    if jax.device_count() < 2:
        pytest.skip("needs two devices, JAX sees one")
    monkeypatch.setattr(launch, "device_reason", lambda *_: None)
    text = gradients_lower(**options)
    assert "mosaic_gpu" in text
    assert text.count("all_reduce") == sums


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(dict(transform=jax.vmap), id="vmap", marks=pytest.mark.crossed),
        pytest.param(dict(N=30, T=2048, dtype=jnp.float16), id="packed"),
    ],
)
@pytest.mark.slow
def test_public_call_lowers_with_64_bits(options, monkeypatch):
    monkeypatch.setattr(launch, "device_reason", lambda *_: None)
    with jax.enable_x64(True):
        assert "mosaic_gpu" in gradients_lower(**options)


@pytest.mark.parametrize(
    ("change", "reason"),
    [(dict(dtype=jnp.float32), "float32"), (dict(chunk_size=32), "64"), (dict(T=0), "no tokens")],
)
def test_refusals_say_why(change, reason):
    sizes = dict(B=1, T=64, N=1, Hq=1, Hk=1, HV=1, HO=1, K=64, V=64)
    sizes |= {name: value for name, value in change.items() if name in sizes}
    call = dict(dtype=jnp.bfloat16) | {name: value for name, value in change.items() if name not in sizes}
    assert reason in forward_rule.check_supported(Dims(**sizes), **call)
    assert forward_rule.check_supported(Dims(**sizes | dict(T=64)), jnp.bfloat16) is None


def test_no_gpu_is_a_reason():
    if jax.default_backend() != "gpu":
        assert "cpu" in launch.device_reason()


PROGRAMS = [
    cases.CASES[name]
    for name in (
        "one-token",
        "chunk-less-one-no-g-K60-V100",
        "chunk-and-one-l2norm-K96-V192",
        "groupings-that-do-not-nest",
        "K256-V256",
        "no-gates-no-initial-state",
        "scale-0",
        "packed-strong-decay",
        "packed-vk-l2norm-scale-1-no-state",
        "segments-no-state-three-groupings",
    )
]
"""Every kind of length, grouping, width and option that the table has, in one case at least: programs depend on these
and not on values."""


SLOW_PROGRAMS = ("packed-vk-l2norm-scale-1-no-state", "segments-no-state-three-groupings")


@pytest.mark.parametrize("case", harness.tiers(PROGRAMS, (), SLOW_PROGRAMS))
def test_gradients_of_the_public_call_are_those_of_the_kernels(case, monkeypatch):
    """Asked for by name, the kernels run forward and backward, whatever the scale and the shapes, and no other
    form."""
    monkeypatch.setattr(launch, "device_reason", lambda *_: None)
    x = jax.tree.map(lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype), cases.inputs(case, "bfloat16"))
    call = jax.jit(value_and_gradients("mosaic_gpu", case.options))
    traced = call.trace(x[:6], (x.do, x.dh_T), x.cu_seqlens, x.segment_ids)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    kernels = [name for name in re.findall(r"\\00(\w+)_mosaic_gpu\\00", text) if name != "stable"]
    assert len(kernels) == text.count("custom_call @mosaic_gpu")
    forward, backward = ["chunk_gates", "gated_inverse", "outputs"], ["chains", "gradients"]
    assert kernels == forward + backward + ["gradients"] * (case.K > 128)
    assert "dot_general" not in text


@pytest.mark.parametrize("scale", [0.0, -2.0, 1e-6, 1e3, "traced"])
def test_scales_that_the_kernels_do_not_hold(scale, monkeypatch):
    """They are factors of what the kernels give, also of its gradients."""
    monkeypatch.setattr(seam, "rule", lambda call, x: (call.scale * x.v, x.k.swapaxes(1, 2)))
    x = [jnp.ones((1, 4, 2, 8), jnp.bfloat16)] * 3
    factor = 3.0 if scale == "traced" else scale

    def call(v, factor):
        rule, static, rest = seam.program(Call(False, "kv"), factor)
        return rule(static, Arrays(x[0], x[1], v, *[None] * 6), *rest)[0]

    o, vjp = jax.vjp(lambda v: call(v, jnp.float32(factor) if scale == "traced" else factor), x[2])
    np.testing.assert_allclose(np.asarray(o, np.float32), factor, rtol=4e-3)  # rounded to bfloat16
    np.testing.assert_allclose(np.asarray(vjp(o)[0], np.float32), factor**2, rtol=8e-3)
