"""`gdn bench parts`: its bytes are those of the kernels, and a tiny part and product are timed."""

import json
import math

import jax
import pytest
from programs import KERNELS, eqns

from gdn_jax.bench import model_parts, sizes
from gdn_jax.bench import step as step_bench
from gdn_jax.commands import cli

TINY = "--model tiny --tokens 128 --length 64 --calls 2 --repeats 2".split()
CONFIG = sizes.model_config("0.4b", dtype="bfloat16")
PARTS = model_parts.parts(CONFIG, 8, 8192)


def run(*words):
    return cli.main(["bench", "parts", *TINY, *words])


@pytest.mark.usefixtures("ticking_clock")
def test_a_part_and_a_product_are_timed(tmp_path, capsys):
    """A measurement has two calls, each of half a second."""
    path = tmp_path / "parts.json"
    assert run("--only", "RMSNorm of each head", "from the heads", "--json", str(path)) == 0
    out = capsys.readouterr().out
    assert "TB/s" in out and "x floor" in out and "TFLOP/s" in out
    copy, forward, backward, *products = results = json.loads(path.read_text())["results"]
    assert copy["part"] == "copy" and [r["pass"] for r in (forward, backward)] == ["forward", "backward"]
    copied = 2 * 128 * 2 * sizes.model_config("tiny").mlp_size * 4  # read and written
    assert copy["TB/s"] == pytest.approx(copied / 0.5 / 1e12)
    for r, passes in ((forward, 3), (backward, 5)):  # over 2 heads of 16
        assert r["GB"] == passes * 128 * 32 * 2 / 1e9
        assert r["x floor"] == pytest.approx(copied / (passes * 128 * 32 * 2))
    assert [r["pass"] for r in products] == ["forward", "input", "weights"]
    for r in products:
        assert r["TFLOP/s"] == pytest.approx(2 * 128 * 32 * 64 / 0.5 / 1e12)
    assert all(r["fastest"] == r["ms"] == r["slowest"] == 500 for r in results)


@pytest.mark.slow
def test_all_parts_and_products_are_timed(tmp_path):
    path = tmp_path / "parts.json"
    assert run("--json", str(path)) == 0
    assert len(json.loads(path.read_text())["results"]) == 1 + 11 + 21


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_bytes_are_what_the_kernel_reads_and_writes(part, monkeypatch):
    """The program on a GPU, traced only. Weights, and sums over some of the tokens, are small beside the rest."""
    from pallas_kernels.device import launch

    monkeypatch.setattr(launch, "device_reason", lambda *_: None)
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
