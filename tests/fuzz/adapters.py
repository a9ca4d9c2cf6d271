"""Random legal calls of the adapters, in the arguments of other libraries, compared with the float64 oracles.

A program is drawn first and compiled once, as in `legal`; integers are of any dtype that holds them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.adapters import fla, maxtext, skyrl, tokamax
from gdn_jax.checks import oracle
from gdn_jax.checks.accuracy import bound

INTEGERS = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32)
"""Dtypes of offsets and ids; rows are short enough for all."""

LEAST = 0.25
"""Size below which an error is no longer relative, as in `legal`."""

Arrays = dict[str, np.ndarray]


class Program(NamedTuple):
    """A call as a function of arrays by name, a draw of these, and outputs and final states in float64."""

    name: str
    call: Callable[..., tuple[jax.Array, jax.Array]]
    draw: Callable[[np.random.Generator], Arrays]
    truth: Callable[[Arrays], tuple[np.ndarray, np.ndarray]]


def _tokens(
    rng: np.random.Generator, B: int, T: int, heads: tuple[int, int], widths: tuple[int, int]
) -> Arrays:
    (H, HV), (K, V) = heads, widths
    x = dict(q=rng.standard_normal((B, T, H, K)), k=rng.standard_normal((B, T, H, K)),
             v=rng.standard_normal((B, T, HV, V)), g=-np.abs(rng.standard_normal((B, T, HV))),
             beta=rng.random((B, T, HV)))  # fmt: skip
    x["k"] /= np.linalg.norm(x["k"], axis=-1, keepdims=True)
    return {name: y.astype(np.float32) for name, y in x.items()}


def _oracle(q, k, v, g, beta, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    if options.get("cu_seqlens") is not None:
        options["cu_seqlens"] = options["cu_seqlens"].astype(np.int64)
    return oracle.forward(q, k, v, g, beta, **options)


def _sizes(rng: np.random.Generator) -> tuple[int, int, tuple[int, int], tuple[int, int]]:
    heads = ((1, 1), (1, 2), (2, 2), (2, 4))[rng.integers(4)]
    return int(rng.integers(1, 3)), int(rng.choice([1, 7, 40, 70])), heads, (int(rng.choice([3, 8])), 4)


def _fla(rng: np.random.Generator) -> Program:
    B, T, heads, widths = _sizes(rng)
    recurrent, packed, raw, doubled = (bool(rng.random() < p) for p in (0.5, 0.6, 0.4, 0.3))
    by_channels, dtype = recurrent and rng.random() < 0.5, rng.choice(INTEGERS)
    v_first, norm, begins = (bool(rng.random() < 0.5) for _ in range(3))
    B, N = (1, int(rng.integers(1, 5))) if packed else (B, B)
    raw = raw and not by_channels
    options = dict(state_v_first=v_first, use_qk_l2norm_in_kernel=norm, output_final_state=True)
    options |= dict(use_gate_in_kernel=raw, use_beta_sigmoid_in_kernel=raw, allow_neg_eigval=raw and doubled)
    options |= {} if recurrent else dict(chunk_size=int(rng.choice([16, 64])))
    function = fla.fused_recurrent_gated_delta_rule if recurrent else fla.chunk_gated_delta_rule

    def draw(rng: np.random.Generator) -> Arrays:
        x = _tokens(rng, B, T, heads, widths)
        if by_channels:
            x["gk"] = -np.abs(rng.standard_normal((B, T, heads[1], widths[0]))).astype(np.float32)
        if raw:
            x["beta"] = rng.standard_normal(x["beta"].shape).astype(np.float32)
            x["A_log"] = x["dt_bias"] = rng.standard_normal(heads[1]).astype(np.float32)
        if begins:
            shape = widths[::-1] if v_first else widths
            x["initial_state"] = rng.standard_normal((N, heads[1], *shape)).astype(np.float32)
        if packed:
            x["cu_seqlens"] = np.concatenate([[0], np.sort(rng.integers(0, T + 1, N))]).astype(dtype)
        return x

    def truth(x: Arrays) -> tuple[np.ndarray, np.ndarray]:
        x = dict(x)
        A_log, bias, gk = (x.pop(name, None) for name in ("A_log", "dt_bias", "gk"))
        if raw:
            x["g"] = -np.exp(A_log.astype(np.float64)) * np.logaddexp(x["g"] + bias.astype(np.float64), 0)
            x["beta"] = (1 + doubled) / (1 + np.exp(-x["beta"].astype(np.float64)))
        if gk is not None:
            x["g"] = x["g"][..., None].astype(np.float64) + gk
        return _oracle(**x, use_qk_l2norm=norm, state_layout="vk" if v_first else "kv")

    name = (
        f"fla {function.__name__} {B, T, N, heads, widths} {dtype.__name__} channels {by_channels} {options}"
    )
    return Program(name, lambda **x: function(**x, **options), draw, truth)


def _tokamax(rng: np.random.Generator) -> Program:
    B, T, (_, H), (K, V) = _sizes(rng)
    dtype, N = rng.choice(INTEGERS), int(rng.choice([1, 3, 100, 200]))
    by_ids, begins, norm = (bool(rng.random() < p) for p in (0.8, 0.5, 0.5))
    N = N if by_ids else 1
    options = dict(output_final_state=True, use_qk_l2norm=norm)
    options |= dict(max_num_segments=N) if by_ids else {}

    def draw(rng: np.random.Generator) -> Arrays:
        x = _tokens(rng, B, T, (H, H), (K, V))
        x["g"] = -np.abs(rng.standard_normal((B, T, H, K))).astype(np.float32)
        names = dict(q="query", k="key", v="value", g="gate", beta="beta")
        x = {names[name]: np.moveaxis(y, 2, 0) for name, y in x.items()}
        if begins:
            x["initial_state"] = rng.standard_normal((B, N, H, K, V)).astype(np.float32)
        if by_ids:
            most = min(N + 2, np.iinfo(dtype).max)
            x["segment_ids"] = rng.integers(0, most, (B, T), endpoint=True).astype(dtype)
        return x

    def truth(x: Arrays) -> tuple[np.ndarray, np.ndarray]:
        tokens = [np.moveaxis(x[name], 0, 2) for name in ("query", "key", "value", "gate", "beta")]
        final = x.get("initial_state", np.zeros((B, N, H, K, V))).astype(np.float64)
        ids = x["segment_ids"].astype(np.int64) if by_ids else np.ones((B, T), np.int64)
        o = np.zeros((B, T, H, V))
        for b, n in sorted({(row, int(i) - 1) for row in range(B) for i in ids[row] if 0 < i <= N}):
            mine = ids[b] == n + 1
            some = (y[b : b + 1, mine] for y in tokens)
            o[b, mine], final[b, n] = (
                y[0] for y in _oracle(*some, initial_state=final[b, n][None], use_qk_l2norm=norm)
            )
        return np.moveaxis(o, 2, 0), final

    name = f"tokamax {B, T, N, H, K, V} {dtype.__name__} ids {by_ids} states {begins} {options}"
    return Program(name, lambda **x: tokamax.kimi_delta_attention(**x, **options), draw, truth)


def _skyrl(rng: np.random.Generator) -> Program:
    B, T, heads, widths = _sizes(rng)
    masked, segmented = ((False, False), (True, False), (False, True))[rng.integers(3)]
    dtype = rng.choice(INTEGERS)

    def draw(rng: np.random.Generator) -> Arrays:
        x = _tokens(rng, B, T, heads, widths)
        x["initial_state"] = rng.standard_normal((B, heads[1], *widths)).astype(np.float32)
        if masked:
            x["attention_mask"] = (np.arange(T) >= rng.integers(0, T, (B, 1))).astype(dtype)
        if segmented:
            x["segment_ids"] = (np.cumsum(rng.random((B, T)) < 0.2, axis=1) % 3).astype(dtype)
        return _named(x)

    def truth(x: Arrays) -> tuple[np.ndarray, np.ndarray]:
        mask = x.get("attention_mask", np.ones((B, T))).astype(bool)
        g, beta = (np.where(mask[..., None], x[name], 0) for name in ("g", "beta"))
        query = np.where(mask[..., None, None], x["query"], 0)
        ids = x["segment_ids"].astype(np.int64) if segmented else None
        options = dict(initial_state=x["initial_state"], segment_ids=ids, use_qk_l2norm=True)
        return _oracle(query, x["key"], x["value"], g, beta, **options)

    name = f"skyrl {B, T, heads, widths} {dtype.__name__} mask {masked} segments {segmented}"
    return Program(name, skyrl.chunk_gated_delta_rule, draw, truth)


def _maxtext(rng: np.random.Generator) -> Program:
    B, T, heads, widths = _sizes(rng)
    options = dict(use_qk_norm_in_gdn=bool(rng.random() < 0.5), compute_dtype=jnp.float32)

    def draw(rng: np.random.Generator) -> Arrays:
        x = _tokens(rng, B, T, heads, widths)
        return _named(x | dict(initial_state=rng.standard_normal((B, heads[1], *widths)).astype(np.float32)))

    def truth(x: Arrays) -> tuple[np.ndarray, np.ndarray]:
        tokens = (x[name] for name in ("query", "key", "value", "g", "beta"))
        norm = options["use_qk_norm_in_gdn"]
        return _oracle(*tokens, initial_state=x["initial_state"], use_qk_l2norm=norm)

    name = f"maxtext {B, T, heads, widths} {options}"
    return Program(name, lambda **x: maxtext.jax_chunk_gated_delta_rule(**x, **options), draw, truth)


def _named(x: Arrays) -> Arrays:
    names = dict(q="query", k="key", v="value")
    return {names.get(name, name): y for name, y in x.items()}


LIBRARIES = (_fla, _fla, _tokamax, _tokamax, _skyrl, _maxtext)


def runner(rng: np.random.Generator) -> tuple[str, Callable[[np.random.Generator], list[str]]]:
    """A drawn program, in words, and a function that calls it with drawn values and tells what is wrong."""
    p: Program = LIBRARIES[rng.integers(len(LIBRARIES))](rng)
    call = jax.jit(p.call)

    def run(rng: np.random.Generator) -> list[str]:
        x, wrong = p.draw(rng), []
        for name, want, got in zip(("o", "final_state"), p.truth(x), call(**x), strict=True):
            got = np.asarray(got).astype(np.float64)
            if want.shape != got.shape:
                wrong.append(f"{name}: shape {got.shape}, expected {want.shape}")
                continue
            size = max(np.sqrt(np.mean(want**2)), LEAST)
            error = np.sqrt(np.mean((want - got) ** 2)) / size
            if not error <= bound(name, "float32", cancelling=True):
                wrong.append(f"{name}: error {error:.2e}")
        return wrong

    return p.name, run
