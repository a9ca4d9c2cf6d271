"""The choice of experts by one warp, whose operations no interpreter runs: they are emulated here, lane by lane.

Values of the emulation are arrays of 32 lanes. It knows the operations that `pallas_kernels.device.warp_choice` emits
after the scores are there, as MLIR and PTX define them.
"""

import types

import numpy as np
import pytest

from gdn_jax.shapes import Choice
from pallas_kernels.device import warp_choice

LANES = 32

ROUNDINGS = 16 * 2.0**-24
"""float32: the argument of the exponential, up to 8 for weights that count, is off by 2^-24 of itself, which the
exponential multiplies by ln 2: six roundings; then its own, those of five partial sums, and the quotients."""


def lanes(x, dtype) -> np.ndarray:
    return np.broadcast_to(np.asarray(x, dtype), (LANES,)).copy()


class Value(np.ndarray):
    """Lanes of a register, with the type that the code under test asks for."""

    @property
    def type(self):
        return "f32" if self.dtype == np.float32 else "i32"


def value(x) -> Value:
    return np.asarray(x).view(Value)


def unsigned(x):
    return np.asarray(x).astype(np.int32).view(np.uint32)


def signed(x):
    return value(np.asarray(x, np.uint32).view(np.int32))


PREDICATES = types.SimpleNamespace(eq="==", ult="<", UNO="nan", OGT=">", OEQ="==")


def compared(predicate, x, y):
    if predicate == "nan":
        return value(np.isnan(x) | np.isnan(y))
    if predicate == "<":
        return value(unsigned(x) < unsigned(y))
    return value({"==": np.equal, ">": np.greater}[predicate](x, y))


ARITH = types.SimpleNamespace(
    CmpIPredicate=PREDICATES,
    CmpFPredicate=PREDICATES,
    cmpi=compared,
    cmpf=compared,
    addi=lambda x, y: signed(unsigned(x) + unsigned(y)),
    muli=lambda x, y: signed(unsigned(x) * unsigned(y)),
    divui=lambda x, y: signed(unsigned(x) // unsigned(y)),
    andi=lambda x, y: value(np.asarray(x) & np.asarray(y)),
    ori=lambda x, y: value(np.asarray(x) | np.asarray(y)),
    xori=lambda x, y: value(np.asarray(x) ^ np.asarray(y)),
    shrsi=lambda x, y: value(np.asarray(x) >> np.asarray(y)),
    maxui=lambda x, y: signed(np.maximum(unsigned(x), unsigned(y))),
    addf=lambda x, y: value(np.asarray(x) + np.asarray(y)),
    subf=lambda x, y: value(np.asarray(x) - np.asarray(y)),
    mulf=lambda x, y: value(np.asarray(x) * np.asarray(y)),
    divf=lambda x, y: value(np.asarray(x) / np.asarray(y)),
    maximumf=lambda x, y: value(np.maximum(x, y)),
    minimumf=lambda x, y: value(np.minimum(x, y)),
    select=lambda c, x, y: value(np.where(c, x, y)),
    bitcast=lambda kind, x: value(np.asarray(x).view(np.float32 if kind == "f32" else np.int32)),
    extui=lambda kind, x: value(np.asarray(x).astype(np.int32)),
)


def inline_ptx(text, *args, **_):
    """The instructions that the choice has, over a whole warp."""
    if text.startswith("ex2"):
        return value(np.exp2(args[0], dtype=np.float32))
    if text.startswith("redux.sync.max.u32"):
        return signed(lanes(unsigned(args[0]).max(), np.uint32))
    if (
        "vote.sync.ballot" in text
    ):  # of the lanes where both are equal, the first: reversed bits, leading zeros
        return value(lanes(np.flatnonzero(np.equal(*args))[0], np.int32))
    assert text.startswith("shfl.sync.idx"), text
    return value(np.asarray(args[0])[np.asarray(args[1])])


UTILS = types.SimpleNamespace(
    inline_ptx=inline_ptx,
    shfl_bfly=lambda x, distance: value(np.asarray(x)[np.arange(LANES) ^ distance]),
    c=lambda x, kind: value(lanes(x, np.float32 if kind == "f32" else np.int32)),
)
IR = types.SimpleNamespace(
    F32Type=types.SimpleNamespace(get=lambda: "f32"),
    IntegerType=types.SimpleNamespace(get_signless=lambda bits: "i32"),
)


def chosen(scores: np.ndarray, bias: np.ndarray | None, choice: Choice) -> tuple[np.ndarray, np.ndarray]:
    """Numbers and weights that the warp finds."""
    each = scores.reshape(LANES, -1)  # neighbours in a lane
    x = [value(each[:, i].copy()) for i in range(each.shape[1])]
    lane = value(np.arange(LANES, dtype=np.int32))
    if bias is None:
        s, c = warp_choice._exponentials(x, not choice.normalise), [warp_choice._nan_first(y) for y in x]
    else:
        biases = bias.reshape(LANES, -1)
        s = [warp_choice._sigmoid(y) for y in x]
        c = [warp_choice._nan_first(ARITH.addf(y, biases[:, i])) for i, y in enumerate(s)]
    if choice.kept_groups < choice.groups:
        c = warp_choice._kept(c, lane, choice)
    number, weight = warp_choice._largest(s, c, lane, choice)
    return np.asarray(number)[: choice.per_token], np.asarray(weight)[: choice.per_token]


@pytest.fixture
def emulated(monkeypatch):
    for name, fake in {"arith": ARITH, "utils": UTILS, "ir": IR}.items():
        monkeypatch.setattr(warp_choice, name, fake)


@pytest.mark.parametrize(
    ("E", "choice"),
    [
        (64, Choice(3, 1, 1, True, 1.0, "softmax")),
        (256, Choice(8, 1, 1, True, 1.0, "softmax")),
        (512, Choice(10, 1, 1, False, 2.0, "softmax")),
        (128, Choice(8, 8, 4, True, 2.5)),
        (256, Choice(6, 1, 1, False, 1.5)),
    ],
    ids=["softmax", "qwen3.5-35b-a3b", "softmax over all", "ling-3.0-tiny", "sigmoids"],
)
def test_a_warp_chooses(emulated, E, choice):
    """Near float64; of equal scores the first ones, also where all are equal."""
    rng = np.random.default_rng(E)
    bias = None if choice.scoring == "softmax" else rng.standard_normal(E).astype(np.float32) / 8
    for scores in (rng.standard_normal(E), 3 * np.round(rng.standard_normal(E)), np.zeros(E)):
        scores = scores.astype(np.float32)
        p = scores.astype(np.float64)
        p = np.exp(p - p.max()) / np.exp(p - p.max()).sum() if bias is None else 1 / (1 + np.exp(-p))
        c = scores.astype(np.float64) if bias is None else p + bias
        if choice.kept_groups < choice.groups:
            of_groups = c.reshape(choice.groups, -1)
            best = np.argsort(-np.sort(of_groups)[:, -2:].sum(axis=1), kind="stable")[: choice.kept_groups]
            c = np.where(np.isin(np.arange(choice.groups), best)[:, None], of_groups, -np.inf).reshape(-1)
        want = np.argsort(-c, kind="stable")[: choice.per_token]
        number, weight = chosen(scores, bias, choice)
        np.testing.assert_array_equal(want, number)
        factor = choice.factor / (p[want].sum() if choice.normalise else 1.0)
        np.testing.assert_allclose(factor * p[want], weight, rtol=ROUNDINGS)
