"""What the family's operations refuse, and in which words."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_harness import CASES

from gdn_jax import delta_chunk_states, delta_rule, delta_step, gated_delta_product
from gdn_jax.checks import family_cases

X = family_cases.inputs(CASES["channels-mild"])
ONE = dict(q=X.q[:, 0], k=X.k[:, 0], v=X.v[:, 0], state=np.zeros((2, 2, 16, 8), np.float32))


def rule(**change):
    return delta_rule(**{**dict(q=X.q, k=X.k, v=X.v, g=X.g), **change})


REFUSED = {
    "both strengths": (
        lambda: rule(beta=X.beta, erase=X.beta),
        "beta: expected None where erase or write is given",
    ),
    "erase of other channels": (
        lambda: rule(erase=np.ones((2, 130, 2, 3), np.float32)),
        "erase: expected shape",
    ),
    "write of other heads": (lambda: rule(write=np.ones((2, 130, 3), np.float32)), "write: expected shape"),
    "g of other channels": (lambda: rule(g=np.zeros((2, 130, 2, 4), np.float32)), "g: expected shape"),
    "g of integers": (lambda: rule(g=np.zeros((2, 130, 2, 16), np.int32)), "g: expected dtype"),
    "chunks of five": (lambda: rule(chunk_size=5), "chunk_size: expected one of"),
    "a name": (lambda: rule(implementation="fast"), "implementation: expected one of"),
    "a flag": (lambda: rule(use_qk_l2norm="no"), "use_qk_l2norm: expected True or False"),
    "beta of a channel": (lambda: rule(beta=X.g), "beta: expected shape"),
    "beta of other tokens": (lambda: rule(beta=X.beta[:, :5]), "beta: expected shape"),
    "a step's g": (lambda: delta_step(**ONE, g=1.0, beta=None), "g: expected an array [B, HO], got float"),
    "a step's beta": (
        lambda: delta_step(**ONE, g=X.g[:, 0], beta="1"),
        "beta: expected an array [B, HO], got str",
    ),
    "g of chunk states": (
        lambda: delta_chunk_states(X.k, X.v, X.g[0, 0]),
        "g: expected shape [B, T, HO, channels]",
    ),
    "offsets of products": (
        lambda: gated_delta_product(
            X.q[:1], X.k[:1, :, None], X.v[:1, :, None], cu_seqlens=np.array([0, 131], np.uint8)
        ),
        "cu_seqlens: expected ascending values from 0 to at most T = 130, got [0, 131]",
    ),
    "segments of products": (
        lambda: gated_delta_product(X.q, X.k[:, :, None], X.v[:, :, None], segment_ids=[0, 1]),
        "segment_ids: expected an array [B, T], got list",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors(name, no_type_checks):
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        call()


def test_kernels_are_refused():
    x = jax.tree.map(jnp.asarray, X)
    with pytest.raises(NotImplementedError, match="the default device is a cpu"):
        delta_rule(x.q, x.k, x.v, x.g, implementation="mosaic_gpu")
