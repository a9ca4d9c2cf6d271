"""Random illegal calls: one argument of a legal call is spoilt, and a ValueError or TypeError has to name it.

Integers of the legal call have any dtype that holds them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gdn_jax
from gdn_jax import delta_chunk_states, delta_rule, delta_step, gated_delta_product, serving
from gdn_jax.adapters import fla, maxtext, skyrl, tokamax

B, T, HK, HV, K, V, SLOTS, N = 2, 5, 1, 2, 4, 3, 6, 2


def _ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def _sequence() -> dict[str, Any]:
    return dict(q=_ones(B, T, HK, K), k=_ones(B, T, HK, K), v=_ones(B, T, HV, V), g=-_ones(B, T, HV),
                beta=_ones(B, T, HV), initial_state=_ones(B, HV, K, V), scale=0.5, use_qk_l2norm=False,
                state_layout="kv", chunk_size=16, implementation="chunked",
                segment_ids=np.zeros((B, T), np.int32))  # fmt: skip


def _packed() -> dict[str, Any]:
    x = {name: y[:1] if isinstance(y, np.ndarray) else y for name, y in _sequence().items()}
    return {**x, "segment_ids": None, "initial_state": _ones(N, HV, K, V), "cu_seqlens": np.array([0, 2, T])}


def _token() -> dict[str, Any]:
    return dict(q=_ones(B, HK, K), k=_ones(B, HK, K), v=_ones(B, HV, V), g=-_ones(B, HV), beta=_ones(B, HV),
                state=_ones(B, HV, K, V), scale=0.5, use_qk_l2norm=False, state_layout="kv")  # fmt: skip


def _states() -> dict[str, Any]:
    x = _sequence()
    dropped = ("q", "scale", "use_qk_l2norm", "implementation")
    return {name: y for name, y in x.items() if name not in dropped} | {"use_k_l2norm": False}


def _product() -> dict[str, Any]:
    x = _sequence()
    return x | dict(k=_ones(B, T, 2, HK, K), v=_ones(B, T, 2, HV, V), beta=_ones(B, T, 2, HV))


def _family() -> dict[str, Any]:
    return _sequence() | dict(
        g=-_ones(B, T, HV, K), beta=None, erase=_ones(B, T, HV, K), write=_ones(B, T, HV)
    )


def _decode() -> dict[str, Any]:
    x = {name: jnp.asarray(y) for name, y in _token().items() if isinstance(y, np.ndarray)}
    return dict(q=x["q"], k=x["k"], v=x["v"], a=x["g"], b=x["beta"], pool=jnp.ones((SLOTS, HV, K, V)),
                A_log=jnp.ones(HV), dt_bias=jnp.ones(HV), read_slots=np.array([0, 3]),
                write_slots=np.array([1, 2]), scale=0.5, use_qk_l2norm=True, allow_neg_eigval=False,
                state_layout="kv", null_slot=None, batch_invariant=False, implementation="xla")  # fmt: skip


def _decode_channels() -> dict[str, Any]:
    x, of_keys = _decode(), jnp.ones((N, HV, K))
    return x | dict(a=of_keys, b=of_keys, w=jnp.ones((N, HV, V)), A_log=None, dt_bias=jnp.ones((HV, K)),
                    lower_bound=-5.0)  # fmt: skip


def _verify() -> dict[str, Any]:
    x = _decode()
    del x["read_slots"], x["write_slots"]
    x |= {name: jnp.ones((N, 2, *x[name].shape[1:])) for name in ("q", "k", "v", "a", "b")}
    return x | dict(state_slots=np.array([[0, 1], [2, 3]]), num_accepted_tokens=np.array([1, 2]),
                    num_tokens=np.array([2, 1]), parents=np.array([[-1, 0], [-1, -1]]))  # fmt: skip


def _prefill() -> dict[str, Any]:
    x = {name: y for name, y in _packed().items() if name not in ("initial_state", "segment_ids")}
    return x | dict(pool=jnp.ones((SLOTS, HV, K, V)), read_slots=np.array([0, 3]), write_slots=np.array([1, 2]),
                    has_initial_state=np.array([True, False]), null_slot=None, batch_invariant=False)  # fmt: skip


def _prefill_channels() -> dict[str, Any]:
    gates = dict(g=-_ones(1, T, HV, K), beta=None, erase=_ones(1, T, HV, K), write=_ones(1, T, HV))
    return _prefill() | gates


def _ring() -> dict[str, Any]:
    return dict(states=jnp.ones((SLOTS, HV, K, V)), num_key_heads=HK, length=4, dtype=jnp.float32,
                state_layout="kv", trees=False)  # fmt: skip


def _conv() -> dict[str, Any]:
    return dict(x=_ones(1, T, 6), weight=_ones(6, 4), bias=_ones(6), initial_state=_ones(N, 6, 3),
                activation="silu", cu_seqlens=np.array([0, 2, T]))  # fmt: skip


POOL = {"any": np.ones((SLOTS, 3))}
"""Pools that slots are copied in: a tree of arrays of any kind."""


def _copy() -> dict[str, Any]:
    return dict(pool=POOL, from_slots=np.array([0, 1]), to_slots=np.array([2, 3]), null_slot=None)


def _take() -> dict[str, Any]:
    return dict(pool=POOL, slots=np.array([0, 3]), null_slot=None)


def _put() -> dict[str, Any]:
    return _take() | dict(rows={"any": np.ones((N, 3))})


def _flush() -> dict[str, Any]:
    pool = serving.make_ring_pool(**_ring())
    return dict(pool=pool, read_slots=np.array([0, 3]), state_layout="kv", null_slot=None)


def _accept() -> dict[str, Any]:
    x = _flush() | dict(num_accepted_tokens=np.array([1, 2]))
    return {name: y for name, y in x.items() if name != "state_layout"}


def _conv_update() -> dict[str, Any]:
    x = dict(x=jnp.ones((N, 6)), pool=jnp.ones((SLOTS, 6, 3)), weight=jnp.ones((6, 4)), bias=jnp.ones(6))
    slots = dict(read_slots=np.array([0, 3]), write_slots=np.array([1, 2]))
    return x | slots | dict(activation="silu", null_slot=None)


def _conv_prefill() -> dict[str, Any]:
    x = {name: y for name, y in _conv_update().items() if name != "x"}
    return x | dict(
        x=jnp.ones((1, T, 6)), cu_seqlens=np.array([0, 2, T]), has_initial_state=np.array([True, False])
    )


def _conv_verify() -> dict[str, Any]:
    x = {name: y for name, y in _conv_update().items() if name not in ("x", "read_slots", "write_slots")}
    names = ("state_slots", "num_accepted_tokens", "num_tokens", "parents")
    return x | dict(x=jnp.ones((N, 2, 6))) | {name: _verify()[name] for name in names}


def _fla() -> dict[str, Any]:
    x = _packed()
    names = ("q", "k", "v", "g", "beta", "scale", "initial_state", "cu_seqlens", "chunk_size")
    return {name: x[name] for name in names}


def _fla_recurrent() -> dict[str, Any]:
    x = _fla() | dict(gk=-_ones(1, T, HV, K))
    del x["chunk_size"]
    return x


def _tokamax() -> dict[str, Any]:
    of_keys = _ones(HV, B, T, K)
    x = dict(query=of_keys, key=of_keys, value=_ones(HV, B, T, V), gate=-of_keys, beta=_ones(HV, B, T))
    return x | dict(initial_state=_ones(B, N, HV, K, V), segment_ids=np.ones((B, T), np.int32), scale=0.5,
                    use_qk_l2norm=False, implementation="chunked")  # fmt: skip


def _rows() -> dict[str, Any]:
    x, names = _sequence(), dict(q="query", k="key", v="value")
    kept = ("q", "k", "v", "g", "beta", "chunk_size", "initial_state")
    return {names.get(name, name): x[name] for name in kept}


def _skyrl() -> dict[str, Any]:
    return _rows() | dict(segment_ids=np.zeros((B, T), np.int32))


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "gated_delta_rule": (gdn_jax.gated_delta_rule, _sequence),
    "gated_delta_rule, packed": (gdn_jax.gated_delta_rule, _packed),
    "gated_delta_step": (gdn_jax.gated_delta_step, _token),
    "chunk_states": (gdn_jax.chunk_states, _states),
    "supported_implementations": (
        gdn_jax.supported_implementations,
        lambda: {name: y for name, y in _sequence().items() if name != "implementation"},
    ),
    "delta_rule": (delta_rule, _family),
    "delta_step": (delta_step, _token),
    "delta_chunk_states": (delta_chunk_states, _states),
    "gated_delta_product": (gated_delta_product, _product),
    "causal_conv1d": (gdn_jax.causal_conv1d, _conv),
    "decode": (serving.decode, _decode),
    "verify": (serving.verify, _verify),
    "prefill": (serving.prefill, _prefill),
    "make_ring_pool": (serving.make_ring_pool, _ring),
    "copy_slots": (serving.copy_slots, _copy),
    "take_slots": (serving.take_slots, _take),
    "put_slots": (serving.put_slots, _put),
    "flush": (serving.flush, _flush),
    "snapshot": (serving.snapshot, _flush),
    "accept": (serving.accept, _accept),
    "causal_conv1d_update": (serving.causal_conv1d_update, _conv_update),
    "causal_conv1d, pool": (serving.causal_conv1d, _conv_prefill),
    "causal_conv1d_verify": (serving.causal_conv1d_verify, _conv_verify),
    "fla": (fla.chunk_gated_delta_rule, _fla),
    "fla, recurrent": (fla.fused_recurrent_gated_delta_rule, _fla_recurrent),
    "tokamax": (tokamax.kimi_delta_attention, _tokamax),
    "skyrl": (skyrl.chunk_gated_delta_rule, _skyrl),
    "maxtext": (maxtext.jax_chunk_gated_delta_rule, _rows),
    "decode, channels": (serving.decode, _decode_channels),
    "prefill, channels": (serving.prefill, _prefill_channels),
}

READS = ("take_slots", "snapshot")
"""Calls that take any number of slots."""

FLAGS = ("use_qk_l2norm", "use_k_l2norm", "allow_neg_eigval", "batch_invariant", "trees")
WRONG: dict[str, tuple] = {
    **dict.fromkeys(FLAGS, ("no", 1.5, None, np.ones(2, bool), "")),
    "scale": ("a", 2 + 5j, [1.0], np.ones(2, np.float32), 10**400, True, {}),
    "state_layout": ("vv", "", None, 1, "KV"),
    "chunk_size": (48, 0, -16, 64.0, "64", 1 << 40, None),
    "implementation": ("triton", "", 3, b"chunked", ("chunked",)),
    "activation": ("relu", 1, ""),
    "num_key_heads": (0, -1, 3, 1.0, "1", None),
    "length": (0, -2, 1.5, "4", None),
    "null_slot": ("0", 1.5, -5, SLOTS, SLOTS + 4, True, [0]),
    "dtype": ("x", np.int32, bool, 7),
    "lower_bound": ("x", 1.0, 0.0, [-1.0], 2j),
    "rows": ({}, None, {"any": np.ones((1, 3))}, {"any": np.ones((N, 4))}, {"other": np.ones((N, 3))}, {"any": 1},
             {"any": np.ones((N, 3), np.int8)}),
}  # fmt: skip
SLOT_ARGUMENTS = ("slots", "read_slots", "write_slots", "state_slots", "from_slots", "to_slots")
INTEGERS = (*SLOT_ARGUMENTS, "cu_seqlens", "segment_ids", "num_accepted_tokens", "num_tokens", "parents")
MAY_BE_NONE = (
    *(
        "g",
        "gk",
        "beta",
        "erase",
        "write",
        "initial_state",
        "segment_ids",
        "cu_seqlens",
        "bias",
        "write_slots",
    ),
    *("num_tokens", "parents", "has_initial_state", "scale", "implementation", "activation", "null_slot"),
)


def _spoilt(name: str, x: Any, rng: np.random.Generator) -> Any:
    """Something that the argument may not be, in place of x; NotImplemented where nothing comes to mind."""
    if name in WRONG:
        wrong = WRONG[name]
        return wrong[rng.integers(len(wrong))]
    if x is POOL:
        return ({}, None, 3, "x", [[1.0]], {"any": 1}, {"any": np.ones(())})[rng.integers(7)]
    if isinstance(x, serving.RingPool):
        return (None, 3, "x", x.state, POOL)[rng.integers(5)]
    if not isinstance(x, (np.ndarray, jax.Array)):
        return NotImplemented
    y = np.asarray(x)
    kinds = ["rank", "longer", "kind", "text", "list", "complex", "number"]
    kinds += ["none"] if name not in MAY_BE_NONE else []
    kinds += ["values"] if name in INTEGERS and name not in ("segment_ids", "num_tokens", "parents") else []
    match rng.choice(kinds):
        case "rank":
            if name == "states":
                return y[0]  # with an axis before it, it has layers
            return y[None] if rng.random() < 0.5 else y[0]
        case "longer":
            axis = int(rng.integers(y.ndim))
            if (name in ("k", "q", "key", "query") and axis == y.ndim - 2) or (
                name in ("pool", "x") and axis < 2
            ):
                axis = y.ndim - 1  # other numbers of heads may divide, of slots and of tokens behind are free
            if name in ("cu_seqlens",):
                return y[:1]
            if name == "states":
                return y[0, 0]
            return np.concatenate([y, y.take([0], axis)], axis)
        case "kind":
            if name == "has_initial_state":
                return y.astype(np.int32)
            return y.astype(np.float32) if name in INTEGERS else y.astype(rng.choice([np.int32, bool]))
        case "text":
            return rng.choice(["x", "", "nan"]).item()
        case "list":
            return y.tolist()
        case "complex":
            return y.astype(np.complex64)
        case "number":
            return rng.choice([0.5, 3.0]).item()
        case "none":
            return None
        case "values":
            if name == "cu_seqlens":
                return np.array([[0, 4, 2], [1, 2, T], [0, 2, T + 3], [0, -1, T]][rng.integers(4)])
            if name == "num_accepted_tokens":
                return np.array([0, 9])
            z = y.astype(np.int64) if y.dtype.kind == "u" else y.copy()
            z.flat[0] = rng.choice([SLOTS, SLOTS + 100, -7])
            if name in ("write_slots", "to_slots"):
                z.flat[0] = rng.choice([z.flat[1], SLOTS])  # twice, or outside
            return z
    raise AssertionError


def _narrowed(x: Any, rng: np.random.Generator) -> Any:
    """Integers in a dtype of any width that holds them; all else as it is."""
    if not isinstance(x, np.ndarray) or x.dtype.kind != "i":
        return x
    kinds = [np.int8, np.int16, np.int32, np.int64] + ([np.uint8, np.uint32] if (x >= 0).all() else [])
    return x.astype(rng.choice(kinds))


def illegal(seed: int, count: int) -> Iterator[tuple[str, list[str]]]:
    """Runs so many calls; yields each with what was wrong: that it was taken, or what it said."""
    rng, done = np.random.default_rng([seed, 2]), 0
    while done < count:
        call = str(rng.choice(list(CALLS)))
        function, legal = CALLS[call]
        arguments = {name: _narrowed(x, rng) for name, x in legal().items()}
        name = str(rng.choice(list(arguments)))
        bad = _spoilt(name, arguments[name], rng)
        if bad is NotImplemented or (bad is None and name in MAY_BE_NONE):
            continue
        if call in READS and name in SLOT_ARGUMENTS and np.shape(bad) == (N + 1,):
            continue
        done += 1
        shown = (
            f"{bad.dtype}{list(bad.shape)}"
            if isinstance(bad, np.ndarray) and bad.size > 8
            else repr(bad)[:80]
        )
        try:
            jax.block_until_ready(function(**arguments | {name: bad}))
            wrong = ["it was accepted"]
        except (ValueError, TypeError) as error:
            text = str(error).splitlines()[0] if str(error) else ""
            # An argument that does not fit its neighbours may be told by naming one of them.
            named = name in text or (
                isinstance(bad, np.ndarray) and text.split(":")[0].split(".")[0] in arguments
            )
            wrong = [] if named else [f"{type(error).__name__} without the argument's name: {text[:200]}"]
        except Exception as error:
            wrong = [f"{type(error).__name__}: {str(error)[:200]}"]
        yield f"seed {seed} illegal {done}: {call} with {name} = {shown}", wrong
