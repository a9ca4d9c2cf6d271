"""Sequences of recall: what can be answered, how gaps and questions are drawn, cases of several sizes."""

import cheap_keys
import jax
import numpy as np
import pytest

from gdn_jax.commands import cli
from gdn_jax.training.tasks import recall
from gdn_jax.training.tasks.recall import RecallOptions
from gdn_jax.training.tasks.table import make_task


@pytest.mark.parametrize("length, vocab_size, num_pairs", [(16, 8, 4), (64, 64, 8), (32, 512, 1)])
def test_recall_is_answerable(length, vocab_size, num_pairs):
    tokens, targets, asked = map(
        np.asarray, recall.sequences(cheap_keys.key(3), 50, length, vocab_size, num_pairs, 0.01)
    )
    assert (asked.sum(1) == num_pairs).all()
    for row, target, where in zip(tokens, targets, asked, strict=True):
        keys, values = row[: 2 * num_pairs : 2], row[1 : 2 * num_pairs : 2]
        memory = dict(zip(keys.tolist(), values.tolist(), strict=True))
        assert len(memory) == len(set(values.tolist())) == num_pairs
        assert (keys < vocab_size // 2).all() and (values >= vocab_size // 2).all()
        places = np.flatnonzero(where)
        assert (places >= 2 * num_pairs).all() and (places % 2 == 0).all()
        assert sorted(row[places].tolist()) == sorted(memory)
        assert all(target[t] == memory[int(row[t])] for t in places)
        others = np.setdiff1d(np.arange(2 * num_pairs, length), places)
        assert (row[others] >= vocab_size // 2).all()


@pytest.mark.slow
def test_recall_of_fewer_pairs():
    """The pairs that are not kept, and their queries, are fill; what stays is as it was."""
    key, kept = cheap_keys.key(3), np.array([1, 2, 4] * 20)
    whole = [np.asarray(x) for x in recall.sequences(key, 60, 24, 32, 4, 0.01)]
    fewer = [np.asarray(x) for x in recall.sequences(key, 60, 24, 32, 4, 0.01, kept)]
    for n, *rows in zip(kept, *whole, *fewer, strict=True):
        tokens, targets, asked, few, few_targets, few_asked = rows
        stays = few == tokens
        assert few_asked.sum() == n and (asked >= few_asked).all() and stays[: 2 * n].all()
        assert set(few[few < 16].tolist()) == set(tokens[: 2 * n : 2].tolist()), (
            "a key of a pair that is gone"
        )
        np.testing.assert_array_equal(few_targets, np.where(few_asked, targets, 0))
        assert stays[few_asked].all() and (few[~stays] >= 16).all()


@pytest.mark.slow
def test_number_of_pairs():
    """Training with a fixed number or a varying one; tests have exactly theirs, in the places of the training."""
    for vary in (False, True):
        o = RecallOptions(vocab_size=16, num_pairs=4, length=24, test_pairs=(1, 3, 6), vary_pairs=vary)
        task = make_task(o, 64)
        counts = np.asarray(task.train_batch(1).weights).sum(1)
        assert set(counts) == ({1, 2, 3, 4} if vary else {4})
        assert set(np.asarray(task.val_batches(64)[0].weights).sum(1)) == set(counts)
        for pairs, (batch, *_) in task.test_batches(64).items():
            asked = np.asarray(batch.weights) > 0
            assert (asked.sum(1) == pairs).all() and not asked[:, : 2 * max(4, pairs)].any()


def test_recall_of_rewritten_keys():
    """Every key is asked once, for the last value that the kept pairs give it."""
    kept = np.array([1, 3, 8] * 20)
    tokens, targets, asked = map(
        np.asarray, recall.sequences(cheap_keys.key(4), 60, 40, 8, 8, 0.01, kept, rewrite=True)
    )
    again = 0
    for n, row, target, where in zip(kept, tokens, targets, asked, strict=True):
        pairs = row[: 2 * n].reshape(n, 2).tolist()
        memory = {key: value for key, value in pairs}
        again += n - len(memory)
        assert (row[: 2 * n : 2] < 4).all() and (row[1 : 2 * n : 2] >= 4).all()
        places = np.flatnonzero(where)
        assert (places >= 16).all() and sorted(row[places].tolist()) == sorted(memory)
        assert all(target[t] == memory[int(row[t])] for t in places)
        others = np.setdiff1d(np.arange(2 * n, 40), places)
        assert (row[others] >= 4).all() and (target[~where] == 0).all()
    assert again > 60, "hardly a key comes again"


@pytest.mark.parametrize("pairs, rewrite", [(3, False), (8, True), (20, False)])
def test_slices_of_recall(pairs, rewrite):
    """Query by query: the eighth of the pairs in which its key was last written, and of the questions of its row."""
    drawn = recall.sequences(cheap_keys.key(5), 40, 96, 48, 20, 0.01, np.full(40, pairs), rewrite=rewrite)
    tokens, _, asked = map(np.asarray, drawn)
    count = min(pairs, 8)
    wanted = {name: np.zeros((count, *asked.shape), bool) for name in ("place", "order")}
    for b, row in enumerate(tokens):
        keys, queries = row[: 2 * pairs : 2].tolist(), np.flatnonzero(asked[b])
        for i, t in enumerate(queries):
            last = max(place for place, key in enumerate(keys) if key == row[t])
            wanted["place"][last * count // pairs, b, t] = True
            wanted["order"][i * count // len(queries), b, t] = True
    got = recall.slices(tokens, asked, pairs)
    assert got.keys() == wanted.keys()
    for name, where in wanted.items():
        np.testing.assert_array_equal(got[name], where)
        np.testing.assert_array_equal(got[name].sum(0), asked)


def test_questions_in_any_order():
    """By the gap law early pairs are asked early; shuffled, only that order is another one."""
    key, draw = (
        cheap_keys.key(6),
        jax.jit(recall.sequences, static_argnums=range(1, 6), static_argnames="shuffled"),
    )
    gaps, shuffled = (
        [np.asarray(x) for x in draw(key, 400, 64, 32, 8, 0.01, shuffled=shuffled)]
        for shuffled in (False, True)
    )
    np.testing.assert_array_equal(gaps[0][:, :16], shuffled[0][:, :16])
    np.testing.assert_array_equal(gaps[2], shuffled[2])
    correlations = []
    for tokens, targets, asked in (gaps, shuffled):
        places = np.argmax(tokens[asked].reshape(400, 8, 1) == tokens[:, None, :16:2], -1)
        values = np.take_along_axis(tokens[:, 1:16:2], places, 1)
        np.testing.assert_array_equal(values, targets[asked].reshape(400, 8))
        correlations.append(np.corrcoef(places.ravel(), np.tile(np.arange(8), 400))[0, 1])
    # of 3200 independent pairs the correlation deviates by 1/sqrt(3200)
    assert correlations[0] > 0.2 and abs(correlations[1]) < 5 / 3200**0.5


def test_recall_gaps_follow_the_power_law():
    _, _, asked = recall.sequences(cheap_keys.key(0), 4000, 32, 16, 1, 0.01)
    counts = np.asarray(asked)[:, 2::2].sum(0)
    law = np.arange(1, 16) ** (0.01 - 1)
    expected = 4000 * law / law.sum()
    # chi-square with 14 degrees of freedom: mean 14, deviation 5.3; six deviations
    assert ((counts - expected) ** 2 / expected).sum() < 14 + 6 * 5.3


@pytest.mark.slow
def test_recall_of_several_cases():
    """Lengths and pairs take turns from step to step; the tests are of the same lengths; a look-up answers all."""
    cases = {2: 8, 3: 16, 5: 20}
    o = RecallOptions(vocab_size=64, cases=("8:2", "16:3", "20:5"), val_sequences=18)
    task = make_task(o, 6)
    assert (task.turns, task.size, task.test_sizes) == ((0, 1, 2), 5, (2, 3, 5))
    drawn = [task.train_batch(step) for step in range(1, 7)]
    assert [batch.tokens.shape[1] for batch in drawn] == [16, 20, 8] * 2
    tests = {pairs: batch for pairs, (batch, *_) in task.test_batches(6).items()}
    val = task.val_batches(6)
    assert {batch.tokens.shape for batch in [*val, *tests.values()]} == {(6, 20)}
    pairs_of = [3, 5, 2, 3, 5, 2, *tests, 2, 3, 5]
    for pairs, batch in zip(pairs_of, [*drawn, *tests.values(), *val], strict=True):
        for row, target, weight in zip(*map(np.asarray, batch), strict=True):
            memory = dict(row[: 2 * pairs].reshape(pairs, 2).tolist())
            places = np.flatnonzero(weight)
            assert len(memory) == len(places) == pairs and places.max() < cases[pairs]
            assert [memory[int(row[t])] for t in places] == target[places].tolist()
    assert task.baselines() == {"one of 32 values at random": 1 / 32}


def test_a_case_with_more_turns():
    """It is drawn in as many steps as it is named, tested once, and the validation set has all cases alike."""
    o = RecallOptions(vocab_size=64, cases=("8:2", "16:3", "8:2", "8:2"), val_sequences=16)
    task = make_task(o, 4)
    assert (task.turns, task.test_sizes) == ((0, 1, 0, 0), (2, 3))
    asked = [int(task.train_batch(step).weights[0].sum()) for step in range(8)]
    assert asked == [2, 3, 2, 2] * 2
    assert [int(batch.weights[0].sum()) for batch in task.val_batches(4)] == [2, 3, 2, 3]
    assert "2 pairs in 8 tokens (3 of 4 steps), 3 pairs in 16 tokens (1 of 4 steps)" in task.summary()


@pytest.mark.parametrize(
    "words, message",
    [
        ("--cases 64", "--cases: expected length and pairs like 64:4, got 64"),
        ("--cases 64:0", "--cases: expected length and pairs like 64:4, got 64:0"),
        ("--cases 64:4 32:4", "--cases: expected one length for a number of pairs, got 64:4 32:4"),
        (f"--cases {'1' * 5000}:4", f"--cases: expected length and pairs like 64:4, got {'1' * 60}"),
        ("--cases 64:40", "--cases: 40 pairs need at least 160 tokens, got 64 in 64:40"),
        ("--cases 17:4", "--cases: expected an even length, got 17:4"),
        ("--cases 256:64", "--vocab-size: expected an even number, at least 128, got 64"),
        ("--train-sequences 0", "--train-sequences: expected a number above 0, got 0"),
        ("--val-sequences 2000000000", "--val-sequences: expected sets that fit into the "),
        (
            "--cases 200000000:4",
            "512 sequences for validation and for each test, of up to 200000000 tokens, which",
        ),
        ("--cases 200000000:4 --val-sequences 1 --batch-size 64", "expected a run that fits into the "),
    ],
)
def test_recall_cases_that_cannot_be(tmp_path, capsys, words, message):
    assert cli.main(["train", "recall", "--out", str(tmp_path / "run"), *words.split()]) == 1
    assert message in capsys.readouterr().err
