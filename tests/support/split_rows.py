"""A row whose tokens two devices have, by the kernels of `rule.kernels.passing`, on one device."""

from typing import Any

import erasures
import jax.numpy as jnp
import numpy as np
from device_arrays import put
from tolerances import GRADIENTS, STRENGTHS, assert_close, head_axis, tolerance

from gdn_jax.checks import cases, oracle
from gdn_jax.parallel.borders import Borders
from gdn_jax.rule.call import APART, CHANNELS, ERASURES, HEADS, Arrays, Call
from gdn_jax.rule.halves import with_strengths
from gdn_jax.rule.kernels.channels import Channels
from gdn_jax.rule.kernels.hopper import Hopper
from gdn_jax.rule.kernels.passing import KernelPassing


def drawn(case: cases.Case, interpret: Any = None) -> tuple[cases.Inputs, dict, KernelPassing, list]:
    """Inputs, the results of the oracle, the kernels, and the arrays of tokens of a call."""
    x = cases.inputs(case, "bfloat16")
    expected = oracle.evaluate(**x.arguments, **case.rule_options, do=x.do, dh_T=x.dh_T)
    gates = HEADS if case.channel_g is None else CHANNELS if x.erase is None else APART
    call = Call(use_qk_l2norm=False, state_layout="kv", gates=gates, scale=case.K**-0.5)
    kernels = KernelPassing(call, Hopper() if gates == HEADS else Channels(), interpret)
    strengths = (x.erase, x.write) if gates == APART else (x.beta, None)
    return x, expected, kernels, [None if y is None else put(y) for y in (*x[:4], *strengths)]


def drawn_in_halves(
    case: cases.Case, interpret: Any = None
) -> tuple[cases.Inputs, dict, KernelPassing, list]:
    """`drawn` of a call with an erasure before each write. The results of the oracle have the names of `NAMES`."""
    x = erasures.inputs(case, "bfloat16")
    call = Call(use_qk_l2norm=case.use_qk_l2norm, state_layout="kv", gates=ERASURES, scale=case.K**-0.5)
    tokens = [put(y) for y in (*x.x[:4], with_strengths(put(x.strength), put(x.x.beta)), x.key)]
    expected = x.expected()
    return (
        x.x,
        expected | {"dh_0": expected["dinitial_state"]},
        KernelPassing(call, Channels(), interpret),
        tokens,
    )


def in_two_parts(kernels: KernelPassing, x: cases.Inputs, tokens: list) -> dict[str, Any]:
    """Results and gradients of one row, by name. Rows know nothing of one another, so that what each device has of
    one row are two rows of a call; what travels is handed over."""
    T = x.q.shape[1] // 2
    state, dh_T = put(x.initial_state), put(x.dh_T)
    *tokens, do = (None if y is None else jnp.concatenate([y[:, :T], y[:, T:]]) for y in (*tokens, put(x.do)))
    yes = put(True)
    borders = Borders(None, None, yes, yes, yes)

    begins = jnp.concatenate([state, jnp.zeros_like(state)])
    affine, rest = kernels.forward(Arrays(*tokens, begins, None, None), begins, borders)
    (o, final), saved = rest(jnp.concatenate([state, affine.e[:1]]))
    ends = jnp.concatenate([jnp.zeros_like(dh_T), dh_T])
    de, rest = kernels.backward(saved, borders, do, ends)
    gradients = rest(jnp.concatenate([de[1:], dh_T]))

    got = {"o": jnp.concatenate([o[:1], o[1:]], 1), "final_state": final[1:], "dh_0": gradients[6][:1]}
    for name, y in zip(GRADIENTS[:5], gradients, strict=False):
        got[name] = jnp.concatenate([y[:1], y[1:]], 1)
    if kernels.call.gates == ERASURES:
        got["derase_strength"], got["dbeta"] = jnp.moveaxis(got["dbeta"], -1, 0)
        got["derase_key"] = jnp.concatenate([gradients[5][:1], gradients[5][1:]], 1)
    elif gradients[5] is not None:
        del got["dbeta"]
        for name, y in zip(STRENGTHS, gradients[4:6], strict=True):
            got[name] = jnp.concatenate([y[:1], y[1:]], 1)
    return got


def names_of(case: cases.Case) -> tuple[str, ...]:
    """Names of the gradients of arrays of tokens."""
    return (*GRADIENTS[:4], *(GRADIENTS[4:5] if case.erase is None else STRENGTHS))


def check(expected: dict, got: dict) -> None:
    """Compares results by name."""
    for name, y in got.items():
        assert_close(expected[name], np.asarray(y), tolerance(name, "bfloat16"), name, head_axis(name))
