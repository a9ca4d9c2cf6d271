"""What generated tasks of `gdn train` and `gdn sweep` ask: each batch against a construction of its own in NumPy."""

import itertools
import math

import harness
import jax
import numpy as np
import pytest

from gdn_jax.commands import cli
from gdn_jax.training.options import TASKS
from gdn_jax.training.tasks import recall, state_tracking, text
from gdn_jax.training.tasks.copying import CopyOptions, PalindromeOptions
from gdn_jax.training.tasks.needle import NeedleOptions
from gdn_jax.training.tasks.recall import RecallOptions
from gdn_jax.training.tasks.stacks import StackOptions
from gdn_jax.training.tasks.state_tracking import ParityOptions, PermutationOptions
from gdn_jax.training.tasks.table import make_task


@pytest.mark.parametrize("length, vocab_size, num_pairs", [(16, 8, 4), (64, 64, 8), (32, 512, 1)])
def test_recall_is_answerable(length, vocab_size, num_pairs):
    tokens, targets, asked = map(
        np.asarray, recall.sequences(jax.random.key(3), 50, length, vocab_size, num_pairs, 0.01)
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
    key, kept = jax.random.key(3), np.array([1, 2, 4] * 20)
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
        np.asarray, recall.sequences(jax.random.key(4), 60, 40, 8, 8, 0.01, kept, rewrite=True)
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
    drawn = recall.sequences(jax.random.key(5), 40, 96, 48, 20, 0.01, np.full(40, pairs), rewrite=rewrite)
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
        jax.random.key(6),
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
    _, _, asked = recall.sequences(jax.random.key(0), 4000, 32, 16, 1, 0.01)
    counts = np.asarray(asked)[:, 2::2].sum(0)
    law = np.arange(1, 16) ** (0.01 - 1)
    expected = 4000 * law / law.sum()
    # chi-square with 14 degrees of freedom: mean 14, deviation 5.3; six deviations
    assert ((counts - expected) ** 2 / expected).sum() < 14 + 6 * 5.3


def draw(task_options, size=None, batch=64, seed=5):
    """Tokens, targets and weights of fresh sequences, in NumPy, and the task."""
    task = make_task(task_options, batch)
    size = task.size if size is None else size
    drawn = jax.jit(lambda seed: task.draw(jax.random.key(seed), batch, size))(np.uint32(seed))
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
