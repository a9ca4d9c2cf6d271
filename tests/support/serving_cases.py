"""Random requests for the tests of serving, and what becomes of them by the oracle: float64 from the raw gates on."""

import functools
from typing import NamedTuple

import jax
import numpy as np
from device_arrays import put

from gdn_jax.checks import oracle

HK, HV, K, V = 2, 4, 8, 6


class Requests(NamedTuple):
    """Tokens [N, T, heads, width] of N requests, their raw gates [N, T, HV], and the gates' parameters [HV]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    a: np.ndarray
    b: np.ndarray
    A_log: np.ndarray
    dt_bias: np.ndarray

    @property
    def tokens(self) -> tuple:
        return self[:5]

    @property
    def gates(self) -> dict:
        return {"A_log": put(self.A_log), "dt_bias": put(self.dt_bias)}

    def at(self, *index) -> "Requests":
        """Some requests and tokens."""
        return Requests(*(x[index] for x in self.tokens), *self[5:])


def draw(N: int, T: int, seed: int = 0, *, heads=(HK, HV), widths=(K, V), dtype=np.float32) -> Requests:
    rng = np.random.default_rng(seed)
    (Hk, HV), (K, V) = heads, widths

    def normal(*shape):
        return rng.standard_normal((N, T, *shape)).astype(np.float32).astype(dtype)

    A_log = np.log(rng.uniform(0.05, 4, HV)).astype(np.float32)
    dt_bias = rng.uniform(-4, 0, HV).astype(np.float32)
    return Requests(normal(Hk, K), normal(Hk, K), normal(HV, V), normal(HV), normal(HV), A_log, dt_bias)


def draw_pool(
    slots: int, seed: int = 1, *, HV=HV, widths=(K, V), dtype=np.float32, state_layout="kv"
) -> np.ndarray:
    """Every slot another random state."""
    K, V = widths
    shape = (slots, HV, K, V) if state_layout == "kv" else (slots, HV, V, K)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(dtype)


def log_decay(x: Requests) -> np.ndarray:
    a, A_log, dt_bias = (np.asarray(y).astype(np.float64) for y in (x.a, x.A_log, x.dt_bias))
    with np.errstate(over="ignore"):  # a rate beyond every float is a full reset
        return -np.exp(A_log) * np.logaddexp(a + dt_bias, 0)


def write_strength(x: Requests) -> np.ndarray:
    return 1 / (1 + np.exp(-np.asarray(x.b).astype(np.float64)))


def expected(x: Requests, states: np.ndarray, **options) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [N, T, HV, V] and last states of requests that start from states [N, ...]."""
    options = {"use_qk_l2norm": True, **options}
    beta = write_strength(x) * (2 if options.pop("allow_neg_eigval", False) else 1)
    return oracle.forward(x.q, x.k, x.v, log_decay(x), beta, initial_state=states, **options)


def every_state(x: Requests, states: np.ndarray, **options) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [N, T, HV, V] and the states after every token [N, T, ...]."""
    outputs, after = [], []
    for t in range(x.q.shape[1]):
        o, states = expected(x.at(slice(None), slice(t, t + 1)), states, **options)
        outputs.append(o[:, 0])
        after.append(states)
    return np.stack(outputs, 1), np.stack(after, 1)


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
