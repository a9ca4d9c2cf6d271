"""What generated tasks of `gdn train` and `gdn sweep` ask: each batch against a construction of its own in NumPy."""

import itertools
import math

import cheap_keys
import harness
import jax
import numpy as np
import pytest

from gdn_jax.commands import cli
from gdn_jax.training.options import TASKS
from gdn_jax.training.tasks import state_tracking, text
from gdn_jax.training.tasks.copying import CopyOptions, PalindromeOptions
from gdn_jax.training.tasks.needle import NeedleOptions
from gdn_jax.training.tasks.recall import RecallOptions
from gdn_jax.training.tasks.stacks import StackOptions
from gdn_jax.training.tasks.state_tracking import ParityOptions, PermutationOptions
from gdn_jax.training.tasks.table import make_task


def draw(task_options, size=None, batch=64, seed=5):
    """Tokens, targets and weights of fresh sequences, in NumPy, and the task."""
    task = make_task(task_options, batch)
    size = task.size if size is None else size
    drawn = jax.jit(lambda seed: task.draw(cheap_keys.key(seed), batch, size))(np.uint32(seed))
    return task, *(np.asarray(x) for x in drawn)


@pytest.mark.parametrize("size, counted", [(6, 0), (9, 0), (14, 9)])
def test_parity(size, counted):
    """The running sum modulo 2 after every bit; beyond the trained length only what lies past it counts."""
    task, tokens, targets, weights = draw(ParityOptions(length=9), size)
    np.testing.assert_array_equal(targets, np.cumsum(tokens, axis=1) % 2)
    np.testing.assert_array_equal(weights, np.broadcast_to(np.arange(size) >= counted, tokens.shape))
    assert task.vocab_size == 2 and set(tokens.ravel()) == {0, 1}
    assert abs(tokens.mean() - 0.5) < 5 * 0.5 / tokens.size**0.5  # five standard deviations


@pytest.mark.parametrize("group, things", [("S3", 3), ("S5", 5)])
@pytest.mark.parametrize("elements", ["all", "swaps"])
def test_permutation(group, things, elements):
    """Following every thing through the word, one permutation after another, leads where the target says."""
    task, tokens, targets, weights = draw(PermutationOptions(group=group, elements=elements, length=7), 8)
    group = list(itertools.permutations(range(things)))
    assert task.vocab_size == len(group) == math.factorial(things)
    assert (weights == (np.arange(8) >= 7)).all()
    for row, target in zip(tokens.tolist(), targets.tolist(), strict=True):
        where = list(range(things))
        for token, product in zip(row, target, strict=True):
            where = [group[token][i] for i in where]
            assert group[product] == tuple(where)
    moved = {sum(a != b for a, b in enumerate(group[token])) for token in set(tokens.ravel().tolist())}
    assert moved == ({2} if elements == "swaps" else {0, *range(2, things + 1)})
    if elements == "all":
        assert len(set(tokens.ravel().tolist())) > 0.9 * len(group)


def test_even_permutations():
    """A5: 60 elements, and the product of words of them."""
    task, tokens, targets, _ = draw(PermutationOptions(group="A5", length=7), 8)
    group = [p for p in itertools.permutations(range(5)) if round(np.linalg.det(np.eye(5)[list(p)])) == 1]
    assert task.vocab_size == len(group) == 60
    for row, target in zip(tokens[:8].tolist(), targets[:8].tolist(), strict=True):
        where = list(range(5))
        for token, product in zip(row, target, strict=True):
            where = [group[token][i] for i in where]
            assert group[product] == tuple(where)


def test_group_tables():
    for things in (3, 5):
        elements = state_tracking.elements(things)
        table = state_tracking.products(elements)
        np.testing.assert_array_equal(table[0], np.arange(len(table)))  # the first element moves nothing
        assert all(sorted(row) == list(range(len(table))) for row in table.tolist())
        a, b, c = np.random.default_rng(0).integers(0, len(table), (3, 50))
        np.testing.assert_array_equal(table[table[a, b], c], table[a, table[b, c]])
        assert (table != table.T).any()
        assert len(state_tracking.swaps(elements)) == things * (things - 1) // 2


@pytest.mark.parametrize("haystack", ["noise", "text"])
@pytest.mark.parametrize(
    "needle_length, size", [(1, 3), pytest.param(2, 30, marks=pytest.mark.slow), (3, 40)]
)
def test_needle(haystack, needle_length, size):
    o = NeedleOptions(haystack=haystack, needle_length=needle_length, length=20, num_values=8)
    task, tokens, targets, weights = draw(o, size, batch=256)
    marker, question = task.vocab_size - 2, task.vocab_size - 1
    first = {"noise": 0, "text": ord("a")}[haystack]
    stream = text.load(None).train.tobytes() if haystack == "text" else b""
    places = set()
    for row, target, weight in zip(tokens, targets, weights, strict=True):
        (place,) = np.flatnonzero(row == marker)
        (asked,) = np.flatnonzero(row == question)
        places.add(int(place))
        values = row[place + 1 : place + 1 + needle_length]
        assert asked == size - needle_length and place + needle_length < asked
        assert ((first <= values) & (values < first + 8)).all()
        np.testing.assert_array_equal(np.flatnonzero(weight), np.arange(asked, size))
        np.testing.assert_array_equal(target[asked:], values)
        np.testing.assert_array_equal(row[asked + 1 :], values[:-1])
        hay = np.delete(row, [*range(place, place + needle_length + 1), *range(asked, size)])
        assert (hay < marker).all()
        if haystack == "text":
            assert bytes(row[:place].tolist()) in stream
    assert places == set(range(size - 2 * needle_length)), "not every place is used"
    if haystack == "noise" and size > 3:
        assert set(hay.tolist()) - set(range(8)) and set(range(8)) <= set(tokens.ravel().tolist())


@pytest.mark.parametrize("size", [14, 15, 40])
def test_needle_of_pairs(size):
    """Pairs fill the haystack; what is asked are the keys behind the marker, each once, for their values there."""
    o = NeedleOptions(haystack="pairs", noise_tokens=8, needle_length=3, length=20)
    task, tokens, targets, weights = draw(o, size, batch=256)
    orders, void, differs = set(), size - 14, 0
    assert task.vocab_size == 10
    for row, target, weight in zip(tokens, targets, weights, strict=True):
        hay, needle, asked = row[:void], row[void + 1 : void + 7], row[void + 8 :]
        assert row[void] == 8 and row[void + 7] == 9
        pairs = hay[void % 2 :]
        assert (pairs[::2] < 4).all() and (pairs[1::2] >= 4).all() and (hay < 8).all()
        memory = dict(needle.reshape(3, 2).tolist())
        assert len(memory) == 3 and max(memory) < 4 <= min(memory.values())
        assert asked.reshape(3, 2).tolist() == [[key, memory[key]] for key in asked[::2].tolist()]
        assert set(asked[::2].tolist()) == set(memory)
        np.testing.assert_array_equal(np.flatnonzero(weight), void + 8 + np.array([0, 2, 4]))
        np.testing.assert_array_equal(target[void + 8 :: 2], asked[1::2])
        orders.add(tuple(needle[::2].tolist().index(key) for key in asked[::2]))
        stale = dict(pairs.reshape(-1, 2).tolist())
        differs += any(stale.get(key, value) != value for key, value in memory.items())
    assert len(orders) == 6, "not every order is asked"
    assert (differs > 0) == (void > 1), "the void pairs never contradict the needle"


def test_copy():
    task, tokens, targets, weights = draw(CopyOptions(num_tokens=5, length=4), 6)
    assert task.vocab_size == 6 and tokens.shape == (64, 12)
    np.testing.assert_array_equal(tokens[:, 6], 5)
    np.testing.assert_array_equal(targets[:, 6:], tokens[:, :6])
    np.testing.assert_array_equal(tokens[:, 7:], tokens[:, :5])
    np.testing.assert_array_equal(weights, np.broadcast_to(np.arange(12) >= 6, weights.shape))
    assert set(tokens[:, :6].ravel()) == set(range(5))


def test_palindrome():
    """The second half is the first one backwards."""
    task, tokens, targets, weights = draw(PalindromeOptions(num_tokens=5, length=4), 6)
    np.testing.assert_array_equal(tokens[:, 6], 5)
    np.testing.assert_array_equal(targets[:, 6:], tokens[:, :6][:, ::-1])
    np.testing.assert_array_equal(tokens[:, 7:], targets[:, 6:-1])
    np.testing.assert_array_equal(weights, np.broadcast_to(np.arange(12) >= 6, weights.shape))
    assert task.vocab_size == 6


def test_stacks():
    """What is popped lies on top of its stack; half of the operations that could be pops are."""
    o = StackOptions(num_stacks=3, num_tokens=5, length=30)
    task, tokens, targets, weights = draw(o, 60)
    assert task.vocab_size == 10 and tokens.max() < 10
    pops, could = 0, 0
    for row, target, weight in zip(tokens, targets, weights, strict=True):
        stacks = [[] for _ in range(3)]
        for t in range(0, 60, 3):
            what, stack, value = row[t] - 8, row[t + 1] - 5, row[t + 2]
            assert what in (0, 1) and 0 <= stack < 3 and 0 <= value < 5
            could += bool(stacks[stack])
            if what:
                assert target[t + 1] == value == stacks[stack].pop()
            else:
                stacks[stack].append(value)
                assert target[t + 1] == 0
            pops += what
            assert weight[t + 1] == (what and t + 1 >= 30) and not weight[t] and not weight[t + 2]
    assert abs(pops / could - 0.5) < 5 * 0.5 / could**0.5  # five standard deviations


SMALL = {
    "recall": RecallOptions(vocab_size=16, num_pairs=2, length=12, test_pairs=(1, 3), val_sequences=8),
    "needle": NeedleOptions(length=9, test_lengths=(7, 12), val_sequences=8),
    "parity": ParityOptions(length=5, test_lengths=(4, 9), val_sequences=8),
    "permutation": PermutationOptions(length=5, test_lengths=(4, 9), val_sequences=8),
    "copy": CopyOptions(length=4, test_lengths=(3, 5), val_sequences=8),
    "palindrome": PalindromeOptions(length=4, test_lengths=(3, 5), val_sequences=8),
    "stack": StackOptions(num_stacks=2, num_tokens=4, length=12, test_lengths=(9, 15), val_sequences=8),
}


@pytest.mark.parametrize("name", harness.tiers(SMALL, ("recall", "parity", "copy")))
def test_batches_are_given_by_seed_and_step(name):
    def make(seed):
        return make_task(SMALL[name], 4, seed)

    task, twin, other = make(0), make(0), make(1)
    one = task.train_batch(3).tokens
    np.testing.assert_array_equal(one, twin.train_batch(3).tokens)
    np.testing.assert_array_equal(one, jax.jit(task.seeded_batch)(np.uint32(0), 3).tokens)
    assert (one != task.train_batch(4).tokens).any() and (one != other.train_batch(3).tokens).any()
    np.testing.assert_array_equal(other.train_batch(3).tokens, task.seeded_batch(1, 3).tokens)
    sets = [task.val_batches(4), *task.test_batches(4).values()]
    again = [twin.val_batches(4), *twin.test_batches(4).values()]
    jax.tree.map(np.testing.assert_array_equal, sets, again)
    # Training, validation and tests do not share a sequence by construction: keys differ.
    drawn = [np.asarray(task.train_batch(step).tokens).tobytes() for step in range(4)]
    held_out = [np.asarray(batch.tokens).tobytes() for batches in sets for batch in batches]
    assert not set(drawn) & set(held_out), "a batch of training is one of validation or of a test"
    assert len({np.asarray(s[0].tokens).tobytes() for s in sets} | {np.asarray(one).tobytes()}) == 4


@pytest.mark.parametrize("name", SMALL)
def test_sizes_and_padding(name):
    task = make_task(SMALL[name], 4)
    sets = task.test_batches(4)
    assert tuple(sets) == task.test_sizes
    assert len({batch.tokens.shape for batches in sets.values() for batch in batches}) == 1
    for i, (size, batches) in enumerate(sets.items()):
        assert len(batches) == 2
        bare = task.draw(task._key(0, 3 + i, 1), 4, size)
        length = bare.tokens.shape[1]
        for padded, x in zip(batches[1], bare, strict=True):
            np.testing.assert_array_equal(padded[:, :length], x)
            assert not np.any(padded[:, length:])
    (chance,) = task.baselines().values()
    assert 0 < chance < 1 and task.summary() and task.describe()["fingerprint"]


def test_every_task_has_defaults_that_fit():
    for name, default in TASKS.items():
        assert default.task.task == name
        default.task.check()


@pytest.mark.parametrize(
    "words, message",
    [
        ("recall --length 7", "--length: expected an even number, got 7"),
        ("recall --length 8 --num-pairs 3", "--length: expected at least 4 * --num-pairs = 12, got 8"),
        ("recall --test-pairs 2 99", "--length: expected at least 4 * --test-pairs = 396, got 32"),
        (
            "recall --vocab-size 6 --num-pairs 4 --length 32",
            "--vocab-size: expected an even number, at least 2 *",
        ),
        ("recall --power 0", "--power: expected a number above 0 and up to 1000, got 0.0"),
        ("recall --test-pairs 2 2", "--test-pairs: expected different values, at least one, got 2 2"),
        ("recall --test-pairs", "--test-pairs: expected different values, at least one, got none"),
        ("needle --length 4", "--length: expected at least 2 * --needle-length + 1 = 5, got 4"),
        (
            "needle --test-lengths 64 4",
            "--test-lengths: expected at least 2 * --needle-length + 1 = 5, got 4",
        ),
        ("recall --rewrite --vocab-size 5", "--vocab-size: expected an even number, at least 2, got 5"),
        (
            "needle --haystack pairs --needle-length 4 --length 17",
            "--length: expected at least 4 * --needle-length + 2 = 18, got 17",
        ),
        (
            "needle --haystack pairs --needle-length 4 --noise-tokens 6",
            "--noise-tokens: expected an even number, at least 2 * --needle-length = 8, got 6",
        ),
        ("needle --num-values 33", "--num-values: expected at most --noise-tokens = 32, got 33"),
        ("needle --haystack text --num-values 27", "--num-values: expected at most 26 letters, got 27"),
        ("parity --test-lengths 32 0", "--test-lengths: expected a number above 0, got 0"),
        ("parity --length 0", "--length: expected a number above 0, got 0"),
        ("permutation --length -1", "--length: expected a number above 0, got -1"),
        (
            "scope --length 9",
            "--length: expected an even number, at least 4: two tokens for an operation, got 9",
        ),
        ("eviction --num-names 2", "--reach: expected less than --num-names = 2, got 2"),
        ("copy --num-tokens 0", "--num-tokens: expected a number above 0, got 0"),
    ],
)
def test_task_options(tmp_path, capsys, words, message):
    name, *rest = words.split()
    assert cli.main(["train", name, "--out", str(tmp_path / "run"), *rest]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error and not (tmp_path / "run").exists()


@pytest.mark.parametrize("words", ["permutation --group S4", "needle --haystack grass", "copy --num-pairs 3"])
def test_misuse(capsys, words):
    assert cli.main(["train", *words.split()]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_training_set_of_fixed_size():
    """So many sequences and no others, the same for every run; every turn has its own; tests are other ones."""
    o = RecallOptions(vocab_size=64, cases=("8:2", "16:3"), train_sequences=20, val_sequences=40)
    task = make_task(o, 40, 7)
    draw = [jax.jit(lambda seed, step, turn=turn: task.seeded_batch(seed, step, turn)) for turn in (0, 1)]

    def rows(batch):
        return {bytes(row) for row in np.asarray(batch.tokens, np.uint8)}

    batches = [{(step, s): rows(draw[step % 2](s, step)) for step in range(1, 9)} for s in (0, 1)]
    sets = [set().union(*(x for b in batches for (step, _), x in b.items() if step % 2 == t)) for t in (0, 1)]
    # 160 draws of 20 for each run: (1 - 1/20)^320 * 20 < 1e-5 that one is left out
    assert [len(x) for x in sets] == [20, 20]
    assert batches[0][1, 0] != batches[1][1, 1], "runs draw the same batches"
    fresh = set().union(*(rows(b) for b in task.val_batches(40)))
    assert len(fresh & {row.ljust(16, b"\0") for x in sets for row in x}) <= 2
