"""Inputs that other libraries' tests draw and the table of cases does not, against the oracle.

Sources: fla tests/ops/test_gdn.py (bc3b101), FlashQLA tests/test_gdn.py (c18a486), FlashInfer tests/gdn (fb28d72),
Levanter's tests of its kernel, MaxText's `qwen3_next_vs_reference_test` (e591f30). Sizes are small here.
"""

import dataclasses

import harness
import numpy as np
import pytest

from gdn_jax.checks import cases

CASE = cases.Case("peers", T=41, B=1, heads=(1, 1, 2), K=6, V=4, chunk_size=16)
PACKED = dataclasses.replace(CASE, lengths=(7, 0, 15, 9))  # the last ten tokens are of no sequence
RNG = np.random.default_rng(0)
SHAPE = (1, 41, 2)


def softplus(x):
    return np.logaddexp(0, x)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def log_sigmoid(x):
    return -softplus(-x)


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


positive = {
    name: RNG.random((1, 41, heads, width)) for name, heads, width in (("q", 1, 6), ("k", 1, 6), ("v", 2, 4))
}
positive |= {"k": unit(positive["k"]), "q": unit(positive["q"]), "beta": sigmoid(RNG.random(SHAPE))}
gates = log_sigmoid(RNG.random(SHAPE))

CHANGES = {
    # fla: q, k and v are positive; a normaliser makes decays of 1e-2 to 70 a token; a mask leaves out half of them.
    **{f"fla-normaliser-{n}": positive | {"g": gates / n} for n in (0.01, 0.1, 1, 10)},
    "fla-half-masked": positive | {"g": np.where(RNG.random(SHAPE) < 0.5, 0, gates)},
    "fla-all-masked": positive | {"g": np.zeros(SHAPE)},
    # FlashQLA: a head that never decays beside one of the strongest rate.
    "flashqla": {"g": -np.array([0.0, 16.0]) * softplus(0.5 * RNG.standard_normal(SHAPE) + 1)},
    # FlashInfer: a gate so negative that the decay is 0 in float32 but for some tokens.
    "flashinfer-saturated": {"g": np.where(RNG.random(SHAPE) < 0.8, -200.0, -0.01)},
    # Levanter: strong decays, with strengths near 0 and near 1.
    "levanter-weak": {"g": RNG.uniform(-8, -2, SHAPE), "beta": np.full(SHAPE, 1e-4)},
    "levanter-full": {"g": RNG.uniform(-8, -2, SHAPE), "beta": np.full(SHAPE, 1 - 1e-6)},
    # MaxText: log decays of either sign. They are not checked, and are computed as they are.
    "maxtext": {"g": 0.1 * RNG.standard_normal(SHAPE)},
}


@pytest.mark.slow
@pytest.mark.parametrize("form", harness.CHUNKED_FIRST)
@pytest.mark.parametrize("case", [pytest.param(CASE, marks=pytest.mark.slow), PACKED], ids=["row", "packed"])
def test_inputs_of_peers(case, form):
    """Outputs and gradients; one program for all of them."""
    plain, told = cases.inputs(case), []
    for name, change in CHANGES.items():
        x = plain._replace(**{key: value.astype(np.float32) for key, value in change.items()})
        try:
            # Not a case of the table, whose condition is known: the plain bounds.
            harness.check(
                dataclasses.replace(case, name=name), x, "float32", harness.evaluate(form, case.options, x)
            )
        except AssertionError as error:
            told.append(str(error).splitlines()[0])
    assert not told, "\n".join(told)


@pytest.mark.slow
@pytest.mark.parametrize("form", harness.CHUNKED_FIRST)
def test_split_where_levanter_splits(form):
    """Into 21 tokens and the rest, which is no multiple of a chunk."""
    x = cases.inputs(CASE)
    whole = harness.evaluate(form, CASE.options, x)

    def part(at, state):
        y = {name: getattr(x, name)[:, at] for name in ("q", "k", "v", "g", "beta", "do")}
        return x._replace(**y, initial_state=state)

    first = harness.evaluate(form, CASE.options, part(slice(0, 21), x.initial_state))
    second = harness.evaluate(form, CASE.options, part(slice(21, None), first["final_state"]))
    np.testing.assert_allclose(np.concatenate([first["o"], second["o"]], 1), whole["o"], atol=2e-6)
    np.testing.assert_allclose(second["final_state"], whole["final_state"], atol=2e-6)
