"""Checks of the exercises. Read this file last: it knows the answers.

An answer is a function. It is called with arguments that were drawn at random, and what it returns is held against
what the right one returns.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

SAMPLES = 5
CLOSE = 1e-6


class Exercise(NamedTuple):
    """An exercise.

    Fields:
      draw: from a random generator to the arguments of a call.
      right: from the arguments to what the answer has to show.
      shown: from the arguments and what the answer returned to what is compared.
    """

    draw: Callable[[np.random.Generator], tuple]
    right: Callable[..., Any]
    shown: Callable[[tuple, Any], Any] = lambda arguments, returned: returned


def _unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _reflections(keys):
    """Product of the reflections along unit keys, the first one on the right."""
    keys = np.asarray(keys, float)
    product = np.eye(keys.shape[-1])
    for k in keys:
        product = (np.eye(k.size) - 2 * np.outer(k, k) / (k @ k)) @ product
    return product


def _turn(theta):
    return np.array([[np.cos(theta), -np.sin(theta)], [np.sin(theta), np.cos(theta)]])


def _tokens_until_half(alphas):
    left = np.cumprod(alphas)
    return 1 + int(np.argmax(left <= 0.5)) if left[-1] <= 0.5 else np.inf


EXERCISES = {
    "forget one": Exercise(
        lambda r: (r.standard_normal((6, 4)), _unit(r.standard_normal(6))),
        lambda S, k: S - np.outer(k, k @ S),
    ),
    "what is left": Exercise(
        lambda r: (int(r.integers(4, 64)), r.uniform(0.1, 1), int(r.integers(1, 40))),
        lambda K, beta, n: (1 - beta / K) ** n,
    ),
    "a turn": Exercise(
        lambda r: (r.uniform(-3, 3),),
        _turn,
        lambda arguments, keys: _reflections(keys),
    ),
    "a shift": Exercise(
        lambda r: (int(r.integers(2, 7)),),
        lambda n: np.roll(np.eye(n), 1, axis=0),
        lambda arguments, keys: _reflections(keys),
    ),
    "kept": Exercise(
        lambda r: (r.uniform(1, 100),),
        lambda half_life: 0.5 ** (1 / half_life),
    ),
    "tokens until half": Exercise(
        lambda r: (r.uniform(0.5, 1, int(r.integers(1, 8))),),
        _tokens_until_half,
    ),
    "a guess": Exercise(lambda r: (int(r.integers(2, 5000)),), np.log),
    "a start": Exercise(
        lambda r: (int(r.integers(4, 128)), r.uniform(5, 500)),
        lambda K, n: K * (1 - 0.5 ** (1 / n)),
    ),
    "a steady pace": Exercise(
        lambda r: (r.uniform(0.2, 1, int(r.integers(2, 20))),),
        lambda alphas: np.exp(np.mean(np.log(alphas))),
    ),
    "bits": Exercise(
        lambda r: (r.uniform(0.5, 8), r.uniform(1, 5)),
        lambda nats, size: nats / np.log(2) / size,
    ),
    "room": Exercise(
        lambda r: tuple(int(x) for x in r.integers(1, 64, 5)),
        lambda heads, K, V, kv_heads, D: heads * K * V / (2 * kv_heads * D),
    ),
    "what attention may look at": Exercise(
        lambda r: (int(r.integers(2, 9)),),
        lambda T: np.tril(np.ones((T, T))) / np.arange(1, T + 1)[:, None],
    ),
}


def judge(name: str, answer: Callable) -> str:
    """Returns the verdict on an answer in one line."""
    exercise, random = EXERCISES[name], np.random.default_rng(0)
    for _ in range(SAMPLES):
        arguments = exercise.draw(random)
        returned = answer(*arguments)
        if returned is None:
            return "no answer yet"
        wanted = np.asarray(exercise.right(*arguments), float)
        brief = dict(precision=3, threshold=8, edgeitems=1)
        called = ", ".join(" ".join(np.array2string(np.asarray(x), **brief).split()) for x in arguments)
        try:
            shown = np.asarray(exercise.shown(arguments, returned), float)
        except (ValueError, TypeError):
            shown = None  # not even numbers, or not as many as the question asks for
        if shown is None or shown.shape != wanted.shape:
            return f"not yet: for {called} it returned something of shape {np.shape(returned)}"
        if not np.allclose(shown, wanted, rtol=CLOSE, atol=CLOSE):
            return f"not yet: it is another one for {called}"
    return "right"


def check(name: str, answer: Callable) -> None:
    """Prints the verdict on an answer. The cells of a notebook run on when it is wrong."""
    print(f"{name}: {judge(name, answer)}")
