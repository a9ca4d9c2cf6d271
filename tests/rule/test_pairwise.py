"""Options crossed: every two values of two options in one call, against the oracle or a definition."""

import dataclasses
import itertools
from functools import partial

import harness
import jax
import numpy as np
import pool_steps
import pytest
from pairwise import pairs_of, pairwise

from gdn_jax.checks import cases
from gdn_jax.models.sampling import Sampling

PACKING = {
    "rows": {},
    "packed": {"B": 1, "lengths": (7, 0, 12)},
    "segments": {"segments": ((5, 15), (19, 1))},
}

RULE = pairwise(
    {
        "packing": ["rows", "packed", "segments"],
        "heads": [(1, 1, 1), (2, 1, 4), (4, 2, 2)],
        "initial_state": [True, False],
        "use_qk_l2norm": [True, False],
        "state_layout": ["kv", "vk"],
        "chunk_size": [16, 64],
        "scale": [None, 0.3],
        "g": ["slow", "some -inf", None],
        "beta": ["sigmoid", "twice", None],
    }
)


def names(rows):
    return [" ".join(str(value).replace(" ", "") for value in row.values()) for row in rows]


def test_every_pair_is_there():
    options = {"a": [0, 1, 2], "b": [True, False], "c": "xy", "d": [None, 1]}
    rows = pairwise(options)
    met = set().union(*map(pairs_of, rows))
    for (a, one), (b, other) in itertools.combinations(options.items(), 2):
        for x, y in itertools.product(one, other):
            assert tuple(sorted([(a, repr(x)), (b, repr(y))])) in met
    assert len(rows) <= 8  # of 24


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=name, marks=[pytest.mark.slow] * (i > 1) + [pytest.mark.crossed] * (i > 4))
        for i, (row, name) in enumerate(zip(RULE, names(RULE), strict=True))
    ],
)
@pytest.mark.parametrize("form", harness.CHUNKED_FIRST)
def test_options_of_the_rule(row, form):
    """Outputs and gradients."""
    row = dict(row)
    packing = PACKING[row.pop("packing")]
    case = dataclasses.replace(cases.Case("crossed", T=20, K=6, V=4), **row, **packing)
    x = cases.inputs(case)
    harness.check(case, x, "float32", harness.evaluate(form, case.options, x), form=form)


SERVING = pairwise(
    {
        "T": [1, 3],
        "heads": [(1, 1, 2), (2, 2, 4)],
        "kv_layout": [True, False],
        "dtype": ["float32", "bfloat16"],
        "pool_dtype": ["float32", "bfloat16"],
        "use_qk_l2norm": [True, False],
        "allow_neg_eigval": [True, False],
        "null_slot": [None, 0],
        "uneven": [True, False],
        "batch_invariant": [True, False],
        "layer": [None, 1],
    }
)


def in_layers(pool):
    """The pool as the second of three layers; the others hold what would be noticed."""
    other = np.full_like(pool := np.asarray(pool), np.nan)
    return jax.device_put(np.stack([other, pool, other], 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=name, marks=[pytest.mark.slow] * (i > 1))
        for i, (row, name) in enumerate(zip(SERVING, names(SERVING), strict=True))
    ],
)
def test_options_of_serving(row):
    """`decode` and `verify` on a pool, and where states are float32 on a ring too."""
    row = dict(row)
    options = {name: row.pop(name) for name in ("batch_invariant", "layer")} | {"implementation": "xla"}
    row["uneven"] = row["uneven"] and row["T"] > 1
    case = pool_steps.Case("crossed", K=8, V=6, **row)
    x = pool_steps.draw(case)
    given = x if options["layer"] is None else x | {"pool": in_layers(x["pool"])}
    o, pool = jax.jit(partial(pool_steps.serve, case, **options))(given)
    pool_steps.assert_right(case, x, o, pool if options["layer"] is None else np.asarray(pool)[:, 1])
    if case.null_slot is not None:
        return
    counts = (12, 0, 5)
    x = pool_steps.draw_ring(case, counts)
    ring = pool_steps.ring_pool(case, x)
    given = ring if options["layer"] is None else jax.tree.map(in_layers_of_a_ring, ring)
    o, after = jax.jit(partial(pool_steps.serve_ring, case, **options))(x, given)
    after = after if options["layer"] is None else jax.tree.map(lambda y: np.asarray(y)[:, 1], after)
    tokens = [case.T] * case.N if x["num_tokens"] is None else x["num_tokens"].tolist()
    counted = [n + m for n, m in zip(counts, tokens, strict=True)]
    pool_steps.assert_ring_right(case, x, counted, (o, *after[:4]))


def in_layers_of_a_ring(y):
    y = np.asarray(y)
    return jax.device_put(np.stack([np.zeros_like(y), y, np.ones_like(y)], 1))


LIMITS = pairwise(
    {
        "temperature": [0.3, 1.0, 2.0],
        "top_k": [None, 1, 3],
        "top_p": [None, 0.5, 1.0],
        "min_p": [None, 0.0, 0.4],
    }
)


@pytest.mark.parametrize("row", LIMITS, ids=names(LIMITS))
def test_limits_of_the_draw(row):
    """By sorting the probabilities of float64, limit after limit on what is left."""
    logits = np.log(np.array([[0.05, 0.4, 0.2, 0.3, 0.05], [0.9, 0.02, 0.03, 0.04, 0.01]]))
    got = np.asarray(jax.jit(Sampling(**row).limited)(logits.astype(np.float32)))
    for logit, kept in zip(logits, np.isfinite(got), strict=True):
        p = np.exp(logit / row["temperature"])
        if row["top_k"] is not None:
            p = np.where(p >= np.sort(p)[-row["top_k"]], p, 0)
        if row["top_p"] is not None:
            order = np.argsort(-p, kind="stable")
            before = np.cumsum(p[order] / p.sum()) - p[order] / p.sum()
            least = p[order][(before < row["top_p"] - 1e-9) & (p[order] > 0)][-1]
            p = np.where(p >= least - 1e-12, p, 0)
        if row["min_p"]:
            p = np.where(p >= row["min_p"] * p.max(), p, 0)
        np.testing.assert_array_equal(kept, p > 0)
    scaled = logits / row["temperature"]
    np.testing.assert_allclose(got[np.isfinite(got)], scaled[np.isfinite(got)], rtol=1e-5)
