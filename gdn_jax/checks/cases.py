"""The named cases on which every implementation is tested and checked, and their inputs. NumPy only.

Cases that differ only in their values (gates, strengths, keys) share one shape and the options, and so one
compilation. Those of TABLE are small, but cross every border that matters: chunks of 64 tokens, heads in every
grouping, odd head dimensions. Those of CHANNELS have per-channel decay, or separate strengths for
erasing and writing. Those of MODEL_SIZES have the head dimensions of models.
"""

import dataclasses
import zlib
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float64": np.float64}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of the rule.

    heads is (Hq, Hk, HV). g, beta and keys name a recipe of `inputs` (None: the argument is absent). lengths are the
    packed sequences (cu_seqlens), the rest of the T tokens being padding; segments are the lengths of the segments of
    each row (segment_ids). ill_conditioned cases amplify rounding errors, whatever the implementation: they carry a
    bound computed from the case, see tests/support/tolerances.py.

    channel_g names a recipe for per-channel decay, which stands in place of g. erase and write
    stand in place of beta: "head" or "channel" for random strengths, a number for that number in every channel.
    """

    name: str
    T: int = 130
    B: int = 2
    heads: tuple[int, int, int] = (1, 1, 2)
    K: int = 16
    V: int = 24
    g: str | None = "slow"
    beta: str | None = "sigmoid"
    keys: str = "unit"
    lengths: tuple[int, ...] | None = None
    segments: tuple[tuple[int, ...], ...] | None = None
    initial_state: bool = True
    scale: float | None = None
    use_qk_l2norm: bool = False
    state_layout: str = "kv"
    chunk_size: int = 64
    ill_conditioned: bool = False
    channel_g: str | None = None
    erase: str | None = None
    write: str | None = None
    drawn_as: str | None = None
    """The name that seeds the inputs; None: the case's own."""

    @property
    def HO(self) -> int:
        """Heads of the output."""
        return max(self.heads[0], self.heads[2])

    @property
    def N(self) -> int:
        """Sequences."""
        return self.B if self.lengths is None else len(self.lengths)

    @property
    def options(self) -> dict:
        """The static keyword arguments of the call."""
        return {**self.rule_options, "chunk_size": self.chunk_size}

    @property
    def rule_options(self) -> dict:
        """The options that the definition has too: all but the chunk size."""
        return {name: getattr(self, name) for name in ("scale", "use_qk_l2norm", "state_layout")}


class Inputs(NamedTuple):
    """Array arguments of a call, and the cotangents of its two outputs. An absent argument is None."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray | None
    beta: np.ndarray | None
    initial_state: np.ndarray | None
    cu_seqlens: np.ndarray | None
    segment_ids: np.ndarray | None
    erase: np.ndarray | None
    write: np.ndarray | None
    do: np.ndarray
    dh_T: np.ndarray

    @property
    def arguments(self) -> dict:
        """The arguments of the rule and of the oracle, by name."""
        return {name: x for name, x in zip(self._fields[:10], self[:10], strict=True) if x is not None}

    @property
    def primals(self) -> tuple[Any, ...]:
        """q, k, v, g, beta and the initial state; with them erase and write where they stand in place of beta."""
        is_beta = self.erase is None and self.write is None
        return self[:6] if is_beta else (*self[:6], self.erase, self.write)


_THREE_THOUSAND = tuple(int(n) for n in np.random.default_rng(0).integers(0, 4, 3000))

TABLE = (
    # Values. All of one shape: B=2, T=130 (three chunks, the last of two tokens), one key head for two value heads.
    Case("slow-decay"),
    Case("no-decay", g="zero"),
    Case("strong-decay", g="-20"),
    Case("mixed-decay", g="mixed"),
    Case("fast-heads-and-slow-heads", g="by-head"),
    Case("decay-hundredfold", g="hundredfold"),
    Case("reset-at-some-tokens", g="some -inf"),
    Case("reset-at-every-token", g="-inf"),
    Case("strong-decay-then-slow", g="late-slow"),
    Case("beta-0", beta="0"),
    Case("beta-1", beta="1"),
    Case("beta-0-at-some-tokens", beta="some 0"),
    Case("beta-2", beta="2", ill_conditioned=True),
    Case("beta-2-no-decay", beta="2", g="zero", ill_conditioned=True),
    Case("beta-up-to-2", beta="twice"),
    Case("repeated-keys", keys="repeated", g="-1e-3", beta=".835", ill_conditioned=True),
    Case("repeated-keys-beta-2", keys="repeated", g="zero", beta="2", ill_conditioned=True),
    Case("correlated-keys", keys="correlated", g="-1e-3"),
    Case("long-keys", keys="norm^2 = 2"),
    Case("zero-keys", keys="some zero"),
    # Lengths against the chunk, each with another grouping of heads, head dimension, absent argument or option.
    Case("one-token", T=1, heads=(2, 2, 2)),
    Case("seven-tokens-no-beta", T=7, heads=(4, 2, 2), beta=None),
    Case("chunk-less-one-no-g-K60-V100", T=63, B=1, K=60, V=100, g=None),
    Case("one-chunk-one-key-head", T=64, heads=(4, 1, 4), K=12, V=8),
    Case("chunk-and-one-l2norm-K96-V192", T=65, B=1, K=96, V=192, use_qk_l2norm=True, keys="any"),
    Case("values-grouped-over-two-chunk-32", T=100, heads=(2, 2, 4), V=16, chunk_size=32),
    Case("queries-fewer-than-keys-chunk-16", T=77, heads=(1, 2, 2), V=16, chunk_size=16),
    Case("groupings-that-do-not-nest", T=40, B=1, heads=(2, 3, 6), K=8, V=8),
    Case("chunk-and-two-chunk-128-K100-V60", T=130, B=1, heads=(1, 1, 1), K=100, V=60, chunk_size=128),
    Case("K256-V256", T=66, B=1, heads=(1, 1, 1), K=256, V=256),
    Case("K1-V1", T=70, B=32, K=1, V=1),  # rows enough for an rms of numbers
    Case("no-gates-no-initial-state", g=None, beta=None, initial_state=False),
    Case("scale-0", T=70, scale=0.0),
    # Packed sequences.
    Case("packed", T=190, B=1, lengths=(0, 1, 64, 0, 65, 37, 1, 0)),
    Case("packed-nothing", T=190, B=1, lengths=(0,) * 8),
    Case("packed-one-long", T=190, B=1, lengths=(0, 0, 0, 190, 0, 0, 0, 0)),
    Case("packed-reset", T=190, B=1, g="some -inf", lengths=(63, 1, 2, 3, 0, 70, 5, 6)),
    Case("packed-strong-decay", T=190, B=1, g="mixed", lengths=(10, 0, 100, 1, 1, 1, 64, 10)),
    Case(
        "packed-vk-l2norm-scale-1-no-state",
        T=140,
        B=1,
        heads=(4, 2, 2),
        lengths=(5, 70, 0, 33),
        initial_state=False,
        state_layout="vk",
        use_qk_l2norm=True,
        keys="any",
        scale=1.0,
    ),
    Case("packed-3000", T=4800, B=1, K=8, V=8, lengths=_THREE_THOUSAND, chunk_size=16),
    # Segments of training rows.
    Case("segments", T=140, segments=((1, 63, 2, 74), (70, 70))),
    Case("segments-of-one-token", T=140, segments=((1,) * 140, (139, 1))),
    Case("segments-one-each", T=140, segments=((140,), (140,))),
    Case("segments-reset", T=140, g="some -inf", segments=((64, 64, 12), (3, 130, 7))),
    Case(
        "segments-no-state-three-groupings",
        T=129,
        V=16,
        segments=((40, 60, 29), (128, 1)),
        initial_state=False,
        heads=(4, 1, 2),
    ),
    # Values again, of shapes that are above.
    Case("beta-of-all-sizes", beta="0 to 1"),
    Case("packed-slow-decay", T=190, B=1, g="-1e-3", lengths=(0, 1, 64, 0, 65, 37, 1, 0)),
)
"""Small cases: what the tests run."""

CHANNELS = (
    # Values. All of one shape: B = 2, T = 130, one key head for two value heads.
    Case("channels-mild", channel_g="mild"),
    Case("channels-zero", channel_g="zero"),
    Case("channels-fast-and-slow", channel_g="mixed"),
    Case("channels-at-the-bound", channel_g="bound"),
    Case("channels-all-minus-5", channel_g="-5"),
    Case("channels-tiny", channel_g="-1e-6"),
    Case("channels-minus-87", channel_g="-87"),
    Case("channels-minus-1000-at-some", channel_g="some -1000"),
    Case("channels-reset", channel_g="some -inf"),
    Case("channels-of-every-kind", channel_g="kinds"),
    Case("channels-correlated-keys", channel_g="zero", keys="correlated"),
    Case("channels-beta-0-at-some", channel_g="mixed", beta="some 0"),
    Case("channels-beta-up-to-2", channel_g="mixed", beta="twice"),
    # Erase and write apart.
    Case("erase-and-write-a-channel", channel_g="mixed", erase="channel", write="channel"),
    Case("erase-0", channel_g="mixed", erase="0", write="channel"),
    Case("erase-2", channel_g="kinds", erase="2", write="head"),
    Case("write-0", channel_g="mixed", erase="channel", write="0"),
    Case("gate-of-a-head-erase-a-channel", erase="channel", write="head"),
    # Lengths, groupings, sizes and options.
    Case("channels-one-token", drawn_as="one-token", channel_g="mixed", T=1, heads=(2, 2, 2)),
    Case("seven-tokens", channel_g="kinds", T=7, heads=(4, 2, 2), erase="head", write="channel"),
    Case("K60-V100-chunk-less-one", channel_g="kinds", T=63, B=1, K=60, V=100),
    Case("K100-V60-chunk-128", channel_g="kinds", T=130, B=1, heads=(1, 1, 1), K=100, V=60, chunk_size=128),
    Case("K64-chunk-16", channel_g="kinds", T=65, B=1, heads=(1, 2, 2), K=64, V=16, chunk_size=16),
    Case(
        "K128-l2norm",
        channel_g="kinds",
        T=65,
        B=1,
        heads=(1, 1, 1),
        K=128,
        V=128,
        use_qk_l2norm=True,
        keys="any",
    ),
    Case("K256", channel_g="kinds", T=66, B=1, heads=(1, 1, 1), K=256, V=32),
    Case(
        "channels-groupings-that-do-not-nest",
        drawn_as="groupings-that-do-not-nest",
        channel_g="kinds",
        T=40,
        B=1,
        heads=(2, 3, 6),
        K=8,
        V=8,
    ),
    Case("no-state-no-strengths", channel_g="mixed", beta=None, initial_state=False),
    Case(
        "channels-packed",
        drawn_as="packed",
        channel_g="kinds",
        T=190,
        B=1,
        lengths=(0, 1, 64, 0, 65, 37, 1, 0),
    ),
    Case(
        "packed-vk-erase-a-channel",
        channel_g="mixed",
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
    Case(
        "channels-segments",
        drawn_as="segments",
        channel_g="kinds",
        T=140,
        segments=((1, 63, 2, 74), (70, 70)),
    ),
)
"""Small cases of `delta_rule`. The widths D = 60, 64, 100, 128 and 256 come from fla's tests of KDA."""

_VALUES = dict(T=200, B=1, heads=(2, 2, 4), K=64, V=64)
_LONG = dict(T=4096, B=1, heads=(1, 1, 2), K=128, V=128)

MODEL_SIZES = (
    Case("slow-decay-K64", **_VALUES),
    Case("no-decay-K64", g="zero", **_VALUES),
    Case("strong-decay-K64", g="-20", **_VALUES),
    Case("reset-at-some-tokens-K64", g="some -inf", **_VALUES),
    Case("correlated-keys-K64", keys="correlated", **_VALUES),
    Case("beta-up-to-2-K64", beta="twice", **_VALUES),
    Case("packed-K128", T=250, B=1, heads=(1, 1, 2), K=128, V=128, lengths=(0, 1, 64, 0, 65, 100, 1)),
    Case("one-token-K64", **{**_VALUES, "T": 1}),
    Case("queries-grouped-vk-K64", T=65, B=1, heads=(4, 2, 2), K=64, V=64, state_layout="vk"),
    Case("l2norm-K96-V192", T=130, B=1, heads=(2, 2, 4), K=96, V=192, use_qk_l2norm=True, keys="any"),
    Case("long-K128", **_LONG),
    Case("long-no-decay-K128", g="zero", **_LONG),
)
"""Cases with the head dimensions of models: what `gdn check` runs."""

CASES = {case.name: case for case in (*TABLE, *CHANNELS, *MODEL_SIZES)}


def _decays(recipe: str, rng: np.random.Generator, B: int, T: int, HO: int) -> np.ndarray:
    shape = (B, T, HO)
    slow = (
        -np.logaddexp(0, -rng.standard_normal(shape)) / 16
    )  # logsigmoid(randn) / 16, what a trained gate looks like
    half = rng.random(shape) < 0.5
    match recipe:
        case "slow":
            return slow
        case "zero":
            return np.zeros(shape)
        case "hundredfold":
            return 1600 * slow
        case "mixed":
            return np.where(half, -20.0, -1e-3)
        case (
            "by-head"
        ):  # -A softplus(randn / 2 + 1), the first head never decays, the last with the largest rate
            return -np.linspace(0, 16, HO) * np.logaddexp(0, rng.standard_normal(shape) / 2 + 1)
        case "late-slow":  # the cumulative sum is large where the decays that count are small
            return np.where(np.arange(T)[:, None] % 64 < 32, -20.0, -1e-4 * rng.random(shape))
        case "some -inf":
            reset = rng.random(shape) < 0.1
            reset[:, [t for t in (0, 63, 64, T - 1) if t < T]] = True
            return np.where(reset, -np.inf, slow)
        case number:
            return np.full(shape, float(number))


SIZES = (0.0, 1e-12, 1e-4, 1.0)
"""Write strengths from none to all."""


def _strengths(recipe: str, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    sigmoid = 1 / (1 + np.exp(-rng.standard_normal(shape)))
    match recipe:
        case "sigmoid":
            return sigmoid
        case "twice":
            return 2 * sigmoid
        case "some 0":
            return np.where(rng.random(shape) < 0.3, 0.0, sigmoid)
        case "0 to 1":
            return rng.choice(SIZES, shape)
        case "by-head":
            return np.broadcast_to(np.resize(SIZES, shape[-1]), shape)
        case number:
            return np.full(shape, float(number))


def channel_decays(recipe: str, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Log decays [B, T, HO, K] of a recipe."""
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
        case "kinds":  # 0, -1e-6, -5, -87, -1000 and -inf next to each other in one chunk
            kinds = np.array([0, -1e-6, -0.1, -5, -87, -1000, -np.inf])
            return kinds[rng.choice(len(kinds), shape, p=(0.3, 0.2, 0.3, 0.1, 0.04, 0.03, 0.03))]
        case number:
            return np.full(shape, float(number))


def _apart(recipe: str | None, width: int, rng: np.random.Generator, shape: tuple[int, ...]):
    """Strengths [B, T, HO] or [B, T, HO, width] of a recipe."""
    if recipe in ("head", "channel"):
        return _strengths("sigmoid", rng, shape if recipe == "head" else (*shape, width))
    return None if recipe is None else np.full((*shape, width), float(recipe))


def _keys(recipe: str, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    B, _, Hk, K = shape
    x = rng.standard_normal(shape)
    if recipe == "any":
        return x
    if recipe == "repeated":
        x = np.broadcast_to(rng.standard_normal((B, 1, Hk, K)), shape)
    if recipe == "correlated":  # cosine of about 0.9 between any two
        x = np.sqrt(0.1) * x + np.sqrt(0.9) * rng.standard_normal((B, 1, Hk, K))
    x = x / np.linalg.norm(x, axis=-1, keepdims=True)
    if recipe == "norm^2 = 2":
        x = x * np.sqrt(2)
    if recipe == "some zero":
        x = np.where(rng.random((*shape[:-1], 1)) < 0.2, 0.0, x)
    return x


def inputs(case: Case, dtype: str = "float32", seed: int = 0) -> Inputs:
    """Inputs of a case: q, k, v, do rounded to dtype, gates and states in float32 (float64 with dtype float64)."""
    rng = np.random.default_rng([seed, zlib.crc32((case.drawn_as or case.name).encode())])
    B, T, K, V, HO = case.B, case.T, case.K, case.V, case.HO
    Hq, Hk, HV = case.heads
    low = DTYPES[dtype]
    high = np.float64 if dtype == "float64" else np.float32
    q = _keys("any" if case.keys == "any" else "unit", rng, (B, T, Hq, K))
    k = _keys(case.keys, rng, (B, T, Hk, K))
    v = rng.standard_normal((B, T, HV, V))
    g = None if case.g is None else _decays(case.g, rng, B, T, HO).astype(high)
    beta = None if case.beta is None else _strengths(case.beta, rng, (B, T, HO)).astype(high)
    state_shape = (case.N, HO, K, V) if case.state_layout == "kv" else (case.N, HO, V, K)
    h_0 = rng.standard_normal(state_shape).astype(high) if case.initial_state else None
    cu = None if case.lengths is None else np.concatenate([[0], np.cumsum(case.lengths)]).astype(np.int32)
    ids = None
    if case.segments is not None:  # ids come again later in the row: only a change counts
        ids = np.stack([np.repeat(np.arange(len(row)) % 3, row) for row in case.segments]).astype(np.int32)
    do = rng.standard_normal((B, T, HO, V)).astype(low)
    dh_T = rng.standard_normal(state_shape).astype(high)
    rng = np.random.default_rng([seed, zlib.crc32((case.drawn_as or case.name).encode()), 1])
    if case.channel_g is not None:
        g = channel_decays(case.channel_g, rng, (B, T, HO, K)).astype(high)
    erase, write = (_apart(*of, rng, (B, T, HO)) for of in ((case.erase, K), (case.write, V)))
    if erase is not None or write is not None:
        beta = None
    erase, write = (None if y is None else y.astype(high) for y in (erase, write))
    return Inputs(q.astype(low), k.astype(low), v.astype(low), g, beta, h_0, cu, ids, erase, write, do, dh_T)
