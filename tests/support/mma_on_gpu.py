"""Checks and times the kernels by mma.sync on a GPU, in some 300 seconds.

    python tests/support/mma_on_gpu.py [--seconds N] [--out FILE]

Run it from the repository's root, with this folder's parent on PYTHONPATH. First come two cases of the table, against
the float64 oracle, both passes: errors as parts of their bounds, and whether 20 repeats have the same bits. Then
times of sizes of the table of `gdn bench rule`, beside the kernels of Hopper where the device has them and the
chunked form. Then the other cases and configurations, and all of it "as 8.0", in the code of an A100, which later
GPUs run too. Each line is written when it is known, also to FILE; what the time does not allow is named. Ends with 1
if a line failed.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tolerances import head_axis, kernel_tolerance, worst_ratio

import gdn_jax
from gdn_jax.bench.measure import by_device, compiled
from gdn_jax.checks import cases, oracle
from gdn_jax.checks.accuracy import NAMES
from gdn_jax.checks.check import value_and_gradients
from gdn_jax.shapes import RuleArrays
from pallas_kernels.ampere import backward, rule, walk
from pallas_kernels.backward.rule import OutputCotangents
from pallas_kernels.tools.compiling import lowering_for

FORWARD, BOTH = "forward", "both passes"
VALUES = ("slow-decay", "mixed-decay", "reset-at-some-tokens", "beta-0-at-some-tokens", "correlated-keys")
CHECKS = [
    *((name, dtype, None) for dtype in ("bfloat16", "float16") for name in VALUES),
    ("packed-reset", "bfloat16", None),
    ("groupings-that-do-not-nest", "bfloat16", None),
    ("packed-K128", "bfloat16", walk.Config(2)),
    ("packed-K128", "bfloat16", walk.Config(1, 2)),
]
TIMES = [
    (FORWARD, (16, 64), (1, 32768)),
    (FORWARD, (16, 32), (8, 4096)),
    (BOTH, (16, 32), (1, 32768)),
    (FORWARD, (2, 8), (1, 32768)),
]
FIRST = 2
"""Checks before the first time."""

CONFIGS = {
    "": None,
    ", 1 warpgroup": walk.Config(1),
    ", 2 warpgroups": walk.Config(2),
    ", 2 slots": walk.Config(2, 2),
}


def both_passes(options: dict[str, Any], primals, cotangents, cu_seqlens):
    """Outputs and gradients of the kernels by mma.sync."""
    x = RuleArrays(*primals, cu_seqlens, None)
    backwards = {name: option for name, option in options.items() if name != "segment_chunks"}
    o, final, residuals = rule.forward(x, **options)
    return o, final, *backward.backward(x, residuals, OutputCotangents(*cotangents), **backwards)


def made(function: Callable[..., Any], arguments: tuple, as_8_0: bool) -> Callable[[], Any]:
    """A call of a function, compiled as one CUDA graph."""
    with lowering_for("8.0") if as_8_0 else contextlib.nullcontext():
        program = compiled(function, *arguments)
    return lambda: program(*arguments)


def checked(name: str, dtype: str, config: Any, as_8_0: bool) -> str:
    """Errors of a case, over their bounds."""
    case = cases.CASES[name]
    x = cases.inputs(case, dtype)
    truth = oracle.evaluate(**x.arguments, **case.rule_options, do=x.do, dh_T=x.dh_T)
    options = dict(scale=case.K**-0.5 if case.scale is None else case.scale, state_layout=case.state_layout)
    arguments = jax.tree.map(jnp.asarray, (x[:6], (x.do, x.dh_T), x.cu_seqlens))
    call = made(partial(both_passes, options | {"config": config}), arguments, as_8_0)
    results = jax.device_get(call())
    parts = {
        key: worst_ratio(truth[key], got, head_axis(key)) / kernel_tolerance(key, dtype, case)
        for key, got in zip(NAMES, results, strict=True)
        if got is not None
    }
    again = (jax.device_get(call()) for _ in range(20))
    same = all(np.array_equal(a, b) for y in again for a, b in zip(y, results, strict=True) if b is not None)
    text = " ".join(f"{key} {part:.2f}" for key, part in parts.items())
    verdict = "ok" if max(parts.values()) <= 1 and same else "FAIL"
    return f"{verdict}: {text}; 20 repeats {'equal' if same else 'DIFFER'}"


def inputs(heads: tuple[int, int], shape: tuple[int, int], width: int = 128):
    """Random arguments of a call, and cotangents of its results."""
    (Hk, HV), (B, T) = heads, shape
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def normal(*sizes: int) -> jax.Array:
        return jax.random.normal(next(keys), sizes, jnp.bfloat16)

    q, k = (gdn_jax.l2norm(normal(B, T, Hk, width)) for _ in range(2))
    v, do, g = normal(B, T, HV, width), normal(B, T, HV, width), normal(B, T, HV).astype(jnp.float32)
    state = normal(B, HV, width, width).astype(jnp.float32)
    primals = (q, k, v, jax.nn.log_sigmoid(g) / 16, jax.nn.sigmoid(g), state)
    return primals, (do, state)


def call_of(what: str, by: str) -> Callable[..., Any]:
    """A function of primals and cotangents: the kernels of a configuration, or an implementation of the rule."""

    def by_mma(primals, cotangents):
        options = dict(scale=128**-0.5, config=CONFIGS[by])
        if what == BOTH:
            return both_passes(options, primals, cotangents, None)
        return rule.forward(RuleArrays(*primals, None, None), **options)[:2]

    def by_name(primals, cotangents):
        if what == BOTH:
            return value_and_gradients(by, {})(primals, cotangents, None, None)
        return gdn_jax.gated_delta_rule(*primals[:5], initial_state=primals[5], implementation=by)

    return by_mma if by in CONFIGS else by_name


def timed(what: str, heads: tuple[int, int], shape: tuple[int, int], by: str, as_8_0: bool = False) -> str:
    """Milliseconds of a call, and of its kernels."""
    timing = by_device(made(call_of(what, by), inputs(heads, shape), as_8_0), 10)
    each = " ".join(f"{name.removesuffix('_mosaic_gpu')} {ms:.3f}" for name, ms in timing.kernels[:12])
    return f"{timing.ms:.3f} ms ({timing.fastest:.3f} to {timing.slowest:.3f}): {each}"


def main() -> None:
    """Runs everything in order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="nothing is started after so many")
    parser.add_argument("--out", default="mma_on_gpu.txt", help="file that every line is added to")
    options = parser.parse_args()
    started, device = time.time(), jax.devices()[0]
    capability = getattr(device, "compute_capability", "none")
    failed: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        with open(options.out, "a") as file:
            file.write(line + "\n")

    def attempt(name: str, call: Callable[[], str]) -> None:
        if time.time() - started > options.seconds:
            return say(f"{name}: no time")
        try:
            line = call()
        except Exception as error:  # of a compiler or a device, too; the next line may still be right
            line = f"FAIL: raised {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if line.startswith("FAIL"):
            failed.append(name)
        say(f"{name}: {line} [{time.time() - started:.0f} s]")

    say(f"jax {jax.__version__}, {device.device_kind}, compute capability {capability}")
    if device.platform != "gpu":
        say("there is no GPU")
        sys.exit(1)
    builds = {"": False} if capability == "8.0" else {"": False, ", as 8.0": True}
    others = ("mosaic_gpu", "chunked") if capability == "9.0" else ("chunked",)

    def check(build: str, cases: list[tuple]) -> None:
        for name, dtype, config in cases:
            attempt(f"{name}, {dtype}, {config}{build}", partial(checked, name, dtype, config, builds[build]))

    def measure(ways: tuple[str, ...], as_8_0: bool = False) -> None:
        for what, heads, shape in TIMES:
            for by in ways:
                name = f"{what}, heads {heads}, rows {shape}, {by if by in others else 'mma.sync' + by}"
                attempt(name + ", as 8.0" * as_8_0, partial(timed, what, heads, shape, by, as_8_0))

    check("", CHECKS[:FIRST])
    measure(("", *others))
    check("", CHECKS[FIRST:])
    measure(tuple(CONFIGS)[1:])
    if len(builds) > 1:
        check(", as 8.0", CHECKS)
        measure(("",), as_8_0=True)
    if failed:
        sys.exit(f"{len(failed)} failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
