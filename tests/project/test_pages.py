"""Numbers of the pages that a CPU can make again, and that no other test makes: sizes and bytes, from the code."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from release import package

from gdn_jax import gated_delta_rule, serving
from gdn_jax.bench import measure, passes
from gdn_jax.bench.rows import Row, inputs
from gdn_jax.bench.sizes import model_config
from gdn_jax.checks import check
from gdn_jax.models.costs import parameters
from gdn_jax.parallel import exchange
from gdn_jax.rule.chunks.stages import Numerics
from gdn_jax.shapes import Dims

DOCS = package.ROOT / "docs"


def numbers(page: str, pattern: str) -> list[float]:
    """The groups of the one place of a page where the words of a pattern stand, however its lines are broken."""
    text = " ".join((DOCS / page).read_text().split())
    (found,) = re.findall(pattern, text)
    return [float(x.replace(",", "")) for x in found]


def test_tokens_up_to_which_heads_are_exchanged():
    """Four and eight devices, 16 key and 32 value heads of width 128 in 16 bits."""
    said = numbers(
        "scaling.md", r"up to ([\d,]+) tokens on each of four devices and ([\d,]+) on each of eight"
    )
    for devices, tokens in zip((4, 8), said, strict=True):
        dims = partial(Dims, 1, N=1, Hq=16, Hk=16, HV=32, HO=32, K=128, V=128)
        assert exchange.pays(dims(T=int(tokens)), 2, devices)
        assert not exchange.pays(dims(T=int(tokens) + 1), 2, devices)


def test_kibibytes_of_a_head_with_a_ring():
    """States in float32, bfloat16 and int8, and the requests that the last has room for."""
    *said, ratio = numbers(
        "serve.md", r"takes ([\d.]+) KiB, ([\d.]+) KiB and ([\d.]+) KiB: int8 has room for ([\d.]+) times"
    )

    def pool(dtype):
        states = jnp.zeros((1, 2, 128, 128), jnp.float32 if dtype == "int8" else dtype)
        states = serving.make_byte_states(states) if dtype == "int8" else states
        return serving.make_ring_pool(states, num_key_heads=1, length=16)

    of_a_head = []
    for dtype in ("float32", "bfloat16", "int8"):
        leaves = jax.tree.leaves(jax.eval_shape(partial(pool, dtype)))
        of_a_head.append(sum(x.size * x.dtype.itemsize for x in leaves) / 2 / 1024)
    assert [round(x, 1) for x in of_a_head] == said
    assert round(of_a_head[1] / of_a_head[2], 2) == ratio


def test_parameters_of_the_models_that_are_timed():
    small, large = numbers(
        "log/tables.md", r"vocabulary of 32768: ([\d.]+) billion .*?32000: ([\d.]+) billion"
    )
    for name, said, digits in (("0.4b", small, 3), ("1.3b", large, 2)):
        assert round(sum(parameters(model_config(name)).values()) / 1e9, digits) == said


@pytest.mark.slow
def test_temporary_memory_of_the_chunked_form_on_a_cpu():
    """The row of CPU cores, by the compiler's account, which differs a little between versions of JAX."""
    *said, _ = numbers(
        "log/tables.md",
        r"1x2048, 4 heads, K = V = 64 \|.*?\| ([\d.]+) / [\d.]+ MiB \| ([\d.]+) / ([\d.]+) MiB",
    )
    x = inputs(Row(4, 4, (2048,), width=64), "float32")
    rule = partial(gated_delta_rule, implementation="chunked")
    found = []
    for what in ("forward", "training"):
        step, args = passes.steps(what, lambda tokens, state: rule(*tokens, initial_state=state), x)
        found.append(measure.temporary_gib(measure.compiled(step, *args)) * 1024)
    assert found == pytest.approx(said, rel=0.05)


@pytest.mark.slow
def test_errors_of_the_chunked_form_as_on_a_gpu(monkeypatch):
    """v_new is rounded to the operands' dtype there."""
    worst = numbers("accuracy.md", r"are at most (\S+) in o \(K = V = 1\) and (\S+) in dv \(repeated keys\)")
    monkeypatch.setattr(Numerics, "kept", property(lambda numerics: numerics.operand))
    rows = check.compare(("K1-V1", "repeated-keys"), ("bfloat16",)).rows
    errors = {row.case: row.errors for row in rows if row.implementation == "chunked"}
    assert [errors["K1-V1"]["o"], errors["repeated-keys"]["dv"]] == pytest.approx(worst, rel=0.1)
