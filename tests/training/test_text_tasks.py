"""Tasks of text: what is held out, windows, sentences in a text, text in a program; against slow counts in NumPy."""

import itertools
import math
import os
import re
import shutil
from collections import Counter

import jax
import numpy as np
import pytest

from gdn_jax.commands.errors import RunError
from gdn_jax.training.tasks import ngrams, sentence, text
from gdn_jax.training.tasks.next_byte import BytesTask, TextOptions
from gdn_jax.training.tasks.sentence import SentenceOptions
from gdn_jax.training.tasks.table import make_task


def test_split_holds_out_whole_files_and_is_stable(folder):
    corpus = text.load(folder)
    assert not set(corpus.train_files) & set(corpus.val_files)
    assert len(corpus.train_files) + len(corpus.val_files) == 30
    assert corpus.fingerprint == text.load(folder).fingerprint
    joined = corpus.val.tobytes()
    for name in corpus.val_files:
        assert (folder / name).read_bytes() in joined
        assert (folder / name).read_bytes() not in corpus.train.tobytes()
    names = [f"a{i}" for i in range(2000)]
    out = dict(zip(names, text.held_out(names), strict=True))
    assert 0.07 < np.mean(list(out.values())) < 0.13
    more = ["new", *names]
    after = dict(zip(more, text.held_out(more), strict=True))
    assert all(after[name] == out[name] for name in names), "another file moved one across the split"


@pytest.mark.parametrize("count", [2, 3, 5])
def test_small_folders_have_both_sides(count):
    out = text.held_out([f"{i}.txt" for i in range(count)])
    assert 1 <= sum(out) < count


def test_single_file_holds_out_its_end(tmp_path):
    path = tmp_path / "one.txt"
    path.write_bytes(bytes(range(1, 101)))
    corpus = text.load(path)
    assert corpus.train.tobytes() == b"\0" + bytes(range(1, 91)) + b"\0"
    assert corpus.val.tobytes() == b"\0" + bytes(range(91, 101)) + b"\0"


def test_glob_hidden_and_caches(tmp_path):
    for name in ("a.py", "b.txt", ".hidden.py", "__pycache__/c.py", "sub/d.py", ".git/e.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name * 10)
    corpus = text.load(tmp_path, "*.py")
    assert sorted(corpus.train_files + corpus.val_files) == ["a.py", "sub/d.py"]


def test_links_to_what_is_no_file_are_not_read(tmp_path):
    """A device has no end and a pipe may never begin: such a link is left out, a broken one refused."""
    (tmp_path / "a").write_text("text")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "null").symlink_to(os.devnull)
    os.mkfifo(tmp_path / ".pipe")
    (tmp_path / "pipe").symlink_to(".pipe")
    assert [path.name for path in text._walk(tmp_path, "*", [])] == ["a", "b"]
    (tmp_path / "broken").symlink_to("nowhere")
    with pytest.raises(
        RunError, match=r"cannot read .*/broken: No such file .*; remove the link, or leave it out by"
    ):
        text.read(tmp_path)


def test_file_names_of_any_bytes(tmp_path):
    names = [b"a.txt", b"\xff\xfe.txt", "\N{GREEK SMALL LETTER ALPHA}.txt".encode()]
    for name in names:
        (tmp_path / os.fsdecode(name)).write_text("text " * 9)
    corpus = text.load(tmp_path)
    assert {os.fsencode(name) for name in corpus.train_files + corpus.val_files} == {*names}


def test_standard_library_is_the_default():
    corpus = text.load(None)
    files = corpus.train_files + corpus.val_files
    assert "json/decoder.py" in files and not any(
        "site-packages" in f or "test" in f.split("/") for f in files
    )
    assert corpus.train.size > 3e6 and corpus.val.size > 1e5


@pytest.mark.parametrize("size, length, most", [(101, 10, 1000), (1000, 32, 96), (34, 32, 5), (513, 16, 100)])
def test_windows_predict_each_byte_at_most_once(size, length, most):
    stream = np.arange(size, dtype=np.int64) % 251
    starts = text.window_starts(size, length, most)
    inputs, targets = text.windows(stream.astype(np.uint8), starts, length)
    predicted = (starts[:, None] + 1 + np.arange(length)).reshape(-1)
    assert len(set(predicted)) == predicted.size <= max(most, length) and predicted.max() < size
    np.testing.assert_array_equal(targets.reshape(-1), stream[predicted])
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
    if most >= size:
        assert predicted.size == (size - 1) // length * length


def test_batches_depend_on_seed_and_step_alone(folder):
    def batch(seed, step):
        return BytesTask(TextOptions(data=folder, length=32), 4, seed).train_batch(step).tokens

    np.testing.assert_array_equal(batch(1, 5), batch(1, 5))
    assert (batch(1, 5) != batch(1, 6)).any() and (batch(1, 5) != batch(2, 5)).any()


def test_training_windows_lie_in_the_training_part(tmp_path):
    """Training text and held-out text share no byte: what a batch holds tells where it was drawn."""
    (tmp_path / "text").write_bytes(b"a" * 900 + b"b" * 100)
    task = BytesTask(TextOptions(data=tmp_path / "text", length=32), 8, 0)
    drawn = {*np.unique([[b.tokens, b.targets] for b in map(task.train_batch, range(1, 40))]).tolist()}
    assert ord("a") in drawn and drawn <= {0, ord("a")}
    held_out = {*np.unique([[b.tokens, b.targets] for b in task.val_batches(1)]).tolist()}
    assert held_out == {0, ord("b")}


def test_validation_covers_the_windows_once(folder):
    task = BytesTask(TextOptions(data=folder, length=32, val_bytes=320), 4, 0)
    batches = task.val_batches(4)
    rows = np.concatenate([b.targets[b.weights[:, 0] > 0] for b in batches])
    np.testing.assert_array_equal(rows, text.windows(task.corpus.val, task.starts, 32)[1])
    assert {b.tokens.shape for b in batches} == {(4, 32)}


def test_tables_agree_with_a_slow_count(monkeypatch):
    rng = np.random.default_rng(0)
    train_bytes, val = (rng.integers(97, 103, n).astype(np.uint8) for n in (400, 60))
    positions = np.array([1, 2, 3, 17, 40, 59])
    ones, twos, threes, c2, c3 = Counter(), Counter(), Counter(), Counter(), Counter()
    for i, y in enumerate(train_bytes.tolist()):
        b = int(train_bytes[i - 1]) if i > 0 else 0
        a = int(train_bytes[i - 2]) if i > 1 else 0
        if i == 0:
            continue  # the first byte is context only
        ones[y] += 1
        twos[b, y] += 1
        threes[a, b, y] += 1
        c2[b] += 1
        c3[a, b] += 1
    bits = {"bigram": [], "trigram": []}
    for i in positions.tolist():
        y, b, a = int(val[i]), int(val[i - 1]), int(val[i - 2]) if i > 1 else 0
        p1 = (ones[y] + 1) / (sum(ones.values()) + 256)
        p2 = (twos[b, y] + ngrams.PRIOR * p1) / (c2[b] + ngrams.PRIOR)
        p3 = (threes[a, b, y] + ngrams.PRIOR * p2) / (c3[a, b] + ngrams.PRIOR)
        bits["bigram"].append(-math.log2(p2))
        bits["trigram"].append(-math.log2(p3))
    want = pytest.approx({k: sum(v) / len(v) for k, v in bits.items()}, rel=1e-12)
    assert ngrams.bits_per_byte(train_bytes, val, positions) == want
    # in parts that do not divide the text
    monkeypatch.setattr(ngrams, "_AT_ONCE", 150)
    assert ngrams.bits_per_byte(train_bytes, val, positions) == want


# --- a sentence in a text


def read_sentence(row, target, weight, value):
    """The key and value of the sentence, of which there is one, and those of the question; all read as text."""
    words = bytes([row[0], *target.tolist()]).decode("latin-1")
    [(key, said)] = re.findall(r" The secret of ([a-z]{8}) is ([0-9a-f]+)\. ", words)
    asked, answer = re.search(r"\nWhat is the secret of ([a-z]{8})\? It is ([0-9a-f]+)$", words).groups()
    counted = bytes(target[weight == 1].tolist()).decode()
    np.testing.assert_array_equal(row[1:], target[:-1])
    return words, (key, said), (asked, answer), counted


@pytest.mark.parametrize("haystack, value, digits", [("repeated", "number", 7), ("text", "code", 32)])
def test_sentence(folder, haystack, value, digits):
    """What the sentence says of the word that is asked for is what must be answered; all else is the haystack."""
    o = SentenceOptions(haystack=haystack, value=value, data=folder, length=300, test_lengths=(256, 400))
    task = make_task(o, 16)
    corpus = text.load(folder)
    places, values = set(), []
    draw = jax.jit(lambda one, two: (task.draw_training(one, 48), task.draw(two, 48, 256)))
    trained, tested = draw(jax.random.key(3), jax.random.key(4))
    assert trained.tokens.shape == (48, 300) and tested.tokens.shape == (48, 256)
    for batch, part in ((trained, corpus.train), (tested, corpus.val)):
        stream = part.tobytes().replace(b"\0", b"\n")
        for row in zip(*map(np.asarray, batch), strict=True):
            words, (key, said), (asked, answer), counted = read_sentence(*row, value)
            assert key == asked and said == answer == counted and len(said) == digits
            assert (row[2] == 1).sum() == digits and set(row[2].tolist()) == {0, 1}
            at = words.index(" The secret of ")
            before, after = words[:at], words[at + len(f" The secret of {key} is {said}. ") :]
            after = after[: after.index("\nWhat is the secret")]
            source = stream.decode("latin-1") if haystack == "text" else sentence.NOISE.decode() * 9
            assert before in source and after in source
            places.add(at)
            values.append(said)
    assert len({*values}) == len(values) and len(places) > 60
    [chance] = task.baselines().values()
    assert chance == 1 / len({*"".join(values)})


def test_weight_of_the_text(folder):
    """In training every byte counts a little; in validation and tests only the answer."""
    o = SentenceOptions(text_weight=0.25, length=256, test_lengths=(256,), val_sequences=4)
    task = make_task(o, 4)
    weights = np.asarray(task.train_batch(1).weights)
    np.testing.assert_array_equal(weights, [[0.25] * 249 + [1] * 7] * 4)
    for batch in (*task.val_batches(4), *task.test_batches(4)[256]):
        np.testing.assert_array_equal(batch.weights, [[0] * 249 + [1] * 7] * 4)


# --- packages, and text in a program


@pytest.fixture
def site(tmp_path):
    """Ten packages and a module, with two files that come again."""
    for i in range(10):
        for name in ("a", "b"):
            (tmp_path / f"p{i}").mkdir(exist_ok=True)
            (tmp_path / f"p{i}" / f"{name}.py").write_text(f"# {i} {name}\n" * 40)
    (tmp_path / "p3" / "vendored.py").write_text("# 7 b\n" * 40)
    (tmp_path / "p4" / "again.py").write_text("# 4 a\n" * 40)
    (tmp_path / "one.py").write_text("# one\n" * 40)
    return tmp_path


def test_packages_are_held_out_whole_and_without_copies(site):
    corpus = text.load(site, "*.py", packages=True)
    sides = [{name.split("/")[0] for name in files} for files in (corpus.train_files, corpus.val_files)]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 11 and sides[1]
    files = corpus.train_files + corpus.val_files
    assert len(files) == 21, "two of 23 files are copies"
    for i, name in itertools.product(range(10), "ab"):
        both = corpus.train.tobytes() + corpus.val.tobytes()
        assert both.count(f"# {i} {name}\n".encode()) == 40
    alone = site.with_name("alone")
    shutil.copytree(site / "p1", alone / "p1")
    with pytest.raises(RunError, match="--packages: expected at least two packages, got p1"):
        text.load(alone, packages=True)
    task = make_task(TextOptions(data=site, glob="*.py", packages=True, length=16), 4)
    assert {*task.describe()["val_files"]} == sides[1]


def test_installed_packages_are_the_default(site, monkeypatch):
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(site) if name == "purelib" else None)
    (site / "p1" / "data.txt").write_text("no program")
    source, files = text.read(None, packages=True)
    assert source.startswith("packages of Python")
    assert [name for name, _ in files] == [name for name, _ in text.read(site, "*.py", packages=True)[1]]


def test_text_of_a_sweep(folder):
    """Windows drawn in a program lie in the training part, follow seed and step, and predict the next byte."""
    o = TextOptions(data=folder, length=32, test_lengths=(8, 32, 64), val_bytes=640)
    task = make_task(o, 5)
    draw = jax.jit(lambda seed, step, data: task.bound(data).seeded_batch(seed, step))
    one, other, third = (draw(seed, step, task.data) for seed, step in ((1, 2), (1, 3), (2, 2)))
    assert (one.tokens != other.tokens).any() and (one.tokens != third.tokens).any()
    stream = task.corpus.train.tobytes()
    for row, target in zip(np.asarray(one.tokens), np.asarray(one.targets), strict=True):
        assert bytes([*row.tolist(), int(target[-1])]) in stream
        np.testing.assert_array_equal(row[1:], target[:-1])
    assert one.weights.shape == (5, 32) and (one.weights == 1).all()


def test_text_by_position(folder):
    """The same held-out windows for every test; each place of a window is scored once."""
    o = TextOptions(data=folder, length=32, test_lengths=(8, 32, 64), val_bytes=640)
    task = make_task(o, 4)
    tests = task.test_batches(4)
    assert [*tests] == [8, 32, 64] and task.test_batches(4)[8][0].tokens.shape == (4, 64)
    rows = {n: np.concatenate([b.tokens for b in batches]) for n, batches in tests.items()}
    weights = {n: np.concatenate([b.weights for b in batches]) for n, batches in tests.items()}
    assert all((rows[n] == rows[8]).all() for n in tests)
    counted = weights[8] + weights[32] + weights[64]
    assert set(counted[:10].ravel()) == {1} and counted.sum() == 640
    for n, (low, high) in {8: (0, 8), 32: (8, 32), 64: (32, 64)}.items():
        assert weights[n][0].tolist() == [float(low <= i < high) for i in range(64)]
