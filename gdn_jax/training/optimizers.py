"""Optimisers of a run by name. Each is a function of a schedule and a weight decay."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from gdn_jax.layers import blocks

ADAM_RMS = 0.2
"""Root mean square of an update by AdamW, about, over the learning rate (arXiv 2502.16982)."""

MATRICES = {"kernel": 1, "down": 1, "gate_up": 2}
"""Weights that multiply a layer's input, or that of each expert, by name: how many matrices lie side by side in one.
Projections of the same input are weights of their own here, but for experts."""


def adamw(schedule: optax.Schedule, weight_decay: float) -> optax.GradientTransformation:
    """Makes AdamW. What `weight_decay_mask` marks False does not decay."""
    options: Any = dict(weight_decay=weight_decay, mask=blocks.weight_decay_mask)
    return optax.adamw(schedule, b1=0.9, b2=0.95, **options)


def muon(schedule: optax.Schedule, weight_decay: float) -> optax.GradientTransformation:
    """Makes Muon for the `MATRICES` of a model, and AdamW for its embeddings, convolutions, gates and norms.

    The update of a matrix [in, out] is `optax.contrib.muon`'s, an orthogonal one, as large as AdamW's:

        w <- w - lr (0.2 sqrt(max(in, out)) orthogonal(momentum) + weight_decay w)

    so that both have the same learning rate. Matrices that lie side by side in one array are made orthogonal one by
    one: together they would share the singular values of one. Source: Muon (Jordan, 2024); its scale and decay are
    those of arXiv 2502.16982.
    """
    decayed = optax.add_decayed_weights(weight_decay), optax.scale_by_learning_rate(schedule)
    kinds: Any = {"matrices": optax.chain(_orthogonal(), *decayed), "others": adamw(schedule, weight_decay)}
    return optax.partition(kinds, _kinds)


OPTIMIZERS: dict[str, Callable[[optax.Schedule, float], optax.GradientTransformation]] = {
    "adamw": adamw,
    "muon": muon,
}


def _name(path: tuple) -> str:
    """The name of a parameter in its layer."""
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value").rsplit(".", 1)[-1]


def _kinds(params: PyTree) -> PyTree:
    """The name of the optimiser of each parameter in `muon`."""
    return jax.tree.map_with_path(
        lambda path, x: "matrices" if _name(path) in MATRICES and x.ndim > 1 else "others", params
    )


def _orthogonal() -> optax.GradientTransformation:
    """Makes the momentum of each matrix orthogonal, with the root mean square `ADAM_RMS` where its rank is full."""

    def axes(lists: Any) -> Any:
        last = optax.contrib.MuonDimensionNumbers
        return jax.tree.map(lambda x: last(x.ndim - 2, x.ndim - 1), lists)

    # It scales by sqrt(max(1, out / in)), and subtracts.
    inner: Any = optax.contrib.muon(1.0, muon_weight_dimension_numbers=axes)

    def init(params: PyTree) -> Any:
        return inner.init(_apart(params))

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        new, state = inner.update(_apart(updates), state, _apart(params))
        joined = [-ADAM_RMS * x[0].shape[-2] ** 0.5 * jnp.concatenate(x, -1) for x in new]
        return jax.tree.unflatten(jax.tree.structure(updates), joined), state

    return optax.GradientTransformation(init, update)


def _apart(tree: PyTree) -> list[list[jax.Array]]:
    """The matrices of each array."""
    return [jnp.split(x, MATRICES[_name(path)], axis=-1) for path, x in jax.tree.leaves_with_path(tree)]
