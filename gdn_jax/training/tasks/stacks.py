"""Several stacks: values are pushed on them and popped again, in turns drawn at random.

    push s3 a   push s1 b   push s3 c   pop s3 c   pop s1 b   pop s3 a      the popped value is predicted at its stack

An operation is three tokens: what is done, the stack, the value. The value on top of a stack must be predicted where
the stack is named after a pop. Which one it is depends on every operation on that stack since the value was pushed.

Source: Kimi Team, "Kimi Linear" (arXiv 2510.26692), section 5: 64 stacks. The order of an operation's tokens, even
chances, and a push wherever the drawn stack is empty are choices of this project.
"""

import dataclasses
from functools import partial
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key

from gdn_jax.commands.errors import fail
from gdn_jax.commands.fields import Distinct, Positive
from gdn_jax.training.tasks.batch import Batch
from gdn_jax.training.tasks.generated import GeneratedOptions, GeneratedTask, past


@dataclasses.dataclass(frozen=True)
class StackOptions(GeneratedOptions):
    """Values pushed on several stacks and popped again; accuracy on fresh sequences."""

    task: ClassVar[str] = "stack"

    num_stacks: Annotated[int, Positive] = 8
    """Number of stacks, drawn uniformly for every operation."""
    num_tokens: Annotated[int, Positive] = 16
    """Different values."""
    length: Annotated[int, Positive] = 96
    """Tokens of a training sequence, three for an operation."""
    test_lengths: Annotated[tuple[int, ...], Distinct, Positive] = (96, 192)
    """Lengths that the trained model is tested at; beyond the training length only pops past it count."""

    def check(self) -> None:
        for name, given in (("length", (self.length,)), ("test_lengths", self.test_lengths)):
            if wrong := [length for length in given if length % 3 or length < 6]:
                fail(name, "a multiple of 3, at least 6: three tokens for an operation", wrong[0])


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def sequences(
    key: Key[Array, ""], batch: int, length: int, num_stacks: int, num_tokens: int
) -> tuple[Int[Array, "B T"], Int[Array, "B T"], Bool[Array, "B T"]]:
    """Draws operations on stacks that are empty at first.

    Args:
      key: source of the randomness.
      batch: B.
      length: T, a multiple of 3.
      num_stacks: how many stacks there are.
      num_tokens: different values.

    Returns:
      tokens, values below num_tokens, then the stacks, then push and pop; targets, the popped value at the stack of a
      pop (0 elsewhere); and where the pops' stacks are.
    """
    number = length // 3
    push = num_tokens + num_stacks

    def operation(memory, drawn):
        values, heights = memory  # [stacks, number], [stacks]
        stack, value, wants_pop = drawn
        height = heights[stack]
        pops = wants_pop & (height > 0)
        value = jnp.where(pops, values[stack, height - 1], value)
        values = values.at[stack, height].set(value)  # what lies above the top is never read
        heights = heights.at[stack].add(jnp.where(pops, -1, 1))
        row = jnp.stack([push + pops, num_tokens + stack, value])
        return (values, heights), (row, jnp.where(pops, value, 0), pops)

    def one(key):
        key_stacks, key_values, key_pops = jax.random.split(key, 3)
        drawn = (
            jax.random.randint(key_stacks, (number,), 0, num_stacks),
            jax.random.randint(key_values, (number,), 0, num_tokens),
            jax.random.bernoulli(key_pops, shape=(number,)),
        )
        empty = (jnp.zeros((num_stacks, number), jnp.int32), jnp.zeros(num_stacks, jnp.int32))
        _, (rows, popped, pops) = jax.lax.scan(operation, empty, drawn)
        places = 1 + 3 * jnp.arange(number)
        targets = jnp.zeros((length,), popped.dtype).at[places].set(popped)
        return rows.reshape(-1), targets, jnp.zeros((length,), bool).at[places].set(pops)

    return jax.vmap(one)(jax.random.split(key, batch))


class StackTask(GeneratedTask[StackOptions]):
    """Values on several stacks; see `sequences`."""

    Options = StackOptions
    label = "accuracy of the popped values"

    def __init__(self, options: StackOptions, batch_size: int, seed: int):
        super().__init__(options, batch_size, seed)
        self.vocab_size = self.o.num_tokens + self.o.num_stacks + 2

    def draw(self, key: jax.Array, batch: int, size: int) -> Batch:
        tokens, targets, asked = sequences(key, batch, size, self.o.num_stacks, self.o.num_tokens)
        counts = past(tokens, targets, self.size)
        return counts._replace(weights=counts.weights * asked)

    def baselines(self) -> dict[str, float]:
        return {f"one of {self.o.num_tokens} values at random": 1 / self.o.num_tokens}

    def summary(self) -> str:
        o = self.o
        return f"{o.num_stacks} stacks of {o.num_tokens} values, {self.size // 3} operations, {o.freshness()}"
