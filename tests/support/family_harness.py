"""Calls of the family's rule on cases, compiled once for cases of the same shapes and options, with all gradients."""

import functools

import jax
import numpy as np

from gdn_jax import delta_rule
from gdn_jax.checks import family_cases

PRIMALS = ("q", "k", "v", "g", "beta", "erase", "write", "initial_state")
CASES = {case.name: case for case in family_cases.TABLE}
QUICK = (
    # one program for all of these values
    *(case.name for case in family_cases.TABLE if case.name.startswith("channels-")),
    "erase-and-write-a-channel",
    "erase-0",
    "write-0",
    "packed",
)
OF_LONG_CHUNKS = {
    *(name for name in QUICK if name != "packed"),
    "packed-vk-erase-a-channel",
    "K100-V60-chunk-128",
}


def chunk_size(case) -> int:
    """Tokens of a chunk in these tests: 64, what a user has, where values are tested, and for packed rows once. The
    other cases take a program of fewer levels, with four times as many borders of chunks in their rows."""
    return case.call.chunk_size if case.name in OF_LONG_CHUNKS else 16


@functools.cache
def _compiled(options: tuple, given: tuple[str, ...]):
    def both(primals, cotangents, cu_seqlens, segment_ids):
        def rule(primals):
            named = dict(zip(given, primals, strict=True))
            return delta_rule(**named, cu_seqlens=cu_seqlens, segment_ids=segment_ids, **dict(options))

        outputs, vjp = jax.vjp(rule, primals)
        return outputs, vjp(cotangents)[0]

    return jax.jit(both)


def options_of(case) -> dict:
    return {name: getattr(case.call, name) for name in ("scale", "use_qk_l2norm", "state_layout")}


def evaluate(case, x, implementation: str, C: int | None = None) -> dict[str, np.ndarray]:
    """Outputs and gradients of the public call by name.

    Args:
      C: tokens of a chunk; None for `chunk_size`.
    """
    given = tuple(name for name in PRIMALS if getattr(x, name) is not None)
    options = {**options_of(case), "chunk_size": C or chunk_size(case), "implementation": implementation}
    primals = [getattr(x, name) for name in given]
    call = _compiled(tuple(sorted(options.items())), given)
    (o, final), gradients = call(primals, (x.do, x.dh_T), x.cu_seqlens, x.segment_ids)
    names = ("dh_0" if name == "initial_state" else f"d{name}" for name in given)
    return {"o": o, "final_state": final, **dict(zip(names, gradients, strict=True))}
