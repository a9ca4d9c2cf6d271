"""A decay of each channel, and erase and write apart, in what they have beside gates of each head.

The cases of these gates against the oracle stand with the others, in `test_chunked.py` and `test_reference.py`.
"""

import dataclasses
import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
from tolerances import assert_close, bound

from gdn_jax import delta_rule, gated_delta_rule
from gdn_jax.checks import cases, oracle

CASES = cases.CASES


def test_equal_channels_are_the_gated_delta_rule():
    """Of the oracle to 1e-12, where erase and write are beta too; and of the chunked forms to 1e-6."""
    x = cases.inputs(CASES["slow-decay"])
    g = np.repeat(x.g[..., None], x.k.shape[-1], -1)
    channels = x._replace(g=g)
    apart = channels._replace(beta=None, erase=np.repeat(x.beta[..., None], x.k.shape[-1], -1), write=x.beta)
    truth, ours, split = (harness.truth({}, y) for y in (x, channels, apart))
    for name in ("o", "final_state", "dq", "dk", "dv", "dh_0"):
        assert_close(truth[name], ours[name], 1e-12, name)
        assert_close(truth[name], split[name], 1e-12, name)
    assert_close(truth["dbeta"], ours["dbeta"], 1e-12, "dbeta")
    assert_close(truth["dbeta"], split["derase"].sum(-1) + split["dwrite"], 1e-12, "dbeta")
    for y in (ours, split):
        assert_close(truth["dg"], y["dg"].sum(-1), 1e-12, "dg")
    heads, of_channels = (harness.evaluate("chunked", CASES["slow-decay"].options, y) for y in (x, channels))
    for name in ("o", "final_state"):
        assert_close(heads[name], of_channels[name], 1e-6, name)


def test_a_gate_of_each_head_runs_the_gated_delta_rule():
    """The same bits, and the same program."""
    x = cases.inputs(CASES["gate-of-a-head-erase-a-channel"])
    arguments = *map(jnp.asarray, (x.q, x.k, x.v, x.g)), None
    ours = jax.jit(delta_rule).lower(*arguments).as_text()
    assert ours.replace("jit_delta_rule", "") == (
        jax.jit(gated_delta_rule).lower(*arguments).as_text().replace("jit_gated_delta_rule", "")
    )


def test_no_gate_reaches_back():
    """Changing gates after token t leaves every output up to t as it is, bit for bit, for every kind of gates."""
    case = cases.Case("causal", T=64, B=1, heads=(1, 1, 1), K=16, V=8)
    kinds = ("mild", "bound", "-5", "kinds", "some -inf")
    rows = [cases.inputs(dataclasses.replace(case, channel_g=kind)) for kind in kinds]
    q, k, v, g, beta = (np.concatenate([getattr(x, name) for x in rows]) for name in harness.PRIMALS[:5])
    rule = jax.jit(functools.partial(delta_rule, chunk_size=64, implementation="chunked"))
    o = np.asarray(rule(q, k, v, g, beta)[0])
    for t in (0, 3, 7, 15, 16, 20, 31, 32, 45, 62):
        changed = g.copy()
        changed[:, t + 1 :] = 0.3 * np.where(np.isinf(g[:, t + 1 :]), -1.0, g[:, t + 1 :]) - 0.01
        again = np.asarray(rule(q, k, v, changed, beta)[0])
        np.testing.assert_array_equal(again[:, : t + 1], o[:, : t + 1], err_msg=f"token {t}")


def test_strong_gates_have_their_own_gradient():
    """dg at tokens of -20 is tiny, and right by its own size: sums that ought to cancel would drown it."""
    case = CASES["channels-mild"]
    x = cases.inputs(case)
    strong = np.arange(5, 130, 23)
    x.g[:, strong] = -20
    truth = oracle.gradients(**x.arguments, do=x.do, dh_T=x.dh_T).dg
    got = harness.evaluate("chunked", case.options, x)["dg"]
    assert_close(truth[:, strong], got[:, strong], bound("dg", "float32"))
