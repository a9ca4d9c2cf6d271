"""Small models of two mixers that know up to 8 pairs, asked for 32 with the writes of the first mixer changed.

    python -m results.first_mixer [FOLDER]

Several seeds of each rule are trained side by side, some minutes a rule on two CPU cores. An entry of
FOLDER/runs.json, by default in results/recall/first_mixer, is one seed: its loss, and the part of right answers by
the place of the pair for every factor of the first mixer's write strengths. The task and the sizes are those of
notebook 13. FOLDER/further.json has the same of models that are trained on up to 32 pairs, as many as are asked.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gdn_jax.commands.files import write_text
from gdn_jax.commands.versions import versions
from gdn_jax.inspect import analysis
from gdn_jax.models import LanguageModel, ModelConfig
from gdn_jax.training import steps
from gdn_jax.training.mixers import MIXERS
from gdn_jax.training.options import ScheduleOptions
from gdn_jax.training.tasks import recall
from gdn_jax.training.tasks.batch import Batch

FOLDER = Path(__file__).parent / "recall/first_mixer"
RULES, SEEDS, STEPS, RATE = ("delta_net", "gated_delta_net", "linear_attention"), 5, 600, 0.005
FACTORS = (0.5, 1.0, 2.0)
FURTHER_SEEDS = 3
PAIRS, FURTHER_PAIRS, BATCH, VOCABULARY = 8, 32, 32, 64
ASKED, ROWS = 32, 256


def config(rule: str) -> ModelConfig:
    """The model of a rule."""
    sizes = dict(vocab_size=VOCABULARY, hidden_size=64, num_layers=2, num_heads=2, head_dim=32, expand_v=1.0)
    start = dict(mlp_ratio=2.0, write_start=0.06, implementation="chunked")
    return ModelConfig(rule=MIXERS[rule].rule, **sizes, **start)


def training_batch(key: jax.Array, pairs: int) -> Batch:
    """Rows of 1 to as many pairs."""
    key_pairs, key = jax.random.split(key)
    kept = jax.random.randint(key_pairs, (BATCH,), 1, pairs + 1)
    tokens, targets, asked = recall.sequences(key, BATCH, 4 * pairs, VOCABULARY, pairs, 0.01, kept)
    return Batch(tokens, targets, asked.astype(jnp.float32))


def run(rule: str, count: int, pairs: int) -> list[dict]:
    """Trains seeds of a rule on up to as many pairs; returns a line for each."""

    def make(seed):
        return LanguageModel(config(rule), rngs=nnx.Rngs(jax.random.key(seed)))

    graphdef, _, rest = nnx.split(nnx.eval_shape(lambda: make(0)), nnx.Param, ...)
    optimizer = steps.make_optimizer(ScheduleOptions(), STEPS, RATE)
    drawn = recall.sequences(jax.random.key(1), ROWS, 4 * ASKED, VOCABULARY, ASKED, 1.0, shuffled=True)
    tokens, targets, asked = drawn
    of_place = recall.slices(tokens, asked, ASKED)["place"]

    @jax.jit
    @jax.vmap
    def train(seed, params):
        def step(state, i):
            drawn = training_batch(jax.random.fold_in(jax.random.key(seed), i), pairs)
            state, metrics = steps.train_step(graphdef, rest, optimizer, 1, state, drawn)
            return state, metrics.loss

        return jax.lax.scan(step, steps.TrainState(params, optimizer.init(params)), jnp.arange(STEPS))

    @jax.jit
    def right(params, factor):
        logits = analysis.logits_with_gates(
            nnx.merge(graphdef, params, rest),
            tokens,
            lambda layer, g, beta: (g, factor * beta if layer == 0 else beta),
        )
        return jnp.argmax(logits, -1) == targets

    seeds = jnp.arange(count)
    state, losses = train(seeds, jax.jit(jax.vmap(lambda seed: nnx.state(make(seed), nnx.Param)))(seeds))
    lines = []
    for seed in range(count):
        params = jax.tree.map(lambda x, seed=seed: x[seed], state.params)
        hits = {factor: np.asarray(right(params, jnp.float32(factor))) for factor in FACTORS}
        places = {f"{f:g}": [round(float(hit[at].mean()), 4) for at in of_place] for f, hit in hits.items()}
        loss = round(float(losses[seed, -20:].mean()), 4)
        lines.append(dict(rule=rule, seed=seed, steps=STEPS, rate=RATE, loss=loss, place=places))
    return lines


def main(arguments: list[str]) -> int:
    """Writes the lines of all models; returns the exit status."""
    [folder] = [Path(x) for x in arguments] or [FOLDER]
    folder.mkdir(parents=True, exist_ok=True)
    for name, rules, seeds, pairs in (
        ("runs", RULES, SEEDS, PAIRS),
        ("further", RULES, FURTHER_SEEDS, FURTHER_PAIRS),
    ):
        found = {"versions": versions(), "runs": [line for rule in rules for line in run(rule, seeds, pairs)]}
        write_text(folder / f"{name}.json", json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
