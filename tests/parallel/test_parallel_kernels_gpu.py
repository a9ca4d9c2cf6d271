"""The kernels where tokens of rows are split over devices, on one GPU of compute capability 9.0: what each of two
devices has of a row is a row of one call."""

import functools

import jax
import numpy as np
import pytest
from split_rows import check, drawn, drawn_in_halves, in_two_parts

from gdn_jax.checks import cases
from pallas_kernels.backward import reach
from pallas_kernels.forward import channel_rule, rule

pytestmark = pytest.mark.gpu

WIDE = dict(B=1, T=1400, heads=(1, 1, 2), K=128, V=128)
KINDS = {
    "heads": dict(g="mixed"),
    "heads, no decay": dict(g="zero"),
    "heads, faint": dict(g="-20"),
    "channels": dict(channel_g="kinds"),
    "channels, narrow": dict(channel_g="mixed", K=60, V=100),
    "apart": dict(channel_g="mixed", erase="channel", write="channel"),
    "halves": dict(channel_g="kinds"),
}


@pytest.mark.parametrize("chunks", [None, 2])
@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_in_two_parts(kind, is_cut, chunks, monkeypatch):
    """Outputs, final states and gradients against float64; chains whole and in segments, of two chunks and as long as
    is chosen."""
    for module in (rule, channel_rule) if chunks else ():
        config = module.Config(segment_chunks=chunks)
        monkeypatch.setattr(module, "prepare_open", functools.partial(module.prepare_open, config=config))
    monkeypatch.setattr(reach, "open_chains", lambda *_: (is_cut, 1 + is_cut))
    case = cases.Case("parts of a row", **WIDE | KINDS[kind])
    x, expected, kernels, tokens = (drawn_in_halves if kind == "halves" else drawn)(case)
    # A fresh function, or the program of another choice would be found.
    check(expected, jax.jit(lambda tokens: in_two_parts(kernels, x, tokens))(tokens))


def test_what_is_left_out_is_nothing(monkeypatch):
    """Gradients of a row of which half the segments are not walked over have the digits of all of them."""
    monkeypatch.setattr(reach, "open_chains", lambda *_: (False, 2))
    config = rule.Config(segment_chunks=4)
    monkeypatch.setattr(rule, "prepare_open", functools.partial(rule.prepare_open, config=config))
    case = cases.Case("parts of a long row", **WIDE | dict(T=8192, g="slow"))
    x, _, kernels, tokens = drawn(case)
    some = jax.jit(lambda tokens: in_two_parts(kernels, x, tokens))(tokens)
    monkeypatch.setattr(reach, "FAINT", -np.inf)
    every = jax.jit(lambda tokens: in_two_parts(kernels, x, tokens))(tokens)
    for name, y in some.items():
        np.testing.assert_array_equal(np.asarray(y), np.asarray(every[name]), err_msg=name)
