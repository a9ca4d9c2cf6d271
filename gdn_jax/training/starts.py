"""Starts of the rows of a training batch by name. Each is a function of a model and the tokens of the batch."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Int

from gdn_jax.layers import RecurrentMixer
from gdn_jax.models import LanguageModel
from gdn_jax.models.decoder import Cache

Start = Callable[[LanguageModel, Int[Array, "B T"]], Cache | None]
"""The cache that the rows begin from; None: no token was before them."""


def empty(model: LanguageModel, tokens: Int[Array, "B T"]) -> None:
    """Returns None: the states of all rows begin at 0."""
    del model, tokens


def passed(model: LanguageModel, tokens: Int[Array, "B T"]) -> Cache:
    """Returns the recurrent states after the rows before: each row goes on as if all rows were one.

    The first row begins at 0, and row b from states after b T tokens, longer histories than a row has. No gradient
    goes through them. Attention sees its own row alone. The states take one more forward pass, row by row. Source:
    state passing (arXiv 2507.02782), which takes the states from the step before; within a batch, the batch alone
    decides a step.

    Raises:
      ValueError: no layer of the model has a recurrent state.
    """
    mixers = [block.mixer for block in model.blocks]
    start = tuple(
        mixer.init_cache(1) if isinstance(mixer, RecurrentMixer) and not mixer.attends else None
        for mixer in mixers
    )
    if not any(start):
        raise ValueError("start: expected empty for a model without recurrent layers, got passed")

    def go_on(cache: Any, row: Int[Array, " T"]) -> tuple[Any, Any]:
        return model.hidden_states(row[None], cache=cache)[1], cache

    _, before = jax.lax.scan(go_on, start, tokens)
    return jax.lax.stop_gradient(jax.tree.map(lambda x: x[:, 0], before))


STARTS: dict[str, Start] = {"empty": empty, "passed": passed}
