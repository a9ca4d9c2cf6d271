"""Random requests for the tests of serving, and what becomes of them by the oracle: float64 from the raw gates on."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from device_arrays import put

from gdn_jax.checks import oracle

HK, HV, K, V = 2, 4, 8, 6

GATES: dict[str, dict[str, Any]] = {
    "heads": {},
    "KDA": dict(a="channels"),
    "KDA bounded": dict(a="channels", A_log=None, lower_bound=-5.0, allow_neg_eigval=True),
    "GDN-2": dict(a="channels", b="channels", w="channels", allow_neg_eigval=True),
    "decay of a head": dict(b="channels", w="heads"),
}
"""Gates of requests: which have a number for each channel, and the options of the calls that make them."""


def slow(*case: Any):
    """A case of a test, of the long tier."""
    return pytest.param(*case, marks=pytest.mark.slow)


class Requests(NamedTuple):
    """Tokens [N, T, heads, width] of N requests, their raw gates [N, T, HV] or [N, T, HV, width], and the gates'
    parameters."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    a: np.ndarray
    b: np.ndarray
    A_log: Any
    dt_bias: np.ndarray
    w: np.ndarray | None = None
    options: Mapping[str, Any] = {}
    """Those of the calls that make the gates."""

    @property
    def tokens(self) -> tuple:
        return self[:5]

    @property
    def by_channels(self) -> bool:
        return self.w is not None or self.a.ndim == self.q.ndim

    @property
    def gates(self) -> dict:
        return {
            name: y if y is None else put(y) for name, y in (("A_log", self.A_log), ("dt_bias", self.dt_bias))
        }

    def at(self, *index) -> "Requests":
        """Some requests and tokens."""
        return self.each(lambda x: x[index])

    def each(self, f) -> "Requests":
        """The same with f of every array of tokens."""
        q, k, v, a, b, w = (None if x is None else f(x) for x in (*self.tokens, self.w))
        return Requests(q, k, v, a, b, self.A_log, self.dt_bias, w, self.options)

    def filled(self, lengths) -> "Requests":
        """The same with what is not a number after the first tokens of each request."""
        after = np.arange(self.q.shape[1]) >= lengths[:, None]
        return self.each(lambda x: np.where(after.reshape(*after.shape, *(1,) * (x.ndim - 2)), np.nan, x))

    def call(self, f, pool, **more):
        """f of the tokens on a pool, compiled; the pool stays as it is."""
        given = dict(self.options) | dict(A_log=self.A_log, dt_bias=self.dt_bias, w=self.w) | more
        static = {name: y for name, y in given.items() if not hasattr(y, "shape") and y is not None}
        static |= {} if self.A_log is not None else {"A_log": None}
        arrays = {name: y for name, y in given.items() if hasattr(y, "shape")}
        return compiled(f, **static)(*self.tokens, pool, **arrays)


def draw(
    N: int, T: int, seed: int = 0, *, heads=(HK, HV), widths=(K, V), dtype=np.float32, gates: str = "heads"
) -> Requests:
    rng = np.random.default_rng(seed)
    (Hk, HV), (K, V) = heads, widths

    def normal(*shape):
        return rng.standard_normal((N, T, *shape)).astype(np.float32).astype(dtype)

    of, options = {name: GATES[gates].get(name) for name in "abw"}, dict(GATES[gates])
    for name in "abw":
        options.pop(name, None)
    A_log = np.log(rng.uniform(0.05, 4, HV)).astype(np.float32)
    if gates == "heads":
        dt_bias = rng.uniform(-4, 0, HV).astype(np.float32)
    else:  # from channels that hardly decay to some that forget everything at once
        dt_bias = rng.uniform(-9, 6, (HV, K) if of["a"] else HV).astype(np.float32)
    q, k, v = normal(Hk, K), normal(Hk, K), normal(HV, V)
    a, b = (normal(HV, *((K,) if of[name] else ())) for name in "ab")
    w = {None: None, "heads": (HV,), "channels": (HV, V)}[of["w"]]
    w = w if w is None else normal(*w)
    return Requests(q, k, v, a, b, options.pop("A_log", A_log), dt_bias, w, options)


def draw_pool(
    slots: int, seed: int = 1, *, HV=HV, widths=(K, V), dtype=np.float32, state_layout="kv"
) -> np.ndarray:
    """Every slot another random state."""
    K, V = widths
    shape = (slots, HV, K, V) if state_layout == "kv" else (slots, HV, V, K)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(dtype)


def log_decay(x: Requests) -> np.ndarray:
    a, dt_bias = (np.asarray(y).astype(np.float64) for y in (x.a, x.dt_bias))
    rate = np.exp(np.asarray(np.zeros(a.shape[2]) if x.A_log is None else x.A_log).astype(np.float64))
    rate, bounded = rate[:, None] if a.ndim == 4 else rate, x.options.get("lower_bound")
    with np.errstate(over="ignore", invalid="ignore"):  # a rate beyond every float is a full reset
        return (
            -rate * np.logaddexp(a + dt_bias, 0)
            if bounded is None
            else bounded * sigmoid(rate * (a + dt_bias))
        )


def sigmoid(x) -> np.ndarray:
    return 1 / (1 + np.exp(-np.asarray(x).astype(np.float64)))


def write_strength(x: Requests) -> np.ndarray:
    return sigmoid(x.b)


def strengths(x: Requests) -> dict:
    """Of what is erased and of what is written, in float64."""
    erase = (1 + x.options.get("allow_neg_eigval", False)) * write_strength(x)
    return dict(erase=erase, write=erase if x.w is None else sigmoid(x.w))


def expected(x: Requests, states: np.ndarray, **options) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [N, T, HV, V] and last states of requests that start from states [N, ...]."""
    options = {"use_qk_l2norm": True, "initial_state": states, **options}
    if not x.by_channels:
        beta = write_strength(x) * (2 if options.pop("allow_neg_eigval", False) else 1)
        return oracle.forward(x.q, x.k, x.v, log_decay(x), beta, **options)
    return oracle.forward(x.q, x.k, x.v, log_decay(x), **strengths(x), **options)


def every_state(
    x: Requests, states: np.ndarray, parents: np.ndarray | None = None, **options
) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [N, T, HV, V] and the states after every token [N, T, ...], along the paths of trees."""
    outputs, after = [], [np.asarray(states, np.float64)]
    for t in range(x.q.shape[1]):
        before = after[-1]
        if parents is not None:
            before = np.stack([after[parent + 1][n] for n, parent in enumerate(parents[:, t])])
        o, states = expected(x.at(slice(None), slice(t, t + 1)), before, **options)
        outputs.append(o[:, 0])
        after.append(states)
    return np.stack(outputs, 1), np.stack(after[1:], 1)


@functools.cache
def compiled(f, **options):
    """f with its options, compiled; its pool is not donated, so that a test may look at it afterwards."""
    return jax.jit(functools.partial(f, **options))


def one(x: Requests, t: int = 0) -> tuple:
    """Token t of every request, without the token axis."""
    return tuple(put(y[:, t]) for y in x.tokens)


def bits(x) -> np.ndarray:
    """The bits of an array, so that -0.0 and 0.0, and two NaNs, can be told apart."""
    x = np.asarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[x.dtype.itemsize])


def assert_same_bits(x, y, what: str = "") -> None:
    np.testing.assert_array_equal(bits(x), bits(y), err_msg=what)


def fresh(pool):
    """The pool in memory of its own, which may be donated."""
    return jax.tree.map(put, pool)
