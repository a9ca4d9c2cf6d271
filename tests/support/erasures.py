"""Inputs of Erase-then-Delta Attention, and its truth by the oracle of the delta rule on two tokens for each."""

import zlib
from typing import Any, NamedTuple

import numpy as np

from gdn_jax.checks import cases, oracle

NAMES = ("q", "k", "v", "g", "beta", "erase_key", "erase_strength", "initial_state")
"""The array arguments that have gradients, in the order of `Erasure.primals`."""


class Erasure(NamedTuple):
    """A call of `erase_then_delta_rule`: inputs of a case of the delta rule, and an erasure for each token."""

    case: cases.Case
    x: cases.Inputs
    key: np.ndarray | None
    strength: np.ndarray | None

    @property
    def primals(self) -> tuple[np.ndarray | None, ...]:
        """The arguments of `NAMES`."""
        return (*self.x[:5], self.key, self.strength, self.x.initial_state)

    @property
    def packing(self) -> dict[str, Any]:
        """cu_seqlens and segment_ids."""
        return dict(cu_seqlens=self.x.cu_seqlens, segment_ids=self.x.segment_ids)

    def expected(self) -> dict[str, np.ndarray]:
        """o, final_state and, as "d" and a name of `NAMES`, the gradients from the cotangents of the inputs."""
        x, ones = self.x, np.ones((*self.x.v.shape[:2], self.case.HO), np.float32)
        key, strength, beta = (
            other if y is None else y for y, other in ((self.key, x.k), (self.strength, ones), (x.beta, ones))
        )

        def pair(first, second):
            return np.stack([first, second], 2).reshape(first.shape[0], -1, *first.shape[2:])

        g = None if x.g is None else pair(x.g, 0 * np.maximum(x.g, -1))
        packing = dict(
            cu_seqlens=None if x.cu_seqlens is None else 2 * x.cu_seqlens,
            segment_ids=None if x.segment_ids is None else np.repeat(x.segment_ids, 2, 1),
        )
        tokens = pair(0 * x.q, x.q), pair(key, x.k), pair(0 * x.v, x.v), g, pair(strength, beta)
        found: dict[str, Any] = oracle.evaluate(
            *tokens, initial_state=x.initial_state, **packing, do=pair(0 * x.do, x.do), dh_T=x.dh_T,
            **self.case.rule_options,
        )  # fmt: skip
        first, second = slice(0, None, 2), slice(1, None, 2)
        found = {name: None if y is None else np.asarray(y) for name, y in found.items()}
        dk = found["dk"]
        return {
            "o": found["o"][:, second],
            "final_state": found["final_state"],
            "dq": found["dq"][:, second],
            "dk": dk[:, second] + (dk[:, first] if self.key is None else 0),
            "dv": found["dv"][:, second],
            "dg": None if g is None else found["dg"][:, first],
            "dbeta": None if x.beta is None else found["dbeta"][:, second],
            "derase_key": None if self.key is None else dk[:, first],
            "derase_strength": None if self.strength is None else found["dbeta"][:, first],
            "dinitial_state": found["dh_0"],
        }


def inputs(case: cases.Case, dtype: str = "float32", *, key: bool = True, strength: bool = True) -> Erasure:
    """Draws the inputs of a case, with erase keys like its keys and strengths in (0, 1); both may be left out."""
    x = cases.inputs(case, dtype)
    rng = np.random.default_rng(zlib.crc32(f"erase {case.name}".encode()))
    e = rng.standard_normal(x.k.shape)
    e = e if case.use_qk_l2norm else e / np.linalg.norm(e, axis=-1, keepdims=True)
    gamma = 1 / (1 + np.exp(-rng.standard_normal((case.B, case.T, case.HO))))
    high = np.float64 if dtype == "float64" else np.float32
    return Erasure(case, x, e.astype(x.k.dtype) if key else None, gamma.astype(high) if strength else None)
