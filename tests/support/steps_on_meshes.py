"""Three training steps of a small model on a mesh, and what must be the same on any other."""

import jax
import numpy as np
from flax import nnx
from meshes import mesh_from

from gdn_jax.bench.collectives import traffic
from gdn_jax.models import LanguageModel, ModelConfig
from gdn_jax.training import steps
from gdn_jax.training.options import ScheduleOptions
from gdn_jax.training.placement import Placement
from gdn_jax.training.tasks.batch import Batch

CONFIG = ModelConfig(
    vocab_size=32, hidden_size=16, num_layers=1, num_heads=8, head_dim=4, expand_v=1.0, intermediate_size=32,
    implementation="recurrent",
)  # fmt: skip
ROWS, LENGTH = 8, 32
OPTIMIZER = steps.make_optimizer(ScheduleOptions(), 10, 1e-2)


def three_steps(text, config=CONFIG):
    """Metrics of three steps, the parameters after them, and what a step sends."""
    placement = Placement(*mesh_from(text))
    placement.check(config, ROWS, LENGTH)
    graphdef, params, rest = nnx.split(LanguageModel(config, rngs=nnx.Rngs(0)), nnx.Param, ...)
    rng, metrics, compiled = np.random.default_rng(0), [], None
    with placement.active():
        state, shardings = placement.state(params, OPTIMIZER)
        train = steps.make_functions(graphdef, OPTIMIZER, 1, shardings=shardings).train
        for _ in range(3):
            text = rng.integers(0, 32, (ROWS, LENGTH + 1)).astype(np.int32)
            weights = rng.integers(0, 2, (ROWS, LENGTH)).astype(np.float32)
            batch = placement.batch(Batch(text[:, :-1], text[:, 1:], weights))
            compiled = compiled or train.lower(rest, state, batch).compile()
            state, step_metrics = compiled(rest, state, batch)
            metrics.append([float(x) for x in step_metrics])
    return np.array(metrics), placement.whole(state.params), traffic(compiled.as_text())


def check_same_steps(found, alone):
    """Losses, accuracies, gradient norms and the parameters after them."""
    np.testing.assert_allclose(found[0], alone[0], rtol=1e-5)
    for got, expected in zip(jax.tree.leaves(found[1]), jax.tree.leaves(alone[1]), strict=True):
        # AdamW divides by the root of a square: where a gradient is next to nothing, its rounding is not.
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=2e-5)
