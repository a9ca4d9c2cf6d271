"""The task of evictions: each batch against a construction of its own in Python."""

import cheap_keys
import jax
import numpy as np

from gdn_jax.training.tasks.batch import Batch
from gdn_jax.training.tasks.evictions import EvictionOptions
from gdn_jax.training.tasks.table import make_task

NAMES, VALUES, REACH = 5, 3, 2
OPTIONS = EvictionOptions(
    num_names=NAMES, num_tokens=VALUES, reach=REACH, length=40, test_lengths=(20, 80), val_sequences=16
)
GIVES, ASKS = VALUES + 1, VALUES + 1 + NAMES * REACH * VALUES


def test_evictions():
    """A name has its last value until another name evicts it; a name that never had one is not asked for."""
    task = make_task(OPTIONS, 8)
    drawn = jax.jit(lambda seed: task.draw(cheap_keys.key(seed), 64, 80))(np.uint32(5))
    tokens, targets, weights = (np.asarray(x) for x in drawn)
    assert task.vocab_size == ASKS + NAMES
    places, asked, evicted = set(), 0, np.zeros(tokens.shape, bool)
    for i, (row, target, weight) in enumerate(zip(tokens, targets, weights, strict=True)):
        values = {}
        for t, token in enumerate(row):
            assert GIVES <= token < ASKS + NAMES
            assert weight[t] == (token >= ASKS and t >= 40)
            if token >= ASKS:
                assert target[t] == values[token - ASKS]
                evicted[i, t] = target[t] == VALUES
                asked += 1
                continue
            assert target[t] == 0
            (pair, value), reach = divmod(token - GIVES, VALUES), REACH
            name, place = divmod(pair, reach)
            other = (name + 1 + place) % NAMES
            if other in values:
                values[other] = VALUES
            values[name] = value
            places.add(place)
    assert places == {0, 1} and 0.4 < asked / tokens.size < 0.55
    slices = task.slices(Batch(tokens, targets, weights), 80)["evicted"]
    np.testing.assert_array_equal(slices, [(weights != 0) & evicted, (weights != 0) & ~evicted])
    gone, same = slices.sum(axis=(1, 2))
    assert 0.4 < gone / (gone + same) < 0.6


def test_sets_and_baselines():
    """Sets are those of the seed, tests have one length, and to say that every name was evicted is right half of the
    time."""
    task, twin = make_task(OPTIONS, 8), make_task(OPTIONS, 8)
    sets = task.test_batches(8)
    jax.tree.map(np.testing.assert_array_equal, sets, twin.test_batches(8))
    assert {batch.tokens.shape for batches in sets.values() for batch in batches} == {(8, 80)}
    np.testing.assert_array_equal(task.train_batch(3).tokens, task.seeded_batch(0, 3).tokens)
    at_random, evicted = task.baselines().values()
    assert at_random == 1 / task.answers() == 0.25 and 0.35 < evicted < 0.6
    assert task.summary() == "5 names of 3 values that evict one of the next 2, 40 operations, always fresh"
