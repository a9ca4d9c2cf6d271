"""`gdn bench --what parts`: its bytes are those of the kernels, and a tiny part and product are timed."""

import json
import math

import jax
import pytest
from programs import KERNELS, eqns

from gdn_jax import cli
from gdn_jax.bench import model_parts
from gdn_jax.bench import parts as parts_bench
from gdn_jax.bench import step as step_bench
from gdn_jax.bench.parts import PartsBenchOptions

TINY = "--model tiny --tokens 128 --length 64 --calls 2 --repeats 2".split()
CONFIG = step_bench.model_config("0.4b", (), dtype="bfloat16")
PARTS = model_parts.parts(CONFIG, 8, 8192)


def run(*words):
    return cli.main(["bench", "--what", "parts", *TINY, *words])


def test_a_part_and_a_product_are_timed(tmp_path, capsys):
    path = tmp_path / "parts.json"
    assert run("--only", "RMSNorm of each head", "from the heads", "--json", str(path)) == 0
    out = capsys.readouterr().out
    assert "TB/s" in out and "of the traffic floor" in out and "TFLOP/s" in out
    content = json.loads(path.read_text())
    assert [r["what"] for r in content["parts"]] == ["forward", "backward"]
    assert [r["work"] for r in content["parts"]] == [3 * 128 * 32 * 2, 5 * 128 * 32 * 2]  # 2 heads of 16
    assert [r["work"] for r in content["products"]] == [2 * 128 * 32 * 64] * 3
    assert content["copy_bytes_per_s"] > 0
    for r in (*content["parts"], *content["products"]):
        timing = r["timing"]
        assert 0 < timing["fastest_ms"] <= timing["median_ms"] <= timing["slowest_ms"]


@pytest.mark.slow
def test_all_parts_and_products_are_timed(tmp_path):
    path = tmp_path / "parts.json"
    assert run("--json", str(path)) == 0
    content = json.loads(path.read_text())
    assert len(content["parts"]) == 11 and len(content["products"]) == 21


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_bytes_are_what_the_kernel_reads_and_writes(part, monkeypatch):
    """The program on a GPU, traced only. Weights, and sums over some of the tokens, are small beside the rest."""
    from pallas_kernels.device import launch

    monkeypatch.setattr(launch, "device_reason", lambda: None)
    programs = [(part.forward_bytes, part.call, part.arguments)]
    if part.backward_bytes is not None:
        outputs, vjp = jax.eval_shape(lambda *x: jax.vjp(part.call, *x), *part.arguments)
        programs.append((part.backward_bytes, lambda vjp, x: vjp(x), (vjp, outputs)))
    for expected, call, arguments in programs:
        if expected is None:
            continue
        kernels = [
            eqn for eqn in eqns(jax.make_jaxpr(call)(*arguments).jaxpr) if eqn.primitive.name in KERNELS
        ]
        (kernel,) = [eqn for eqn in kernels if eqn.params["name"].startswith(part.kernels)]
        arrays = [x.aval for x in (*kernel.invars, *kernel.outvars)]
        moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
        assert expected <= moved <= 1.03 * expected
        kind = next(kind for kind, names in step_bench.KINDS if names.search(kernel.params["name"]))
        assert kind in ("products", "fused parts")


def test_products_are_those_of_the_model():
    """All weights of the 0.4b model but the embedding, filters, norms and gates' offsets are multiplied by."""
    weights = {p.name: p.inputs * p.outputs for p in model_parts.products(CONFIG, 65536)}
    layer = sum(n for name, n in weights.items() if "logits" not in name)
    assert layer == 1024 * (3 * 1024 + 16 + 1024 + 1024 + 3 * 2736)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--length 60", "--length: expected a divisor of --tokens 128, got 60"),
        ("--calls 0", "--calls: expected at least 1, got 0"),
        ("--only flight", "--only: expected parts of names such as residual sum and RMSNorm"),
        ("--json nowhere/parts.json", "--json: expected a file in a folder that exists"),
    ],
)
def test_wrong_options_are_one_line(options, message, capsys):
    assert run(*options.split()) != 0
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_kernels_of_a_profile_are_summed(monkeypatch):
    """Those whose names begin as asked, call by call; a call with another number of them is refused."""
    from gdn_jax.bench import device_time

    runs = [("swiglu", 0, 2e6), ("nvjet", 2e6, 9e6), ("swiglu", 9e6, 10e6), ("swiglu", 20e6, 24e6)]
    runs += [("nvjet", 24e6, 25e6), ("swiglu", 25e6, 26e6)]
    found = [device_time.Kernel(start, end, name) for name, start, end in runs]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(device_time, "profile", lambda run, calls: None)
    monkeypatch.setattr(device_time, "kernels", lambda profile: found)
    options = PartsBenchOptions(repeats=2)
    timing = parts_bench._time(lambda: None, options, "swiglu")
    assert (timing.median_ms, timing.fastest_ms, timing.slowest_ms) == (4, 3, 5)
    assert timing.kernels == (("swiglu", 3), ("swiglu", 1))
    assert parts_bench._time(lambda: None, options).slowest_ms == 10
    for names in ("cross_entropy", "swiglu"):
        found.pop()
        with pytest.raises(ValueError, match="the same kernels"):
            parts_bench._time(lambda: None, options, names)
