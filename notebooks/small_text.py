"""A small language model of Python's source files, byte by byte: data and training of notebooks 05 and 06."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from gdn_jax.models import LanguageModel, ModelConfig
from gdn_jax.training import steps
from gdn_jax.training.options import ScheduleOptions
from gdn_jax.training.tasks import text

BORDER, NEWLINE = 0, ord("\n")
RATE = 1e-2


def streams() -> tuple[np.ndarray, np.ndarray]:
    """Bytes of the standard library to train on, and of files that are held out, without zeros."""
    corpus = text.load(None, "*.py")
    return tuple(stream[stream != BORDER] for stream in (corpus.train, corpus.val))


def rows(stream: np.ndarray, seed: int, count: int, length: int) -> np.ndarray:
    """Rows of short documents from random places of a stream, each from the start of a line, a zero before it."""
    random = np.random.default_rng(seed)
    out = np.zeros((count, length + 129), np.uint8)
    for row in out:
        at = 0
        while at <= length:
            size, start = random.integers(32, 128), random.integers(0, stream.size - 1024)
            start += 1 + int(np.argmax(stream[start : start + 512] == NEWLINE))
            row[at + 1 : at + size] = stream[start : start + size - 1]
            at += size
    return out[:, : length + 1].astype(np.int32)


def bits(logits, targets):
    """Bits of every byte."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets) / np.log(2)


def train(config: ModelConfig, stream: np.ndarray, count: int, batch: int, length: int, seed: int = 0):
    """A model after `count` steps on rows of the stream, and the loss of each step in bits per byte."""
    model = nnx.jit(lambda: LanguageModel(config, rngs=nnx.Rngs(seed)))()  # one program for all weights
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    optimizer = steps.make_optimizer(ScheduleOptions(end_lr=0.01), count, RATE)

    @jax.jit
    def step(params, state, batch):
        def loss(params):
            return jnp.mean(bits(nnx.merge(graphdef, params, rest)(batch[:, :-1])[0], batch[:, 1:]))

        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = optimizer.init(params), []
    for i in range(count):
        params, state, loss = step(params, state, rows(stream, i, batch, length))
        losses.append(float(loss))
    nnx.update(model, params)
    return model, losses
