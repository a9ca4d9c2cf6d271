"""The least memory of the device that a run needs. Options that cannot fit are refused before anything is made."""

import os

import jax

from gdn_jax.commands.errors import RunError
from gdn_jax.training.options import ModelOptions, SizeOptions
from gdn_jax.training.tasks.options import TaskOptions

_GIB = 2**30
_FLOAT = 4  # bytes of a float32 or an int32
_HALF = 2  # bytes of a bfloat16, the narrowest that a residual stream can be


def fewest_parameters(model: SizeOptions, vocab_size: int) -> int:
    """Returns a number that the parameters are no fewer than: without those of norms, gates and convolutions.

    `models.costs.parameters` counts them all, but traces the model, which fails for sizes beyond any memory.
    """
    d, keys = model.hidden_size, model.num_heads * model.head_dim
    values, inner = round(keys * model.expand_v), round(d * model.mlp_ratio)
    layer = d * (2 * keys + 3 * values) + 3 * d * inner  # q, k; v, gate, o; the SwiGLU
    layers = model.num_layers * layer
    if isinstance(model, ModelOptions) and model.model == "hybrid":
        hybrid = model.hybrid_values()
        a, number = hybrid["attention"], hybrid["layer_types"].count("attention")
        layers += number * d * (5 * a.num_heads * a.head_dim - 2 * keys - 3 * values)  # q, k, v, gate, o
    return vocab_size * d * (1 if model.tie_embeddings else 2) + layers


def least(model: SizeOptions, vocab_size: int, batch: int, piece: int, length: int) -> int:
    """Returns the bytes that a training step needs at least.

    Args:
      model, vocab_size: of the model.
      batch, length: sequences of a step and their tokens.
      piece: sequences whose activations are in memory together.
    """
    weights = 4 * _FLOAT * fewest_parameters(model, vocab_size)  # with the gradient and two moments of Adam
    tokens = 3 * _FLOAT * batch * length  # with targets and weights
    stream = _HALF * model.num_layers * model.hidden_size  # the input of each block, kept for the gradient
    return weights + tokens + piece * length * stream


def available() -> int:
    """Returns the bytes of the device's memory, or of the machine's where the device is its CPU."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check(model: SizeOptions, vocab_size: int, batch: int, piece: int, length: int, runs: int = 1) -> None:
    """Raises RunError where `runs` runs at once cannot fit into memory; see `least`."""
    needed, there = runs * least(model, vocab_size, batch, piece, length), available()
    if needed > there:
        weights = 4 * _FLOAT * runs * fewest_parameters(model, vocab_size)
        raise RunError(
            f"expected a run that fits into the {there / _GIB:.1f} GiB of this device's memory, got one that needs "
            f"at least {needed / _GIB:.1f} GiB, {weights / _GIB:.1f} of them for the model and its optimiser and "
            f"{(needed - weights) / _GIB:.1f} for a batch: make the larger one smaller"
        )


def check_sets(task: TaskOptions) -> None:
    """Raises RunError where the sequences of validation and tests, which are all kept, cannot fit into memory."""
    sequences, lengths = task.drawn()
    needed, there = 3 * _FLOAT * sequences * sum(lengths), available()  # with targets and weights
    if needed > there:
        raise RunError(
            f"--val-sequences: expected sets that fit into the {there / _GIB:.1f} GiB of this device's memory, got "
            f"{sequences} sequences for validation and for each test, of up to {max(lengths[1:])} tokens, which "
            f"need at least {needed / _GIB:.1f} GiB"
        )


def check_run(task: TaskOptions, model: SizeOptions, vocab_size: int, batch: int, piece: int) -> None:
    """Raises RunError where a run cannot fit into memory: its sets, and its steps; see `least`."""
    check_sets(task)
    if task.pretrained() is None:  # the tensors of a checkpoint are there, and no larger than files
        check(model, vocab_size, batch, piece, task.longest())
