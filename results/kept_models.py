"""Models of a sweep of recall with --keep-weights, asked again with the writes of a mixer, or the rows, changed.

    python -m results.kept_models FILE FOLDER..

FOLDER is of a sweep; a run whose weights are there becomes an entry of FILE: of every change the accuracy by the
place of the pair, in eighths. A model of Zoology's size takes some minutes on two CPU cores. The changes:

    writes       the write strengths of the first mixer, or of the second one, halved or doubled
    frozen       the first mixer's state is kept as it is after the pairs of training, to the end or to the questions:
                 nothing is written or forgotten there
    in front     64 pairs are written and asked, after other pairs or after fill, which is any values

Pairs are asked in the order of the training ("gaps") or in one that does not depend on their place ("shuffled").
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from gdn_jax.commands.files import write_text
from gdn_jax.commands.versions import versions
from gdn_jax.inspect import analysis
from gdn_jax.models import LanguageModel
from gdn_jax.sweeps import grid, report, weights
from gdn_jax.training.runs import RunFolder
from gdn_jax.training.tasks import recall

ROWS, TOGETHER = 64, 4
FILE = Path(__file__).parent / "recall/first_mixer/kept.json"
PAIRS, LENGTH = 256, 1024
TRAINED, TRAINED_LENGTH = 64, 256
FACTORS = (0.5, 2.0)
PAIRS_IN_FRONT, FILL_IN_FRONT = (32, 64, 128, 192), (64, 128, 256, 512)


class Rows(NamedTuple):
    """Rows of recall; `parts` are the places of the queries whose accuracy is told apart."""

    tokens: np.ndarray
    targets: np.ndarray
    parts: np.ndarray


class Gates(NamedTuple):
    """Factors of the write strengths of both mixers, and the tokens over which the first one's state is kept."""

    first: float = 1.0
    second: float = 1.0
    frozen_from: int = 0
    frozen_to: int = 0

    def change(self, layer: int, g: Array, beta: Array) -> tuple[Array, Array]:
        """The gates of a layer, as `analysis.logits_with_gates` asks for them."""
        beta = jnp.where(layer == 0, self.first, self.second) * beta
        token = jnp.arange(beta.shape[1])[:, None]
        frozen = (layer == 0) & (token >= self.frozen_from) & (token < self.frozen_to)
        return jnp.where(frozen, 0, g), jnp.where(frozen, 0, beta)


def rows_of(o: recall.RecallOptions, pairs: int, length: int, shuffled: bool) -> Rows:
    """Rows that no run has had, told apart by the place of the pair."""
    drawn = recall.sequences(
        jax.random.key(2**20 + pairs), ROWS, length, o.vocab_size, pairs, o.power, shuffled=shuffled
    )
    tokens, targets, asked = map(np.asarray, drawn)
    return Rows(tokens, targets, recall.slices(tokens, asked, pairs)["place"])


def in_front(rows: Rows, vocab_size: int, pairs: int = 0, fill: int = 0) -> Rows:
    """Rows with other pairs, whose keys and values are not in the row, or with values, before them."""
    rng, half = np.random.default_rng(0), vocab_size // 2
    front = []
    for row in rows.tokens:
        keys, values = (rng.permutation(np.setdiff1d(np.arange(half) + at, row)) for at in (0, half))
        written = np.stack([keys[:pairs], values[:pairs]], axis=1).reshape(-1)
        front.append(np.concatenate([written, rng.integers(half, vocab_size, fill)]))
    before = np.stack(front).astype(rows.tokens.dtype)
    n = before.shape[1]
    return Rows(
        np.concatenate([before, rows.tokens], axis=1),
        np.pad(rows.targets, ((0, 0), (n, 0))),
        np.pad(rows.parts, ((0, 0), (0, 0), (n, 0))),
    )


def changes(o: recall.RecallOptions) -> Iterator[tuple[str, Rows, Gates]]:
    """What is asked of a model, by name."""
    for order in ("gaps", "shuffled"):
        rows = rows_of(o, PAIRS, LENGTH, order == "shuffled")
        yield f"{order}, as trained", rows, Gates()
        for factor in FACTORS:
            yield f"{order}, first mixer's writes times {factor:g}", rows, Gates(first=factor)
        if order == "gaps":
            for factor in FACTORS:
                yield f"{order}, second mixer's writes times {factor:g}", rows, Gates(second=factor)
            for to, end in (("the end", LENGTH), ("the questions", 2 * PAIRS)):
                name = f"{order}, first mixer frozen after {TRAINED} pairs to {to}"
                yield name, rows, Gates(frozen_from=2 * TRAINED, frozen_to=end)
    rows = rows_of(o, TRAINED, TRAINED_LENGTH, False)
    yield f"{TRAINED} pairs", rows, Gates()
    for pairs in PAIRS_IN_FRONT:
        yield f"{TRAINED} pairs after {pairs} others", in_front(rows, o.vocab_size, pairs=pairs), Gates()
    for fill in FILL_IN_FRONT:
        yield f"{TRAINED} pairs after {fill} tokens of fill", in_front(rows, o.vocab_size, fill=fill), Gates()


def asker(model: LanguageModel) -> Callable[[Rows, Gates], list[float]]:
    """A function from rows and gates to the accuracy of each part of the queries."""
    graphdef, state = nnx.split(model)

    @jax.jit
    def right(state, tokens, targets, gates):
        logits = analysis.logits_with_gates(nnx.merge(graphdef, state), tokens, gates.change)
        return jnp.argmax(logits, -1) == targets

    def ask(rows: Rows, gates: Gates) -> list[float]:
        hits = [
            right(state, rows.tokens[i : i + TOGETHER], rows.targets[i : i + TOGETHER], gates)
            for i in range(0, len(rows.tokens), TOGETHER)
        ]
        hit = np.concatenate(hits)
        return [round(float(hit[part].mean()), 4) for part in rows.parts]

    return ask


def of_sweep(folder: Path) -> Iterator[dict]:
    """An entry for each run of a sweep whose weights are there."""
    options = report.stored_options(RunFolder.open(folder)[1])
    for line in grid.lines(folder, "accuracy").records():
        run = grid.as_run(line)
        if not weights.path(folder, run).exists():
            continue
        ask = asker(weights.load(folder, run))
        places = {name: ask(rows, gates) for name, rows, gates in changes(options.task)}
        trained = {"test_accuracy": line["test_accuracy"], "commit": line["commit"]}
        yield run.record() | trained | {"rows": ROWS, "places": places}


def main(arguments: list[str]) -> int:
    """Writes the entries of all sweeps; returns the exit status."""
    path, *folders = map(Path, arguments)
    found = {"versions": versions(), "runs": [entry for folder in folders for entry in of_sweep(folder)]}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
