"""The named cases of the family's rule: gates of each channel, erase and write apart, every option. NumPy only."""

import dataclasses
import zlib
from typing import NamedTuple

import numpy as np

from gdn_jax.checks import cases
from gdn_jax.checks.cases import Case


@dataclasses.dataclass(frozen=True)
class FamilyCase:
    """One call of `delta_rule`: a `Case` whose g, beta and keys stay, and what the family has beside it.

    gate names a recipe of `_gates` for g [B, T, HO, K]; None: the case's own g of each head. erase and write name
    what stands in place of beta: "head" or "channel" for random strengths, a number for that number; None: beta.
    """

    call: Case
    gate: str | None = "mild"
    erase: str | None = None
    write: str | None = None

    @property
    def name(self) -> str:
        """Name of the case."""
        return self.call.name


class FamilyInputs(NamedTuple):
    """Array arguments of a call, and the cotangents of its two outputs. An absent argument is None."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray | None
    beta: np.ndarray | None
    erase: np.ndarray | None
    write: np.ndarray | None
    initial_state: np.ndarray | None
    cu_seqlens: np.ndarray | None
    segment_ids: np.ndarray | None
    do: np.ndarray
    dh_T: np.ndarray

    @property
    def arguments(self) -> dict:
        """Arguments of `delta_rule` and the oracle, by name."""
        return {name: x for name, x in zip(self._fields[:10], self[:10], strict=True) if x is not None}


def _named(name: str, gate: str | None = "mild", erase=None, write=None, **call) -> FamilyCase:
    return FamilyCase(Case(name, **call), gate, erase, write)


TABLE = (
    # Values. All of one shape: B = 2, T = 130, one key head for two value heads.
    _named("channels-mild"),
    _named("channels-zero", gate="zero"),
    _named("channels-fast-and-slow", gate="mixed"),
    _named("channels-at-the-bound", gate="bound"),
    _named("channels-all-minus-5", gate="-5"),
    _named("channels-tiny", gate="-1e-6"),
    _named("channels-minus-87", gate="-87"),
    _named("channels-minus-1000-at-some", gate="some -1000"),
    _named("channels-reset", gate="some -inf"),
    _named("channels-of-every-kind", gate="kinds"),
    _named("channels-correlated-keys", gate="zero", keys="correlated"),
    _named("channels-beta-0-at-some", gate="mixed", beta="some 0"),
    _named("channels-beta-up-to-2", gate="mixed", beta="twice"),
    # Erase and write apart.
    _named("erase-and-write-a-channel", gate="mixed", erase="channel", write="channel"),
    _named("erase-0", gate="mixed", erase="0", write="channel"),
    _named("erase-2", gate="kinds", erase="2", write="head"),
    _named("write-0", gate="mixed", erase="channel", write="0"),
    _named("gate-of-a-head-erase-a-channel", gate=None, erase="channel", write="head"),
    # Lengths, groupings, sizes and options.
    _named("one-token", gate="mixed", T=1, heads=(2, 2, 2)),
    _named("seven-tokens", gate="kinds", T=7, heads=(4, 2, 2), erase="head", write="channel"),
    _named("K60-V100-chunk-less-one", gate="kinds", T=63, B=1, K=60, V=100),
    _named("K100-V60-chunk-128", gate="kinds", T=130, B=1, heads=(1, 1, 1), K=100, V=60, chunk_size=128),
    _named("K64-chunk-16", gate="kinds", T=65, B=1, heads=(1, 2, 2), K=64, V=16, chunk_size=16),
    _named(
        "K128-l2norm", gate="kinds", T=65, B=1, heads=(1, 1, 1), K=128, V=128, use_qk_l2norm=True, keys="any"
    ),
    _named("K256", gate="kinds", T=66, B=1, heads=(1, 1, 1), K=256, V=32),
    _named("groupings-that-do-not-nest", gate="kinds", T=40, B=1, heads=(2, 3, 6), K=8, V=8),
    _named("no-state-no-strengths", gate="mixed", beta=None, initial_state=False),
    _named("packed", gate="kinds", T=190, B=1, lengths=(0, 1, 64, 0, 65, 37, 1, 0)),
    _named(
        "packed-vk-erase-a-channel",
        gate="mixed",
        erase="channel",
        write="channel",
        T=140,
        B=1,
        heads=(4, 2, 2),
        lengths=(5, 70, 0, 33),
        initial_state=False,
        state_layout="vk",
        scale=1.0,
    ),
    _named("segments", gate="kinds", T=140, segments=((1, 63, 2, 74), (70, 70))),
)
"""Small cases: what the tests run. Sizes are also those of fla's tests of KDA: D of 60, 64, 100, 128 and 256."""


def _gates(recipe: str, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Log decays [B, T, HO, K]."""
    mild = -0.05 * np.logaddexp(0, rng.standard_normal(shape))
    K = shape[-1]
    match recipe:
        case "mild":
            return mild
        case "zero":
            return np.zeros(shape)
        case "mixed":  # the slow and the fast channels of trained models
            fast = rng.permutation(K) < (K + 1) // 2
            return np.where(fast, -5.0, -1e-4) * np.exp(0.2 * rng.standard_normal(shape))
        case "bound":  # -5 sigmoid(...), most of them close to -5
            return -5 / (1 + np.exp(-6 * rng.standard_normal(shape) - 3))
        case "some -1000":
            return np.where(rng.random(shape[:-1])[..., None] < 0.1, -1000.0, mild)
        case "some -inf":  # of single channels, and of whole tokens
            whole = rng.random(shape[:-1])[..., None] < 0.05
            return np.where(whole | (rng.random(shape) < 0.03), -np.inf, mild)
        case "kinds":  # 0, -1e-6, -5, -87, -1000 and -inf beside each other in one chunk
            kinds = np.array([0, -1e-6, -0.1, -5, -87, -1000, -np.inf])
            return kinds[rng.choice(len(kinds), shape, p=(0.3, 0.2, 0.3, 0.1, 0.04, 0.03, 0.03))]
        case number:
            return np.full(shape, float(number))


def _strengths(recipe: str | None, rng: np.random.Generator, shape: tuple[int, ...], width: int):
    """Strengths [B, T, HO] or [B, T, HO, width]."""
    match recipe:
        case None:
            return None
        case "head":
            return 1 / (1 + np.exp(-rng.standard_normal(shape)))
        case "channel":
            return 1 / (1 + np.exp(-rng.standard_normal((*shape, width))))
        case number:
            return np.full((*shape, width), float(number))


def inputs(case: FamilyCase, dtype: str = "float32", seed: int = 0) -> FamilyInputs:
    """Inputs of a case, those of its call, with the gates and strengths of the family."""
    x = cases.inputs(case.call, dtype, seed)
    rng = np.random.default_rng([seed, zlib.crc32(case.name.encode()), 1])
    high = np.float64 if dtype == "float64" else np.float32
    call = case.call
    shape = (call.B, call.T, call.HO)
    g = x.g if case.gate is None else _gates(case.gate, rng, (*shape, call.K)).astype(high)
    erase, write = _strengths(case.erase, rng, shape, call.K), _strengths(case.write, rng, shape, call.V)
    erase, write = (None if y is None else y.astype(high) for y in (erase, write))
    beta = x.beta if erase is None and write is None else None
    return FamilyInputs(x.q, x.k, x.v, g, beta, erase, write, *x[5:])
