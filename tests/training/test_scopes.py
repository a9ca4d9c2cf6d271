"""The task of scopes: each batch against a construction of its own in Python."""

import cheap_keys
import jax
import numpy as np

from gdn_jax.training.tasks.batch import Batch
from gdn_jax.training.tasks.scopes import ScopeOptions
from gdn_jax.training.tasks.table import make_task

OPTIONS = ScopeOptions(num_names=3, num_tokens=5, length=40, test_lengths=(20, 80), val_sequences=16)


def test_scopes():
    """A name has the value of the innermost open scope that gave it one; slices say whether that is its last one."""
    task = make_task(OPTIONS, 8)
    drawn = jax.jit(lambda seed: task.draw(cheap_keys.key(seed), 64, 80))(np.uint32(5))
    tokens, targets, weights = (np.asarray(x) for x in drawn)
    assert task.vocab_size == 11
    asked, depths, was_last = 0, set(), np.zeros(tokens.shape, bool)
    for i, (row, target, weight) in enumerate(zip(tokens, targets, weights, strict=True)):
        scopes, last = [{}], {}
        for t in range(0, 80, 2):
            what, name = row[t], row[t + 1] - 5
            if what == 8:
                valid = next(scope[name] for scope in reversed(scopes) if name in scope)
                assert target[t + 1] == valid
                was_last[i, t + 1] = valid == last[name]
                asked += 1
            elif what == 9:
                scopes.append({})
            elif what == 10:
                scopes.pop()
            else:
                scopes[-1][what - 5] = last[what - 5] = row[t + 1]
            assert what in (8, 9, 10) or (5 <= what < 8 and row[t + 1] < 5)
            assert (what in (9, 10)) == (row[t] == row[t + 1]) and not weight[t]
            assert weight[t + 1] == (what == 8 and t + 1 >= 40)
            depths.add(len(scopes))
    assert depths == {1, 2, 3} and 0.15 < asked / (64 * 40) < 0.25
    slices = task.slices(Batch(tokens, targets, weights), 80)["latest"]
    np.testing.assert_array_equal(slices, [(weights != 0) & ~was_last, (weights != 0) & was_last])
    gone, same = slices.sum(axis=(1, 2))
    assert 0.3 < gone / (gone + same) < 0.6


def test_sets_and_baselines():
    """Sets are those of the seed, tests have one length, and the name's last value is a better guess than chance."""
    task, twin = make_task(OPTIONS, 8), make_task(OPTIONS, 8)
    sets = task.test_batches(8)
    jax.tree.map(np.testing.assert_array_equal, sets, twin.test_batches(8))
    assert {batch.tokens.shape for batches in sets.values() for batch in batches} == {(8, 80)}
    np.testing.assert_array_equal(task.train_batch(3).tokens, task.seeded_batch(0, 3).tokens)
    at_random, last = task.baselines().values()
    assert at_random == 1 / task.answers() == 0.2 and at_random < last < 0.95
    assert task.summary() == "3 names of 5 values in up to 2 inner scopes, 20 operations, always fresh"
