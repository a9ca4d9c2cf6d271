"""Devices that the kernels in use do not run on: every call in plain JAX, without an error, with one reason."""

import types
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import gdn_jax
from gdn_jax import cli, serving
from gdn_jax.bench import measure
from gdn_jax.bench.rule import RuleBenchmark
from gdn_jax.layers import GatedDeltaNet
from gdn_jax.training import kernels, peak

REASON = "compute capability 8.9; the kernels in use need 9.0"


@pytest.fixture
def rtx_4090(monkeypatch):
    """JAX's default device says that it is one."""
    devices = [
        types.SimpleNamespace(platform="gpu", compute_capability="8.9", device_kind="NVIDIA GeForce RTX 4090")
    ]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def tokens(*, B=2, T=64, D=64):
    """q, k, v, g and beta of a call."""
    return *[jnp.ones((B, T, 2, D), jnp.bfloat16)] * 3, *[jnp.zeros((B, T, 2))] * 2


def kernels_of(function, *arguments) -> int:
    """Kernels of ours in a function of arguments."""
    return str(jax.make_jaxpr(function)(*arguments)).count("mosaic_gpu")


def test_the_rule_says_why(rtx_4090):
    x = tokens()
    assert gdn_jax.supported_implementations(*x) == {
        "mosaic_gpu": REASON,
        "chunked": None,
        "recurrent": None,
    }
    with pytest.raises(NotImplementedError, match=REASON):
        jax.eval_shape(partial(gdn_jax.gated_delta_rule, implementation="mosaic_gpu"), *x)
    assert not kernels_of(gdn_jax.gated_delta_rule, *x)


def test_layers_and_serving_run_in_plain_jax(rtx_4090):
    graphdef, parameters = nnx.split(
        GatedDeltaNet(128, num_heads=2, head_dim=64, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    )

    def loss(parameters, x):
        return nnx.merge(graphdef, parameters)(x)[0].astype(jnp.float32).sum()

    assert not kernels_of(jax.grad(loss), parameters, jnp.ones((2, 64, 128), jnp.bfloat16))
    (q, k, v, gate, _), pool = (y[:, 0] for y in tokens()), jnp.zeros((4, 2, 64, 64))
    head = dict(A_log=jnp.zeros(2), dt_bias=jnp.zeros(2), read_slots=jnp.arange(2))
    assert not kernels_of(partial(serving.decode, **head), q, k, v, gate, gate, pool)


def test_benchmarks_time_the_plain_forms(rtx_4090, monkeypatch, capsys):
    monkeypatch.setattr(measure, "on_gpu", lambda: True)
    monkeypatch.setattr("gdn_jax.bench.rule.on_gpu", lambda: True)
    benchmark = RuleBenchmark(rows=("16,32 1x32768",), passes=("forward",))
    benchmark.check()
    rows, dtype, implementations = benchmark.plan()
    assert {(row.lengths, what) for row, what in rows} == {((32768,), "forward")}
    assert (dtype, implementations) == ("bfloat16", ("chunked",))
    assert peak.of_device(peak.PEAK_FLOPS) is None
    assert cli.main(["bench", "kernels"]) != 0
    assert REASON in capsys.readouterr().err


def test_training_says_why(rtx_4090, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert kernels.note() == f"note: plain JAX, without kernels: {REASON}"
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
