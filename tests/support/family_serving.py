"""Tokens of rules with gates of each channel or with erase and write apart, as serving takes them, and the truth."""

from typing import NamedTuple

import numpy as np
import pytest
from device_arrays import put
from serving_cases import HK, HV, K, V, assert_same_bits, compiled

from gdn_jax import serving
from gdn_jax.checks import family_oracle

STATE_F32 = 1e-5

N, SLOTS, LENGTH = 3, np.array([3, 0, 4]), 5

GATES = ("A_log", "dt_bias", "lower_bound", "allow_neg_eigval", "use_qk_l2norm")

RULES = {
    "KDA": dict(a="channel", b="head"),
    "KDA bounded": dict(a="channel", b="head", A_log=None, lower_bound=-5.0, allow_neg_eigval=True),
    "GDN-2": dict(a="channel", b="channel", w="channel", allow_neg_eigval=True),
    "decay of a head": dict(a="head", b="channel", w="head"),
}


class Tokens(NamedTuple):
    """Raw tokens [N, T, ...] of a rule, and the options of the call that makes its gates."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    a: np.ndarray
    b: np.ndarray
    w: np.ndarray | None
    options: dict

    def at(self, *index) -> "Tokens":
        return Tokens(*(None if x is None else x[index] for x in self[:6]), self.options)

    def call(self, f, pool, **more):
        """f of the tokens on a pool, compiled; the pool stays as it is."""
        static = {name: x for name, x in (self.options | more).items() if not hasattr(x, "shape")}
        arrays = {name: x for name, x in (self.options | more).items() if hasattr(x, "shape")}
        arrays |= {} if self.w is None else {"w": self.w}
        return compiled(f, **static)(*self[:5], pool, **arrays)

    def gates(self) -> dict:
        """Log decays and strengths, in float64."""
        a, b, w, bias = (None if x is None else np.asarray(x, np.float64)
                         for x in (*self[3:6], self.options["dt_bias"]))  # fmt: skip
        A_log, bounded = self.options["A_log"], self.options.get("lower_bound")
        rate = np.ones(HV) if A_log is None else np.exp(np.asarray(A_log, np.float64))
        rate = rate[:, None] if a.ndim == 4 else rate
        x = a + bias
        with np.errstate(over="ignore"):
            g = -rate * np.logaddexp(0, x) if bounded is None else bounded / (1 + np.exp(-rate * x))
        erase = (1 + self.options.get("allow_neg_eigval", False)) / (1 + np.exp(-b))
        return dict(g=g, erase=erase, write=erase if w is None else 1 / (1 + np.exp(-w)))

    def expected(self, states) -> tuple[np.ndarray, np.ndarray]:
        """Outputs [N, T, HV, V] and last states of requests that start from states [N, ...]."""
        q, k, v = (np.asarray(x, np.float64) for x in self[:3])
        do, dh = np.zeros((*q.shape[:2], HV, V)), np.zeros_like(states, np.float64)
        states = np.asarray(states, np.float64)
        r = family_oracle.evaluate(
            q, k, v, **self.gates(), initial_state=states, use_qk_l2norm=True, do=do, dh_T=dh
        )
        return r["o"], r["final_state"]

    def every_state(self, states, parents=None) -> tuple[np.ndarray, np.ndarray]:
        """Outputs and the states after every token [N, T, ...], along the paths of trees."""
        T = self.q.shape[1]
        parents = np.tile(np.arange(-1, T - 1), (len(states), 1)) if parents is None else parents
        after, o = np.zeros((len(states), T, *states.shape[1:])), np.zeros((*self.v.shape[:2], HV, V))
        for n, t in np.ndindex(len(states), T):
            before = states[n] if parents[n, t] < 0 else after[n, parents[n, t]]
            got, state = self.at(slice(n, n + 1), slice(t, t + 1)).expected(before[None])
            o[n, t], after[n, t] = got[0, 0], state[0]
        return o, after


def draw(rule: str, T: int, seed: int = 0, dtype=np.float32) -> Tokens:
    rng = np.random.default_rng(seed)
    options = dict(RULES[rule])

    def normal(*shape):
        return rng.standard_normal((N, T, *shape)).astype(np.float32).astype(dtype)

    kinds = [options.pop(name, None) for name in ("a", "b", "w")]
    widths = (
        {None: None, "head": (HV,), "channel": (HV, width)}[kind]
        for kind, width in zip(kinds, (K, K, V), strict=True)
    )
    a, b, w = (None if shape is None else normal(*shape) for shape in widths)
    # From channels that hardly decay to some that forget everything at once.
    bias = rng.uniform(-9, 6, (HV, K) if a.ndim == 4 else (HV,)).astype(np.float32)
    A_log = np.log(rng.uniform(0.05, 4, HV)).astype(np.float32)
    options = {"A_log": A_log} | options | {"dt_bias": bias}
    return Tokens(normal(HK, K), normal(HK, K), normal(HV, V), a, b, w, options)


def littered(pool: np.ndarray, used=SLOTS) -> np.ndarray:
    """The pool with huge numbers and NaN in the slots that no request has."""
    others = np.setdiff1d(np.arange(len(pool)), used)
    pool = pool.copy()
    pool[others[::2]], pool[others[1::2]] = 3e38, np.nan
    return pool


def make_ring(pool, trees: bool = False, dtype=np.float32):
    options = dict(num_key_heads=HK, length=LENGTH, dtype=dtype, trees=trees, channels=True)
    ring = serving.make_ring_pool(put(pool), **options)
    return ring._replace(k=ring.k * np.nan, u=ring.u * np.nan, g=ring.g * np.nan)


def assert_others_stay(before, after, used=SLOTS):
    others = np.setdiff1d(np.arange(len(before)), used)
    assert_same_bits(np.asarray(before)[others], np.asarray(after)[others])


def rules(*quick: str):
    """Parameters of which all but some are slow."""
    marks = {name: () if name in quick else pytest.mark.slow for name in RULES}
    return pytest.mark.parametrize("rule", [pytest.param(name, marks=mark) for name, mark in marks.items()])


def packed(x: Tokens, lengths, T: int) -> dict:
    """Arguments of `prefill` for the first tokens of every request, one behind the other, and padding up to T."""
    arrays = dict(q=x.q, k=x.k, v=x.v, **{name: y.astype(np.float32) for name, y in x.gates().items()})

    def together(y):
        rows = np.concatenate([y[n, :length] for n, length in enumerate(lengths)])
        return put(np.resize(rows, (1, T, *rows.shape[1:])))

    arrays = {name: together(y) for name, y in arrays.items()}
    return arrays | dict(beta=None, cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]))
