"""What a training step on a mesh keeps, waits for and sends."""

import dataclasses

import numpy as np
import pytest
from meshes import mesh_from
from steps_on_meshes import CONFIG, LENGTH, ROWS, check_same_steps, three_steps

from gdn_jax.bench import training
from gdn_jax.training.placement import Placement

DEEP = dataclasses.replace(CONFIG, num_layers=4)


def lowered(text, config):
    """A training step on a mesh."""
    return training.lowered(training.StepProblem(config, ROWS, LENGTH, Placement(*mesh_from(text)), 0))


@pytest.mark.parametrize(
    "text", ["context=2", *(pytest.param(x, marks=pytest.mark.crossed) for x in ("data=2", "head=2"))]
)
def test_blocks_are_computed_again_on_a_mesh(text):
    """What a step keeps is less where blocks are computed again."""
    kept = [
        lowered(text, dataclasses.replace(DEEP, remat=remat)).compile().memory_analysis().temp_size_in_bytes
        for remat in ("none", "rule", "full")
    ]
    assert max(kept[1:]) < 0.6 * kept[0]


def test_gradients_are_summed_while_the_backward_pass_goes_on():
    """Each block but the last two waits for the gradients of the block after the next; with one device none does."""
    barriers = {
        text: lowered(text, DEEP).as_text().count("optimization_barrier") for text in ("data=1", "data=2")
    }
    assert barriers["data=2"] - barriers["data=1"] == DEEP.num_layers - 1
    computed_again = dataclasses.replace(CONFIG, num_layers=3, remat="full")
    alone = three_steps("data=1", dataclasses.replace(computed_again, remat="none"))
    check_same_steps(three_steps("data=2,context=2", computed_again), alone)


def test_products_in_eight_bits_gather_no_tokens():
    """A step sends what it sends without them, and learns what one device does."""
    config = dataclasses.replace(CONFIG, matmul="float8")
    (metrics, _, sent), (alone, *_) = three_steps("data=2,context=2", config), three_steps("data=1", config)
    np.testing.assert_allclose(metrics[:, 0], alone[:, 0], rtol=1e-3)
    assert "all-gather" not in sent.count
    assert sent.total < 1.01 * three_steps("data=2,context=2")[2].total
