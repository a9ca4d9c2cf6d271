"""`gdn bench devices`: the report of a device, what is wrong in it, and the plans."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from bench_tables import cells, run
from flax import nnx

from gdn_jax.bench import devices, measure, one_token
from gdn_jax.bench.devices import PLANS, DevicesBenchmark
from gdn_jax.bench.measure import Timing
from gdn_jax.bench.model_parts import Part
from gdn_jax.checks import cases
from gdn_jax.commands import cli

WIDE = jax.ShapeDtypeStruct((4, 8), jnp.float32)


@pytest.fixture
def little(monkeypatch):
    """A plan with one case of the rule, one part and no more, and a clock that says 1 ms."""
    plan = PLANS["small"]._replace(
        cases=("channels-mild",),
        decode=dataclasses.replace(PLANS["small"].decode, batches=()),
        prefill=dataclasses.replace(PLANS["small"].prefill, tokens=()),
        of_one_row=(),
        table=(),
    )
    monkeypatch.setitem(PLANS, "small", plan)
    part = Part("sine", jnp.sin, (WIDE,), 0, 0)
    monkeypatch.setattr(devices, "parts", lambda *_: [part])
    monkeypatch.setattr(measure, "measure", lambda *_: Timing(1.0, 0.9, 1.2))
    return monkeypatch


def test_report(little):
    """Markdown on a terminal too: a line for each case, the device above it, and below it what did not run."""
    status, text, progress = run(DevicesBenchmark(plan="small"), width=60, force_terminal=True)
    assert status == 0 and text.startswith("### gdn bench devices: ok\n")
    assert (
        f"- device: {jax.device_count()} x {jax.devices()[0].device_kind}" in text
        and f"jax {jax.__version__}" in text
    )
    lines = cells(text)
    assert [(line["case"], line["by"], line["result"], line["ms"]) for line in lines] == [
        ("channels-mild, bfloat16", "chunked", "ok", ""),
        ("channels-mild, bfloat16", "recurrent", "ok", ""),
        ("sine", "plain JAX", "ok", "1"),
    ]
    assert 1e-4 < float(lines[0]["error"]) < 1e-2 and float(lines[2]["error"]) < 1e-6
    assert re.search(r"not run: .*`mosaic_mma`.*: the default device is a cpu", text)
    assert "by recurrent: ok" in progress


def test_what_is_wrong_is_a_line(little):
    """One part whose derivative is wrong, and one that raises."""
    wrong = jax.custom_jvp(jnp.sin)
    wrong.defjvp(
        lambda x, dx: (jnp.sin(x[0]), (jnp.cos(x[0]) * (1.1 if x[0].dtype == jnp.float32 else 1)) * dx[0])
    )
    parts = [Part("wrong", wrong, (WIDE,), 0, 0), Part("broken | part", lambda x: x.missing, (WIDE,), 0, 0)]
    little.setattr(devices, "parts", lambda *_: parts)
    status, text, _ = run(DevicesBenchmark(plan="small"))
    assert status == 1 and text.startswith("### gdn bench devices: 2 of 4 failed\n")
    assert "| wrong: result 1 1.0e-01 > 2.0e-02" in text
    assert "FAILED what part, case wrong, by plain JAX: wrong: result 1" in text
    assert "raised AttributeError: " in text


def test_a_token_of_a_model(little):
    """It misses the definition by what plain JAX does; a copy for single tokens that is another model is wrong."""
    little.setitem(PLANS, "small", PLANS["small"]._replace(cases=(), of_one_row=("tiny",)))
    little.setattr(devices, "parts", lambda *_: [])
    status, text, _ = run(DevicesBenchmark(plan="small"))
    (line,) = cells(text)
    assert status == 0 and (line["what"], line["case"], line["by"]) == (
        "token of one row",
        "tiny",
        "plain JAX",
    )
    assert 1e-4 < float(line["error"]) < 1e-2

    copies = []

    def other(model, rows):
        copies.append(model)
        if len(copies) == 1:  # the one that is compared; the second one says what plain JAX misses
            model = nnx.clone(model)
            model.embedding.set_value(model.embedding[...] * 1.02)
        return model

    little.setattr(one_token, "for_decoding", other)
    status, text, _ = run(DevicesBenchmark(plan="small"))
    assert status == 1 and "| wrong: logits " in text


def test_a_part_without_a_backward_is_called_alone(little):
    """Of such a part, as of the loss, a GPU has no second derivative."""
    once = jax.custom_vjp(lambda x: x)
    once.defvjp(pytest.fail, pytest.fail)
    part = Part("once", lambda x: once(x) + 1, (WIDE,), 0, None)
    little.setattr(devices, "parts", lambda *_: [part])
    status, text, _ = run(DevicesBenchmark(plan="small"))
    assert status == 0 and cells(text)[-1]["case"] == "once"


def test_plans():
    """Cases of the table, and options that the benchmarks take."""
    for plan in PLANS.values():
        assert {*plan.cases} <= {*cases.CASES}
        plan.decode.check()
        plan.prefill.check()
    assert {(row.name, what) for row, what in PLANS["full"].table} >= {
        ("16,64 1x32768", "forward"),
        ("16,32 4096x8", "forward"),
        ("2,8 1x32768", "training"),
    }


@pytest.mark.slow
def test_the_command(capsys):
    """On a CPU: all of the small sizes, in plain JAX."""
    assert cli.main(["bench", "devices", "--repeats", "1", "--plan", "small"]) == 0
    out = capsys.readouterr().out
    kinds = {line["what"] for line in cells(out)}
    assert kinds == {"rule, both passes", "tokens", "prompts", "part", "token of one row", "rule, timed"}
