"""Every error text of the public operation: the argument, what was expected and what came."""

import copy
import importlib
import pickle
import re

import jax
import numpy as np
import pytest
from small_calls import X, changed, f32

import gdn_jax
from gdn_jax.shapes import ArgumentError

ONE_ROW = {name: y[:1] for name, y in X.arguments.items()}
PACKED = dict(ONE_ROW, initial_state=None, cu_seqlens=np.array([0, 2, 5], np.int32))

ERRORS = {
    # name: (change of a correct call, argument that is named, what was expected, what came)
    "q-rank": (dict(q=X.q[0]), "q", "B, T", r"\[5, 2, 6\]"),
    "k-rank": (dict(k=X.k[..., None]), "k", "B, T", r"\[2, 5, 2, 6, 1\]"),
    "v-rank": (dict(v=X.v[0, 0]), "v", "B, T", r"\[4, 3\]"),
    "k-batch": (dict(k=X.k[:1]), "k", "B, T, Hk, K", r"\[1, 5, 2, 6\]"),
    "v-batch": (dict(v=X.v[:1]), "v", "B, T, HV, V", r"\[1, 5, 4, 3\]"),
    "k-tokens": (dict(k=X.k[:, :4]), "k", "B, T, Hk, K", r"\[2, 4, 2, 6\]"),
    "v-tokens": (dict(v=X.v[:, :4]), "v", "B, T, HV, V", r"\[2, 4, 4, 3\]"),
    "k-width": (dict(k=X.k[..., :5]), "k", "6", r"\[2, 5, 2, 5\]"),
    "heads-before-tokens": (
        {name: np.zeros((2, heads, 16, 6), f32) for name, heads in (("q", 2), ("k", 2), ("v", 4))}
        | dict(g=None, beta=None, initial_state=None),
        "v",
        r"not \[B, heads, T, width\]",
        r"\[2, 4, 16, 6\]",
    ),
    "q-heads": (dict(q=np.zeros((2, 5, 3, 6), f32)), "q", "divides HO .* 4", "3"),
    "k-heads": (dict(k=np.zeros((2, 5, 3, 6), f32)), "k", "divides HO .* 4", "3"),
    "k-more-heads": (dict(k=np.zeros((2, 5, 8, 6), f32)), "k", "divides HO .* 4", "8"),
    "v-heads": (
        dict(v=np.zeros((2, 5, 3, 3), f32), q=np.zeros((2, 5, 4, 6), f32)),
        "v",
        "divides HO .* 4",
        "3",
    ),
    "no-heads": (dict(q=np.zeros((2, 5, 0, 6), f32)), "q", "divides HO", "0"),
    "q-integer": (dict(q=np.zeros((2, 5, 2, 6), np.int32)), "q", "float", "int32"),
    "k-integer": (dict(k=np.zeros((2, 5, 2, 6), np.int32)), "k", "float", "int32"),
    "v-integer": (dict(v=np.zeros((2, 5, 4, 3), np.int32)), "v", "float", "int32"),
    "k-dtype": (dict(k=X.k.astype(np.float16)), "k", "float32", "float16"),
    "v-dtype": (dict(v=X.v.astype(np.float16)), "v", "float32", "float16"),
    "q-list": (dict(q=[1.0]), "q", "an array", "list"),
    "K-too-wide": (
        dict(q=np.zeros((2, 5, 2, 257), f32), k=np.zeros((2, 5, 2, 257), f32)),
        "q",
        "1 to 256",
        "257",
    ),
    "V-too-wide": (dict(v=np.zeros((2, 5, 4, 257), f32)), "v", "1 to 256", "257"),
    "g-shape": (dict(g=X.g[..., :2]), "g", "B, T, HO", r"\[2, 5, 2\]"),
    "g-rank": (dict(g=X.g[..., None]), "g", "B, T, HO", r"\[2, 5, 4, 1\]"),
    "g-integer": (dict(g=np.zeros((2, 5, 4), np.int32)), "g", "float", "int32"),
    "beta-shape": (dict(beta=X.beta[:, :4]), "beta", "B, T, HO", r"\[2, 4, 4\]"),
    "beta-of-key-heads": (dict(beta=X.beta[..., :2]), "beta", "B, T, HO", r"\[2, 5, 2\]"),
    "beta-integer": (dict(beta=np.ones((2, 5, 4), np.int32)), "beta", "float", "int32"),
    "state-layout": (dict(state_layout="k-last"), "state_layout", "'kv', 'vk'", "'k-last'"),
    "state-transposed": (
        dict(state_layout="vk"),
        "initial_state",
        r"V, K\] = \[2, 4, 3, 6\]",
        r"\[2, 4, 6, 3\]",
    ),
    "state-sequences": (
        dict(initial_state=X.initial_state[:1]),
        "initial_state",
        r"\[2, 4, 6, 3\]",
        r"\[1, 4, 6, 3\]",
    ),
    "state-heads": (
        dict(initial_state=X.initial_state[:, :2]),
        "initial_state",
        r"\[2, 4, 6, 3\]",
        r"\[2, 2, 6, 3\]",
    ),
    "state-integer": (
        dict(initial_state=np.zeros((2, 4, 6, 3), np.int32)),
        "initial_state",
        "float",
        "int32",
    ),
    "chunk-size": (dict(chunk_size=48), "chunk_size", "16, 32, 64, 128", "48"),
    "chunk-size-0": (dict(chunk_size=0), "chunk_size", "16, 32, 64, 128", "0"),
    "implementation": (
        dict(implementation="triton"),
        "implementation",
        "'mosaic_gpu', 'mosaic_mma', 'chunked', 'recurrent'",
        "triton",
    ),
    "cu-rows": (dict(cu_seqlens=np.array([0, 5]), initial_state=None), "cu_seqlens", "B = 1", "B = 2"),
    "cu-rank": (dict(PACKED, cu_seqlens=np.array([[0, 5]])), "cu_seqlens", r"N \+ 1", r"\[1, 2\]"),
    "cu-float": (dict(PACKED, cu_seqlens=np.array([0.0, 5.0], f32)), "cu_seqlens", "integer", "float32"),
    "cu-empty": (dict(PACKED, cu_seqlens=np.array([0])), "cu_seqlens", "two entries", "1"),
    "cu-states": (
        dict(PACKED, initial_state=X.initial_state[:1]),
        "initial_state",
        r"\[2, 4, 6, 3\]",
        r"\[1, 4, 6, 3\]",
    ),
    "both-packings": (
        dict(PACKED, segment_ids=np.zeros((1, 5), np.int32)),
        "cu_seqlens",
        "segment_ids",
        "both",
    ),
    "segments-shape": (dict(segment_ids=np.zeros((2, 4), np.int32)), "segment_ids", "B, T", r"\[2, 4\]"),
    "segments-float": (dict(segment_ids=np.zeros((2, 5), f32)), "segment_ids", "integer", "float32"),
}


def _exceptions(kind: type = BaseException) -> set[type]:
    """The package's own classes of exceptions that are imported."""
    return {
        c
        for sub in kind.__subclasses__()
        for c in (sub, *_exceptions(sub))
        if c.__module__.startswith("gdn_jax")
    }


def test_exceptions_can_be_made_again():
    """By pickle, as a child process sends them; by copy; and from their text alone, as keras does."""
    for module in ("commands.locks", "commands.parsing", "serving", "training.trainer"):
        importlib.import_module(f"gdn_jax.{module}")
    classes = _exceptions()
    assert {"ArgumentError", "RunError", "Taken", "Usage", "Help", "QueueFull", "Diverged"} <= {
        c.__name__ for c in classes
    }
    made = [c("a text") for c in classes] + [ArgumentError("k", "shape [B]", [2, 3])]
    for error in made:
        again = pickle.loads(pickle.dumps(error)), copy.copy(error), type(error)(str(error))
        for other in again:
            assert type(other) is type(error) and str(other) == str(error)
        assert again[0].__dict__ == again[1].__dict__ == error.__dict__


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name, no_type_checks):
    """ValueError "argument: expected ..., got ...", the same from both rules and from supported_implementations."""
    change, argument, expected, got = ERRORS[name]
    call = changed(change)
    pattern = rf"^{argument}: expected .*{expected}.*, got .*{got}"
    for rule in (gdn_jax.gated_delta_rule, gdn_jax.delta_rule):
        with pytest.raises(ValueError, match=pattern):
            rule(**call)
        with pytest.raises(ValueError, match=pattern):
            jax.eval_shape(lambda rule=rule: rule(**call))
    if "implementation" not in call:
        with pytest.raises(ValueError, match=pattern):
            gdn_jax.supported_implementations(**call)


def test_a_flag_that_is_none(no_type_checks):
    for call in (gdn_jax.supported_implementations, gdn_jax.delta_rule):
        with pytest.raises(ValueError, match=r"^use_qk_l2norm: expected True or False, got "):
            call(**changed(dict(use_qk_l2norm="no")))


STRENGTHS = {
    "both strengths": (dict(erase=X.beta), "beta", "None where erase or write is given", "both"),
    "erase of other channels": (dict(beta=None, erase=np.ones((2, 5, 4, 3), f32)), "erase", "shape", "4, 3"),
    "write of other heads": (dict(beta=None, write=np.ones((2, 5, 3), f32)), "write", "shape", "5, 3"),
    "g of other channels": (dict(g=np.zeros((2, 5, 4, 4), f32)), "g", "B, T, HO, K", "4, 4"),
    "g of integers": (dict(g=np.zeros((2, 5, 4, 6), np.int32)), "g", "dtype", "int32"),
    "beta of a channel": (dict(beta=np.ones((2, 5, 4, 6), f32)), "beta", "B, T, HO", "4, 6"),
}


@pytest.mark.parametrize("name", STRENGTHS)
def test_errors_of_channels(name, no_type_checks):
    change, argument, expected, got = STRENGTHS[name]
    with pytest.raises(ValueError, match=rf"^{argument}: expected .*{expected}.*, got .*{got}"):
        gdn_jax.delta_rule(**changed(change))


STEP_ERRORS = {
    "q-rank": (dict(q=X.q), "q", "B, heads, width", r"\[2, 5, 2, 6\]"),
    "k-width": (dict(k=X.k[:, 0, :, :5]), "k", "6", "5"),
    "v-batch": (dict(v=X.v[:1, 0]), "v", "2", "1"),
    "k-heads": (dict(k=np.zeros((2, 3, 6), f32)), "k", "divides HO", "3"),
    "q-integer": (dict(q=np.zeros((2, 2, 6), np.int32)), "q", "float", "int32"),
    "v-dtype": (dict(v=X.v[:, 0].astype(np.float16)), "v", "float32", "float16"),
    "g-rank": (dict(g=X.g), "g", "B, HO", r"\[2, 5, 4\]"),
    "beta-shape": (dict(beta=X.beta[:, 0, :2]), "beta", "HO", "2"),
    "layout": (dict(state_layout="kk"), "state_layout", "'kv', 'vk'", "'kk'"),
    "state": (dict(state_layout="vk"), "(initial_)?state", r"\[2, 4, 3, 6\]", r"\[2, 4, 6, 3\]"),
    "g-number": (dict(g=1.0), "g", r"an array \[B, HO\]", "float"),
    "beta-text": (dict(beta="1"), "beta", r"an array \[B, HO\]", "str"),
}


@pytest.mark.parametrize("name", STEP_ERRORS)
def test_step_errors(name, no_type_checks):
    change, argument, expected, got = STEP_ERRORS[name]
    call = (
        {key: y[:, 0] for key, y in X.arguments.items() if key != "initial_state"}
        | {"state": X.initial_state}
        | change
    )
    call = {key: jax.device_put(y) if isinstance(y, np.ndarray) else y for key, y in call.items()}
    for step in (gdn_jax.gated_delta_step, gdn_jax.delta_step):
        if step is gdn_jax.gated_delta_step or name != "g-rank":
            with pytest.raises(ValueError, match=rf"^{argument}: expected .*{expected}.*, got .*{got}"):
                step(**call)


OTHER_ERRORS = {
    "g of chunk states": (
        lambda: gdn_jax.delta_chunk_states(X.k, X.v, X.g[0, 0]),
        "g: expected shape [B, T, HO, channels]",
    ),
    "offsets of products": (
        lambda: gdn_jax.gated_delta_product(
            X.q[:1], X.k[:1, :, None], X.v[:1, :, None], cu_seqlens=np.array([0, 6], np.uint8)
        ),
        "cu_seqlens: expected ascending values from 0 to at most T = 5, got [0, 6]",
    ),
    "segments of products": (
        lambda: gdn_jax.gated_delta_product(X.q, X.k[:, :, None], X.v[:, :, None], segment_ids=[0, 1]),
        "segment_ids: expected an array [B, T], got list",
    ),
}


@pytest.mark.parametrize("name", OTHER_ERRORS)
def test_errors_of_other_operations(name, no_type_checks):
    call, message = OTHER_ERRORS[name]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        call()


def test_type_checks_are_on():
    """The other tests run with jaxtyping switched on: a wrong shape does not reach the body of a function."""
    with pytest.raises(Exception, match="k"):
        gdn_jax.gated_delta_rule(**changed(dict(k=X.k[:, :4])))


@pytest.mark.parametrize("borders", [[10, 20, 5], [0, 30, 20, 40], [5, 30, 40], [0, -3, 40], [0, 41]])
@pytest.mark.parametrize("function", ["gated_delta_rule", "chunk_states"])
def test_known_borders_are_checked(function, borders, no_type_checks):
    """Lengths instead of offsets, among others, which would give rows of zeros."""
    arrays = (jax.device_put(np.zeros((1, 40, 1, 4), f32)),) * (3 if function == "gated_delta_rule" else 2)
    with pytest.raises(
        ValueError, match=r"^cu_seqlens: expected ascending values from 0 to at most T = 40, got"
    ):
        getattr(gdn_jax, function)(*arrays, cu_seqlens=np.array(borders))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(scale=np.ones(3)),
            r"scale: expected a number, or a floating array of shape \[\], got float64\[3\]",
        ),
        (dict(scale="half"), r"scale: expected a number, or a floating array of shape \[\], got 'half'"),
        (dict(chunk_size=64.0), r"chunk_size: expected one of 16, 32, 64, 128, got '64.0'"),
    ],
)
def test_options_of_a_wrong_kind(options, message, no_type_checks):
    x = jax.device_put(np.zeros((1, 4, 1, 4), f32))
    with pytest.raises(ValueError, match="^" + message):
        gdn_jax.gated_delta_rule(x, x, x, **options)


@pytest.mark.parametrize("state", [None, np.zeros((1, 1, 4, 5)), np.zeros((1, 1, 4, 4), int)])
def test_state_of_a_step_is_called_state(state, no_type_checks):
    x = jax.device_put(np.zeros((1, 1, 4), f32))
    with pytest.raises(ValueError, match=r"^state: expected"):
        gdn_jax.gated_delta_step(x, x, x, None, None, state)
