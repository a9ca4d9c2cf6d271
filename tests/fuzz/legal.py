"""Random legal calls of the rule, its family and its adapters, compared with the float64 oracle.

A program is drawn first: which function, which form, shapes, dtype, options, packing, and the transformation of JAX
that it is called under. It is compiled once and called with several draws of values.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import gdn_jax
from fuzz import adapters
from gdn_jax.checks import oracle
from gdn_jax.checks.accuracy import bound, cancelling
from gdn_jax.checks.cases import DTYPES

DRAWS = 10
"""Draws of values that one program is called with."""

PRIMALS = ("q", "k", "v", "g", "beta", "erase", "write", "initial_state")
GRADIENT_OF = {name: "dh_0" if name == "initial_state" else f"d{name}" for name in PRIMALS}

ADAPTED = 0.15
"""Share of the programs that are calls of `adapters`."""

INTEGERS = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64)
"""Dtypes of offsets and ids."""

LEAST = 0.25
"""Size below which an error is no longer relative: a sum of few terms may cancel to any size."""


class Program(NamedTuple):
    """Everything that is compiled for. `options` are those of the call."""

    family: bool
    dtype: str
    B: int
    T: int
    N: int
    heads: tuple[int, int, int]
    K: int
    V: int
    packing: str
    given: tuple[str, ...]
    channels: tuple[str, ...]
    """Names among g, erase and write that have a number for each channel."""
    options: dict
    way: str
    mapped: tuple[str, ...]
    """Inputs that a vmap maps over."""
    integers: str = "int32"
    """Dtype of offsets and ids."""
    steps: int = 0
    """Steps of a product for each token; 0 for a rule of one."""

    @property
    def HO(self) -> int:
        return max(self.heads[0], self.heads[2])


def draw_program(rng: np.random.Generator, implementations: tuple[str, ...]) -> Program:
    """A program; where the forms are kernels it has what they take."""
    implementation = str(rng.choice(implementations))
    by_kernels = implementation.startswith("mosaic")
    family = bool(rng.random() < 0.3) and not by_kernels
    dtypes = (
        ("bfloat16", "float16") if by_kernels else ("float32", "float32", "bfloat16", "float16", "float64")
    )
    dtype = str(rng.choice(dtypes))
    packing = str(rng.choice(["rows", "cu_seqlens", "cu_seqlens", "segment_ids"]))
    Hq, Hk, HV = (
        (1, 1, 1),
        (2, 2, 2),
        (1, 1, 2),
        (2, 1, 2),
        (4, 2, 2),
        (2, 2, 4),
        (1, 2, 2),
        (2, 1, 1),
        (2, 3, 6),
    )[rng.integers(9)]
    B = 1 if packing == "cu_seqlens" else int(rng.integers(1, 4))
    N = int(rng.integers(1, 6)) if packing == "cu_seqlens" else B
    T = int(
        rng.choice([1, 2, 7, 16, 17, 33, 40, 64, 65, 70] if not by_kernels else [1, 7, 63, 64, 65, 130, 200])
    )
    ways = (
        "forward",
        "gradients",
        "gradients",
        "vmap",
        "tangents",
        "second",
        "checkpoint",
        "scan",
        "eager",
        "split",
        "known",
    )
    if by_kernels:
        ways = ("forward", "gradients", "gradients", "eager", "known")
    way = str(rng.choice(ways))
    given = [name for name in ("g", "beta", "initial_state") if rng.random() < 0.8]
    channels: list[str] = []
    # The oracle's derivative has no roundings of 16 bits, and as a difference it is no better than 1e-10.
    if way == "second":
        dtype = "float32"
    if family:
        given += [name for name in ("erase", "write") if rng.random() < 0.4]
        if "erase" in given or "write" in given:  # beta stands for both
            given = [name for name in given if name != "beta"]
        channels = [name for name in ("g", "erase", "write") if name in given and rng.random() < 0.7]
    given = ["q", "k", "v", *given]
    scales = (None, None, 1.0, 0.5, 0.0, -0.7, "array") if not by_kernels else (None, 1.0, 0.5)
    scale = scales[rng.integers(len(scales))]
    options = dict(
        scale=scale,
        use_qk_l2norm=bool(rng.random() < 0.4),
        state_layout=str(rng.choice(["kv", "vk"])),
        implementation=implementation,
        chunk_size=64 if by_kernels else int(rng.choice([16, 32, 64, 128])),
    )
    K, V = (int(rng.choice([3, 4, 8, 9, 16] if not by_kernels else [8, 60, 64, 128])) for _ in "KV")
    mapped = tuple(name for name in given if rng.random() < 0.4) or (str(rng.choice(given)),)
    given.sort(key=PRIMALS.index)
    integers = str(np.dtype(rng.choice([kind for kind in INTEGERS if np.iinfo(kind).max >= T])))
    steps = int(rng.integers(1, 4)) if not family and not by_kernels and rng.random() < 0.25 else 0
    if steps > 1 and rng.random() < 0.5:  # the narrowest offsets: those of all steps do not fit them
        T, integers = 100, "int8"
    return Program(
        family, dtype, B, T, N, (Hq, Hk, HV), K, V, packing, tuple(given), tuple(channels), options, way, mapped,
        integers, steps,
    )  # fmt: skip


def draw_values(p: Program, rng: np.random.Generator) -> dict[str, Any]:
    """Arrays of a call by name, and do and dh_T."""
    low, high = DTYPES[p.dtype], np.float64 if p.dtype == "float64" else np.float32
    (Hq, Hk, HV), HO, B, T = p.heads, p.HO, p.B, p.T

    def normal(*shape):
        return rng.standard_normal(shape)

    def unit(x):
        return x if p.options["use_qk_l2norm"] else x / np.linalg.norm(x, axis=-1, keepdims=True)

    def width(name, channels):
        return (channels,) if name in p.channels else ()

    of_steps = (p.steps,) if p.steps else ()
    g = -np.logaddexp(0, normal(B, T, HO, *width("g", p.K))) / rng.choice([1, 16])
    g = np.where(rng.random(g.shape) < rng.choice([0, 0, 0.1]), rng.choice([0.0, -20.0, -np.inf]), g)
    state = (p.N, HO, p.K, p.V) if p.options["state_layout"] == "kv" else (p.N, HO, p.V, p.K)
    x = dict(
        q=unit(normal(B, T, Hq, p.K)).astype(low),
        k=unit(normal(B, T, *of_steps, Hk, p.K)).astype(low),
        v=normal(B, T, *of_steps, HV, p.V).astype(low),
        g=g.astype(high),
        initial_state=normal(*state).astype(high),
    )
    for name, channels in (("beta", 0), ("erase", p.K), ("write", p.V)):
        y = rng.random((B, T, *of_steps, HO, *width(name, channels)))
        x[name] = np.where(rng.random(y.shape) < rng.choice([0, 0.2]), 0, y).astype(high)
    x = {name: x[name] for name in p.given}
    if p.packing == "cu_seqlens":
        ends = np.sort(rng.integers(0, T + 1, p.N))
        if rng.random() < 0.5:
            ends[-1] = T
        x["cu_seqlens"] = np.concatenate([[0], ends]).astype(p.integers)
    if p.packing == "segment_ids":
        x["segment_ids"] = (np.cumsum(rng.random((B, T)) < 0.2, axis=1) % 3).astype(p.integers)
    x["do"], x["dh_T"] = normal(B, T, HO, p.V).astype(low), normal(*state).astype(high)
    return x


def _call(p: Program) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The call as a function of its arrays by name."""
    function = gdn_jax.delta_rule if p.family else gdn_jax.gated_delta_rule
    function = gdn_jax.gated_delta_product if p.steps else function
    options = dict(p.options)
    if options["scale"] == "array":
        options["scale"] = jnp.float32(0.6)
    return lambda **arrays: function(**arrays, **options)


def truth(p: Program, x: dict[str, Any]) -> dict[str, Any]:
    """Outputs and gradients by name, in float64."""
    options = {name: p.options[name] for name in ("use_qk_l2norm", "state_layout")}
    scale = p.options["scale"]
    options["scale"] = float(np.float32(0.6)) if scale == "array" else scale
    x = x | {name: x[name].astype(np.int64) for name in ("cu_seqlens", "segment_ids") if name in x}
    if p.steps:
        return _truth_of_steps(p.steps, x, options)
    return oracle.evaluate(**x, **options)


def _truth_of_steps(n: int, x: dict[str, Any], options: dict) -> dict[str, Any]:
    """Outputs and gradients of a product: the rule of n tokens for each, of which the first decays and the last is
    read."""
    B, T = x["k"].shape[:2]
    rows = {name: y.reshape(B, T * n, *y.shape[3:]) for name, y in x.items() if name in ("k", "v", "beta")}
    for name, step in (("q", n - 1), ("do", n - 1), ("g", 0)):
        if name in x:
            rows[name] = np.zeros((B, T, n, *x[name].shape[2:]), x[name].dtype)
            rows[name][:, :, step] = x[name]
            rows[name] = rows[name].reshape(B, T * n, *x[name].shape[2:])
    if "cu_seqlens" in x:
        rows["cu_seqlens"] = x["cu_seqlens"] * n
    if "segment_ids" in x:
        rows["segment_ids"] = np.repeat(x["segment_ids"], n, 1)
    found = oracle.evaluate(**x | rows, **options)
    for name, step in (("o", n - 1), ("dq", n - 1), ("dg", 0)):
        if found.get(name) is not None:
            found[name] = found[name][:, step::n]
    for name in ("dk", "dv", "dbeta"):
        if found.get(name) is not None:
            found[name] = found[name].reshape(B, T, n, *found[name].shape[2:])
    return found


def compare(p: Program, x: dict, expected: dict, got: dict, factor: float = 1.0) -> list[str]:
    """One line for each result that is wrong, saying how."""
    g = x.get("g")
    k = x["k"] if x["k"].ndim == 4 else x["k"].reshape(*x["k"].shape[:3], -1)
    # Of a product all steps but one of a token keep the whole state.
    cancels = cancelling(None if g is None else g if g.ndim == 3 else g.min(-1), k) or p.K < 8 or p.steps > 1
    wrong = []
    for name, y in got.items():
        reference, y = np.asarray(expected[name]), np.asarray(y).astype(np.float64)
        if reference.shape != y.shape:
            wrong.append(f"{name}: shape {y.shape}, expected {reference.shape}")
            continue
        error = np.sqrt(np.mean((reference - y) ** 2)) if y.size else 0.0
        size = max(np.sqrt(np.mean(reference**2)) if y.size else 0.0, LEAST)
        allowed = factor * bound(name, p.dtype, cancelling=cancels)
        if not error <= allowed * size:
            wrong.append(f"{name}: error {error / size:.2e}, allowed {allowed:.1e}")
    return wrong


def _runners(p: Program) -> Callable[[dict], list[str]]:
    """Calls a program with values and tells what is wrong. Compiled once."""
    call, integers = _call(p), ("cu_seqlens", "segment_ids")

    def parts(x):
        primals = {name: jnp.asarray(x[name]) for name in p.given}
        return primals, {name: jnp.asarray(x[name]) for name in integers if name in x}

    def named(outputs, gradients=None):
        found = dict(zip(("o", "final_state"), outputs, strict=True))
        return found | {GRADIENT_OF[name]: d for name, d in (gradients or {}).items()}

    def both(primals, packing, cotangents, f=call):
        outputs, pull = jax.vjp(lambda primals: f(**primals, **packing), primals)
        return outputs, pull(cotangents)[0]

    def cotangents(x):
        return jnp.asarray(x["do"]), jnp.asarray(x["dh_T"])

    if p.way in ("gradients", "checkpoint"):
        f = jax.checkpoint(call) if p.way == "checkpoint" else call
        run = jax.jit(lambda *a: both(*a, f=f))
        return lambda x: compare(p, x, truth(p, x), named(*run(*parts(x), cotangents(x))))
    if p.way == "vmap":
        axes = {name: 0 if name in p.mapped else None for name in p.given}
        run = jax.jit(jax.vmap(both, (axes, None, None)))

        def check(x):
            other = {name: np.roll(x[name], 1, 1 if x[name].shape[1] > 1 else 0) for name in p.mapped}
            primals, packing = parts(x)
            mapped = {name: jnp.stack([primals[name], jnp.asarray(other[name])]) for name in p.mapped}
            results = named(*run(primals | mapped, packing, cotangents(x)))
            wrong = []
            for i, y in enumerate((x, x | other)):
                wrong += compare(p, y, truth(p, y), {name: z[i] for name, z in results.items()})
            return wrong

        return check
    if p.way == "tangents":
        run = jax.jit(
            lambda primals, packing, t: jax.jvp(lambda y: call(**y, **packing), (primals,), (t,))[1]
        )

        def check_tangents(x):
            rng = np.random.default_rng(p.T)
            t = {name: rng.standard_normal(x[name].shape).astype(x[name].dtype) for name in p.given}
            o, h = (np.asarray(y).astype(np.float64) for y in run(*parts(x), jax.tree.map(jnp.asarray, t)))
            e = truth(p, x)
            terms = [(e[GRADIENT_OF[name]], t[name].astype(np.float64)) for name in p.given]
            difference = (o * x["do"]).sum() + (h * x["dh_T"]).sum() - sum((a * b).sum() for a, b in terms)
            # Against the most that the terms can be, for their sum may cancel.
            largest = sum(np.linalg.norm(a) * np.linalg.norm(b) for a, b in terms)
            allowed = bound("dbeta", p.dtype) * max(largest, LEAST)
            return (
                []
                if abs(difference) <= allowed
                else [f"tangents: off by {difference:.2e}, allowed {allowed:.1e}"]
            )

        return check_tangents
    if p.way == "second":
        return _second(p, both)
    if p.way == "scan":

        def scanned(primals, packing):
            step = lambda c, _: (c, call(**primals, **packing))  # noqa: E731
            return jax.tree.map(lambda y: y[1], jax.lax.scan(step, 0, length=2)[1])

        run = jax.jit(scanned)
    elif p.way == "known":  # NumPy: lengths and ids are known while tracing
        return lambda x: compare(
            p, x, truth(p, x), named(call(**{n: x[n] for n in (*p.given, *integers) if n in x}))
        )
    elif p.way == "eager":
        run = lambda primals, packing: call(**primals, **packing)  # noqa: E731
    elif (
        p.way == "split" and p.packing == "rows" and p.T > 1 and not p.steps and not (p.family and p.channels)
    ):
        return _split(p, call)
    else:
        run = jax.jit(lambda primals, packing: call(**primals, **packing))
    return lambda x: compare(p, x, truth(p, x), named(run(*parts(x))))


def _second(p: Program, both: Callable) -> Callable[[dict], list[str]]:
    """The gradients' derivative along random tangents, against a difference of the oracle's gradients."""

    def gradients(primals, packing, cotangents, t):
        return jax.jvp(lambda y: both(y, packing, cotangents)[1], (primals,), (t,))[1]

    run, step = jax.jit(gradients), 1e-5

    def check(x):
        rng = np.random.default_rng(p.T)
        t = {name: rng.standard_normal(x[name].shape).astype(x[name].dtype) for name in p.given}
        primals, more = ({name: jnp.asarray(y[name]) for name in p.given} for y in (x, t))
        packing = {name: jnp.asarray(x[name]) for name in ("cu_seqlens", "segment_ids") if name in x}
        got = run(primals, packing, (jnp.asarray(x["do"]), jnp.asarray(x["dh_T"])), more)
        sides = [{name: x[name].astype(np.float64) + s * step * t[name] for name in p.given} for s in (1, -1)]
        after, before = (truth(p, x | side) for side in sides)
        names = [GRADIENT_OF[name] for name in p.given]
        want = {name: (after[name] - before[name]) / (2 * step) for name in names}
        found = {GRADIENT_OF[name]: y for name, y in got.items()}
        # The derivative of an error is bounded by nothing that is known: ten times what gradients may have.
        return compare(p, x, want, found, 10)

    return check


def _split(p: Program, call: Callable) -> Callable[[dict], list[str]]:
    """A row cut in two, whose second part is taken token by token."""
    cut = p.T // 2
    first = jax.jit(call)
    options = {name: p.options[name] for name in ("use_qk_l2norm", "state_layout")}
    scale = jnp.float32(0.6) if p.options["scale"] == "array" else p.options["scale"]
    step = gdn_jax.delta_step if p.family else gdn_jax.gated_delta_step

    @jax.jit
    def one(state, q, k, v, g, beta, **more):
        return step(q, k, v, g, beta, state, scale=scale, **options, **more)

    def check(x):
        arrays = {name: jnp.asarray(x[name]) for name in p.given}
        states = {name: y for name, y in arrays.items() if name == "initial_state"}
        tokens = {name: y for name, y in arrays.items() if name != "initial_state"}
        o, state = first(**{name: y[:, :cut] for name, y in tokens.items()}, **states)
        outputs = [o]
        for t in range(cut, p.T):
            at = {name: y[:, t] for name, y in tokens.items()}
            q, k, v, g, beta = (at.pop(name, None) for name in ("q", "k", "v", "g", "beta"))
            o, state = one(state, q, k, v, g, beta, **at)
            outputs.append(o[:, None])
        got = {"o": jnp.concatenate(outputs, 1), "final_state": state}
        return compare(p, x, truth(p, x), got)

    return check


def legal(seed: int, count: int, implementations: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    """Runs so many calls; yields each with what was wrong."""
    for n in range(-(-count // DRAWS)):
        rng, plain = np.random.default_rng([seed, n]), "recurrent" in implementations
        if plain and rng.random() < ADAPTED:
            name, adapted = adapters.runner(rng)
            for draw in range(min(DRAWS, count - n * DRAWS)):
                yield f"seed {seed} program {n} draw {draw}: {name}", _findings(adapted, rng)
            continue
        p = draw_program(rng, implementations)
        with jax.enable_x64(p.dtype == "float64"):
            run = _runners(p)
            for draw in range(min(DRAWS, count - n * DRAWS)):
                wrong = _findings(lambda rng: run(draw_values(p, rng)), rng)  # noqa: B023
                yield f"seed {seed} program {n} draw {draw}: {p}", wrong
        jax.clear_caches()


def _findings(run: Callable[[np.random.Generator], list[str]], rng: np.random.Generator) -> list[str]:
    """What a run finds wrong; that it raises is wrong too, whatever it is: the call is legal."""
    try:
        return run(rng)
    except Exception as error:
        return [f"{type(error).__name__}: {str(error)[:300]}"]
