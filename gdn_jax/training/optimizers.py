"""Optimisers of a run by name. Each is a function of a schedule and a weight decay."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from gdn_jax.layers import blocks

ADAM_RMS = 0.2
"""Root mean square of an update by AdamW, about, over the learning rate (arXiv 2502.16982)."""

B1, B2, EPSILON = 0.9, 0.95, 1e-8
"""AdamW's decays of the moments, and what it adds to the root of the second."""

MATRICES = {"kernel": 1, "down": 1, "gate_up": 2}
"""Weights that multiply a layer's input, or that of each expert, by name: how many matrices lie side by side in one.
Projections of the same input are weights of their own here, but for experts."""


def adamw(schedule: optax.Schedule, weight_decay: float) -> optax.GradientTransformation:
    """Makes AdamW: the numbers of `optax.adamw` and its state. What `weight_decay_mask` marks False does not decay.

    A deep model has hundreds of arrays and few shapes. The arithmetic of an array is a function that is traced once
    for each shape: optax' own, thirty operations for every array, was a third of what JAX traces of a step.
    """
    options: Any = dict(weight_decay=weight_decay, mask=blocks.weight_decay_mask)
    usual = optax.adamw(schedule, B1, B2, **options)

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        adam, decayed, scheduled = state
        count = optax.safe_increment(adam.count)
        scalars = 1 - B1**count, 1 - B2**count, -1 * schedule(scheduled.count)
        leaves, treedef = jax.tree.flatten(updates)
        rest = (
            treedef.flatten_up_to(x) for x in (adam.mu, adam.nu, params, blocks.weight_decay_mask(params))
        )
        new = [
            _adamw(g, m, v, w, *scalars, decay=weight_decay if decays else 0.0)
            for g, m, v, w, decays in zip(leaves, *rest, strict=True)
        ]
        updates, mu, nu = (treedef.unflatten(x) for x in zip(*new, strict=True))
        later = optax.ScaleByScheduleState(optax.safe_increment(scheduled.count))
        return updates, (optax.ScaleByAdamState(count, mu, nu), decayed, later)

    return optax.GradientTransformation(usual.init, update)


@partial(jax.jit, static_argnames="decay")
def _adamw(g, m, v, w, correction, second_correction, step, *, decay: float) -> tuple[Array, Array, Array]:
    """The update of an array and its moments, from what the bias corrections divide by and the step's size."""
    m, v = (1 - B1) * g + B1 * m, (1 - B2) * g**2 + B2 * v
    update = m / correction.astype(m.dtype) / (jnp.sqrt(v / second_correction.astype(v.dtype)) + EPSILON)
    return jnp.asarray(step, g.dtype) * (update + decay * w if decay else update), m, v


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
