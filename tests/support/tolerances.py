"""How far a result on a case of the table may be from the oracle. Metric and plain bounds: `checks.accuracy`.

Cases that amplify rounding errors are declared `ill_conditioned`; what they may be off by is computed from the case,
with nothing fitted. Two things lose digits there:

- The system that any chunked form solves (`condition`), which shows in float32: 64 equal keys with beta = 2.
- The recurrence itself, if the operands of all its products are rounded, as tensor cores want them
  (`rounded_recurrence`): with beta = 2, where no reflection forgets what an earlier one did wrong, and with one key
  throughout, where dv, the gradient of a value that the next token overwrites, is a small difference. It is a fair
  witness: on the other cases it meets the plain bounds (but for dg where next to nothing survives a token, and for
  states of 1 and of 64 numbers, up to 5.4e-3). Only the GPU kernels are measured by it, in `kernel_tolerance`.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from gdn_jax.checks import oracle
from gdn_jax.checks.accuracy import (
    FLOAT32,
    GRADIENTS,
    NAMES,
    STATES,
    STRENGTHS,
    bound,
    cancelling,
    head_axis,
    rms_ratio,
    worst_ratio,
)
from gdn_jax.checks.cases import DTYPES, Case, inputs

__all__ = [
    "FINITE_DIFFERENCES",
    "FLOAT32",
    "GRADIENTS",
    "STATES",
    "STRENGTHS",
    "assert_close",
    "differences",
    "head_axis",
    "rms_ratio",
    "tolerance",
    "worst_ratio",
]  # fmt: skip

# `differences` of the oracle in float64 are off by the fifth derivative times step^4 / 30 = 2.7e-16, and by rounding,
# 1.5 u / step = 5.6e-13 of the values, which are some ten times as large as the derivatives in one of their inputs.
# Measured: up to 5.8e-12; the bound is five times that.
FINITE_DIFFERENCES = 3e-11

DRAWS = 8
"""Draws of roundings. They scatter by a tenth where a hundred tokens and heads average; the largest is taken."""


@functools.cache
def cancels(case: Case) -> bool:
    """`accuracy.cancelling` of a case."""
    x = inputs(case)
    return cancelling(x.g, x.k)


@functools.cache
def rounded_recurrence(case: Case, dtype: str) -> dict[str, float]:
    """Errors of the recurrence and its adjoint in float64, but for operands and results rounded to a dtype.

    Every factor of a product k^T S, k u^T, q^T S (and of those of the adjoint) is rounded once, as are o, dq, dk, dv;
    sums and states are not. Rounding is to nearest at a random place of the significand, fl(s x) / s with log2 s
    uniform in [0, 1), so that draws differ. The largest error of DRAWS draws.
    """
    x = inputs(case, dtype)
    run = functools.partial(oracle.evaluate, **x.arguments, **case.rule_options, do=x.do, dh_T=x.dh_T)
    truth = run()
    worst = dict.fromkeys(NAMES, 0.0)
    for seed in range(DRAWS):
        rng = np.random.default_rng(seed)

        def rounded(y, rng=rng):
            s = np.exp2(rng.random(y.shape))
            return (s * y).astype(np.float32).astype(DTYPES[dtype]).astype(np.float64) / s

        for name, y in run(operand=rounded).items():
            if y is not None:
                y = rounded(y) if name in ("o", "dq", "dk", "dv") else y
                worst[name] = max(worst[name], worst_ratio(truth[name], y, head_axis(name)))
    return worst


@functools.cache
def condition(case: Case) -> float:
    """Largest Skeel condition number || |A| |I + kkt| || over the chunks of a case, A = (I + kkt)^-1."""
    x, C = inputs(case, "float64"), case.chunk_size
    worst = 1.0
    for b, i, start in itertools.product(range(case.B), range(case.HO), range(0, case.T, C)):
        s = slice(start, start + C)
        k = x.k[b, s, i // (case.HO // case.heads[1])]
        L = np.eye(len(k))
        for t in range(1, len(k)):  # decays by addition: no difference of large numbers
            decay = np.exp(np.cumsum(x.g[b, s, i][t:0:-1])[::-1])
            L[t, :t] = x.beta[b, s, i][t] * (k[:t] @ k[t]) * decay
        worst = max(worst, np.abs(np.abs(np.linalg.inv(L)) @ np.abs(L)).sum(1).max())
    return float(worst)


def tolerance(name: str, dtype: str, case: Case | None = None) -> float:
    """Largest error of the output or gradient `name` in a dtype; with a case, that of a chunked form on this case.

    Ill-conditioned cases in float32 and float64: substitution with I + kkt returns x with an error of up to
    |A| |I + kkt| |x| u (Higham, Accuracy and Stability of Numerical Algorithms, theorem 8.5), that is the condition
    number times the roundoff u for o and the state. Gradients stay below their plain bounds.
    """
    if case is None:
        return bound(name, dtype)
    plain = bound(name, dtype, cancelling=cancels(case))
    if case.ill_conditioned and name in STATES and dtype in ("float32", "float64"):
        return max(plain, condition(case) * float(np.finfo(dtype).epsneg))
    return plain


FORMS = ("chunked", "recurrent")
FORM_FLOAT32 = {**dict.fromkeys(STATES, 5e-6), **dict.fromkeys(GRADIENTS, 1e-5)}
CHUNKED_BFLOAT16 = {"dg": 1e-2, "dbeta": 6e-3, "dh_0": 6e-3}
ONE_ROUNDING = 2.0**-8


def form_tolerance(name: str, dtype: str, case: Case, form: str) -> float:
    """`tolerance` of a case for one of the two forms in plain JAX, which are closer than kernels have to be.

    float32: the worst cases of the table that are not ill-conditioned are off by 1.2e-6 (o and the state) and 2.2e-6
    (gradients); the bounds are four times that.

    bfloat16: o, dq, dk and dv are rounded once at their end, by 2^-8 at most, and the other results are float32. The
    recurrent form rounds nothing else, the chunked form never the final state: both hold float32's bounds for these.
    The chunked form's other gradients have a bound of twice what was measured on the table (dg 5.5e-3, dbeta 2.9e-3,
    dh_0 3.0e-3), but for keys that are alike. With the L2 norm inside, both forms round the normalised q and k.
    """
    plain, name = tolerance(name, dtype, case), "dbeta" if name in STRENGTHS else name
    if dtype == "float32":
        return plain if case.ill_conditioned and form == "chunked" else FORM_FLOAT32[name]
    if dtype != "bfloat16":
        return plain
    if case.use_qk_l2norm or (form == "chunked" and name in ("o", "dq", "dk", "dv")):
        return plain
    if name in ("o", "dq", "dk", "dv"):
        return ONE_ROUNDING
    if form == "recurrent" or name == "final_state":
        return form_tolerance(name, "float32", case, form)
    return plain if cancels(case) else CHUNKED_BFLOAT16[name]


def kernel_tolerance(name: str, dtype: str, case: Case) -> float:
    """The same for kernels that round the operands of every product: no worse than the rounded recurrence."""
    plain = tolerance(name, dtype, case)
    return max(plain, rounded_recurrence(case, dtype)[name]) if case.ill_conditioned else plain


def differences(f: Callable[[float], Any], step: float = 3e-4) -> Any:
    """Derivative of f at 0 from four values, exact for polynomials up to degree 4. Arrays or tuples of them."""
    near, far = (jax.tree.map(np.subtract, f(s), f(-s)) for s in (step, 2 * step))
    return jax.tree.map(lambda a, b: (8 * a - b) / (12 * step), near, far)


def assert_close(reference, x, bound: float, what: str = "", axis: int | None = None) -> None:
    """Fails unless worst_ratio is at most bound."""
    ratio = worst_ratio(reference, x, axis)
    assert ratio <= bound, f"{what}: rms ratio {ratio:.2e}, allowed {bound:.1e}"
