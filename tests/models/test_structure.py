"""A model's structure is found once, and again when a part of the model has changed."""

import gc
import weakref

import jax
import numpy as np
import pytest
from flax import nnx
from hybrid_models import make

from gdn_jax.models import structure


@pytest.fixture(scope="module")
def made():
    return make()


@pytest.fixture
def model(made):
    return nnx.clone(made)


@pytest.fixture
def walks(monkeypatch, model):
    """How often the model has been walked, as a function."""
    seen, split = [], nnx.split
    monkeypatch.setattr(structure.nnx, "split", lambda node: seen.append(node) or split(node))
    return lambda: sum(node is model for node in seen)


def assert_right(model):
    """What `split` returns is the model: the same structure and the same arrays, in the same order."""
    found, arrays = structure.split(model)
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    assert found == structure.Structure(graphdef, treedef)
    assert all(a is b for a, b in zip(arrays, leaves, strict=True))


def test_the_structure_is_found_once(model, walks):
    first, _ = structure.split(model)
    again, arrays = structure.split(model)
    assert again is first and walks() == 1
    merged = first.merge(arrays)
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, nnx.state(merged), nnx.state(model)))


def test_models_alike_are_one_argument(made, model):
    """Two models of one configuration have equal structures: one compiled program serves both."""
    (one, _), (other, _) = structure.split(made), structure.split(model)
    assert one is not other and one == other and hash(one) == hash(other)


def _value(model):
    weight = model.blocks[0].mixer.q_proj.kernel
    weight.set_value(weight[...] + 1)


def _part(model):
    model.blocks[1].mlp = model.blocks[0].mlp


def _option(model):
    model.blocks[0].mlp_norm.eps = 0.25


def _new(model):
    model.extra = nnx.Param(np.ones(3, np.float32))


def _gone(model):
    model.blocks = nnx.List(list(model.blocks)[:-1])


def _in_a_list(model):
    model.blocks[-1] = model.blocks[0]


def _metadata(model):
    model.embedding.set_metadata(about="something")


@pytest.mark.parametrize("change", [_value, _part, _option, _new, _gone, _in_a_list, _metadata])
def test_changes_are_seen(change, model, walks):
    assert_right(model)
    change(model)
    assert_right(model)
    before = walks()
    structure.split(model)
    assert walks() == before


def test_a_traced_model_is_not_kept(model):
    """Its arrays are of one trace alone."""
    graphdef, state = nnx.split(model)

    def f(state):
        traced = nnx.merge(graphdef, state)
        assert_right(traced)
        assert traced not in structure._KEPT
        return jax.tree.leaves(state)[0]

    jax.eval_shape(f, state)


def test_a_model_in_a_list_that_may_change_is_not_kept():
    class Two(nnx.Module):
        def __init__(self):
            self.parts = nnx.data([nnx.Param(np.ones(2, np.float32)), nnx.Param(np.ones(3, np.float32))])

    model = Two()
    assert_right(model)
    model.parts[0] = nnx.Param(np.zeros(5, np.float32))
    assert_right(model)


def test_models_are_not_kept_alive(made):
    model = nnx.clone(made)
    structure.split(model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
