"""Tasks whose sequences are drawn at random: recall, needle, sentence, group words, copies, stacks."""

import hashlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gdn_jax import models
from gdn_jax.training.tasks import copying, needle, recall, sentence, stacks, state_tracking, text
from gdn_jax.training.tasks.batch import Batch
from gdn_jax.training.tasks.options import (
    CopyOptions,
    NeedleOptions,
    ParityOptions,
    PermutationOptions,
    RecallOptions,
    SentenceOptions,
    StackOptions,
)
from gdn_jax.training.tasks.task import Task

_TRAINING_SET = 2**16
"""Purpose of the keys of a training set of fixed size; those of its kinds of batches follow."""


class GeneratedTask[
    T: (
        RecallOptions,
        NeedleOptions,
        SentenceOptions,
        ParityOptions,
        PermutationOptions,
        CopyOptions,
        StackOptions,
    )
](Task):
    """A task of fresh sequences; a subclass says how they are drawn.

    Attributes: those of `Task`, and
      o: options of the task.
      batch_size: sequences of a training step.
      seed: of the training batches and of the validation and test sets.
      test_sizes: sizes that a trained model is tested at.
    """

    metric = "accuracy"
    lower_is_better = False
    axis = "tokens"

    def __init__(self, options: T, batch_size: int, seed: int):
        self.o, self.batch_size, self.seed = options, batch_size, seed
        self.size: int = self.o.length
        self.test_sizes: tuple[int, ...] = () if isinstance(self.o, RecallOptions) else self.o.test_lengths

    def draw(self, key: jax.Array, batch: int, size: int) -> Batch:
        """Draws fresh sequences of a size; a pure function of its arguments, also under jit."""
        raise NotImplementedError

    def draw_training(self, key: jax.Array, batch: int, kind: int = 0) -> Batch:
        """Draws fresh sequences to train on."""
        return self.draw(key, batch, self.size)

    def draw_validation(self, key: jax.Array, batch: int, kind: int = 0) -> Batch:
        """Draws fresh sequences to validate with."""
        return self.draw_training(key, batch, kind)

    def _key(self, seed: int | jax.Array, purpose: int, i: int | jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), purpose), i)

    def seeded_batch(self, seed: int | jax.Array, step: int | jax.Array, kind: int = 0) -> Batch:
        """Draws the batch of one optimiser step, see `Task.seeded_batch`.

        Of a training set of a fixed size every sequence is a function of its number and of the seed of the options,
        which the runs of a sweep share: it is drawn again whenever its number is.
        """
        key, batch = self._key(seed, 0, step), self.batch_size
        if self.o.train_sequences is None:
            return self.draw_training(key, batch, kind)
        numbers = jax.random.randint(key, (batch,), 0, self.o.train_sequences)
        keys = jax.vmap(partial(self._key, self.seed, _TRAINING_SET + kind))(numbers)
        rows = jax.vmap(lambda key: self.draw_training(key, 1, kind))(keys)
        return jax.tree.map(lambda x: x[:, 0], rows)

    def train_batch(self, step: int) -> Batch:
        return self.seeded_batch(self.seed, step, self.turns[step % len(self.turns)])

    def _keys(self, purpose: int, batch: int) -> list[jax.Array]:
        count = max(1, self.o.val_sequences // batch)
        return [self._key(self.seed, purpose, i) for i in range(count)]

    def val_batches(self, size: int) -> list[Batch]:
        kinds = max(self.turns) + 1
        drawn = [self.draw_validation(key, size, i % kinds) for i, key in enumerate(self._keys(1, size))]
        longest = max(batch.tokens.shape[1] for batch in drawn)
        return [batch.pad(longest) for batch in drawn]

    def test_batches(self, size: int) -> dict[int, list[Batch]]:
        sets = {
            n: [self.draw(key, size, n) for key in self._keys(3 + i, size)]
            for i, n in enumerate(self.test_sizes)
        }
        longest = max(batch.tokens.shape[1] for batches in sets.values() for batch in batches)
        return {n: [batch.pad(longest) for batch in batches] for n, batches in sets.items()}

    def metrics(self, loss: float, accuracy: float) -> dict[str, float]:
        del loss
        return {"accuracy": accuracy}

    def answers(self) -> float:
        [accuracy] = self.baselines().values()
        return 1 / accuracy

    def describe(self) -> dict[str, object]:
        first = jax.tree.map(np.asarray, self.train_batch(len(self.turns)))
        digest = hashlib.sha256(b"".join(a.tobytes() for a in first)).hexdigest()[:16]
        return {"source": "generated", "fingerprint": digest}

    def sample(self, model: models.LanguageModel) -> str:
        batch = self.draw(self._key(self.seed, 2, 0), 1, self.size)
        graphdef, state = nnx.split(model)
        logits = jax.jit(lambda state, tokens: nnx.merge(graphdef, state)(tokens)[0])(state, batch.tokens)
        tokens, targets, weights = (np.asarray(x[0]) for x in batch)
        predicted = np.argmax(np.asarray(logits[0]), -1)
        lines = ["place  token  target  predicted"]
        for t in np.flatnonzero(weights):
            wrong = "" if predicted[t] == targets[t] else "  wrong"
            lines.append(f"{t:5d} {tokens[t]:6d} {targets[t]:7d} {predicted[t]:10d}{wrong}")
        return "\n".join(lines) + "\n"


class RecallTask(GeneratedTask[RecallOptions]):
    """Multi-query associative recall; see `recall.sequences`."""

    label = "accuracy at the queries"
    axis = "pairs"

    def __init__(self, options: RecallOptions, batch_size: int, seed: int):
        super().__init__(options, batch_size, seed)
        self.vocab_size = self.o.vocab_size
        self.size, self.test_sizes = self.o.num_pairs, self.o.test_pairs
        pairs = self.o.parsed_cases()
        self.cases = dict(pairs)  # length by pairs
        self.lengths = self.cases | dict(self.o.parsed_cases("test_cases"))
        if self.cases:
            self.size, self.test_sizes = max(self.cases), tuple(self.lengths)
            self.turns = tuple(self.test_sizes.index(n) for n, _ in pairs)

    def kind_names(self) -> tuple[str, ...]:
        return tuple(map(str, self.cases or (self.size,)))

    def asked(self, kind: int) -> int:
        return [*self.cases][kind] if self.cases else self.size

    def _draw(self, key: jax.Array, kept: jax.Array, num_pairs: int) -> Batch:
        o = self.o
        length = self.lengths.get(num_pairs, o.length)
        tokens, targets, asked = recall.sequences(
            key,
            kept.shape[0],
            length,
            o.vocab_size,
            num_pairs,
            o.power,
            kept,
            rewrite=o.rewrite,
            shuffled=o.questions == "shuffled",
        )
        return Batch(tokens, targets, asked.astype(jnp.float32))

    def draw(self, key: jax.Array, batch: int, size: int) -> Batch:
        return self._draw(key, jnp.full((batch,), size), size if self.cases else max(size, self.o.num_pairs))

    def draw_training(self, key: jax.Array, batch: int, kind: int = 0) -> Batch:
        pairs = [*self.cases][kind] if self.cases else self.size
        if not self.o.vary_pairs:
            return self.draw(key, batch, pairs)
        key_pairs, key = jax.random.split(key)
        kept = jax.random.randint(key_pairs, (batch,), 1, pairs + 1)
        return self._draw(key, kept, pairs)

    def slices(self, batch: Batch, size: int) -> dict[str, np.ndarray]:
        return recall.slices(batch.tokens, np.asarray(batch.weights) != 0, size)

    def baselines(self) -> dict[str, float]:
        # Without rewrite the values of a sequence differ: there are as many as pairs, where all have the same number.
        values = self.o.vocab_size // 2 if self.o.rewrite or self.cases else self.o.num_pairs
        return {f"one of {values} values at random": 1 / values}

    def summary(self) -> str:
        o = self.o
        pairs = f"1 to {o.num_pairs}" if o.vary_pairs else o.num_pairs
        what = f"{pairs} pairs in {o.length} tokens"
        if self.cases:
            up_to = "1 to " if o.vary_pairs else ""
            shares = [self.turns.count(kind) for kind in range(len(self.cases))]
            share = [f" ({n} of {sum(shares)} steps)" if max(shares) > 1 else "" for n in shares]
            cases = zip(self.cases.items(), share, strict=True)
            what = ", ".join(f"{up_to}{pairs} pairs in {length} tokens{of}" for (pairs, length), of in cases)
        how = ", keys rewritten" if o.rewrite else ""
        how += ", questions shuffled" if o.questions == "shuffled" else ""
        return f"recall of {what}, vocabulary {o.vocab_size}{how}, {o.freshness()}"


class NeedleTask(GeneratedTask[NeedleOptions]):
    """A needle in a haystack; see `needle.hide` and `needle.void_pairs`."""

    label = "accuracy at the question"

    def __init__(self, options: NeedleOptions, batch_size: int, seed: int):
        super().__init__(options, batch_size, seed)
        self.first_value, self.tokens = 0, self.o.noise_tokens
        if self.o.haystack == "text":
            self.data = jnp.asarray(text.load(None).train)
            self.first_value, self.tokens = ord("a"), 256
        self.vocab_size = self.tokens + 2

    def draw(self, key: jax.Array, batch: int, size: int) -> Batch:
        o = self.o
        if o.haystack == "pairs":
            tokens, targets, asked = needle.void_pairs(key, batch, size, o.noise_tokens, o.needle_length)
            return Batch(tokens, targets, asked.astype(jnp.float32))
        key_haystack, key_needle = jax.random.split(key)
        if self.data is None:
            haystack = jax.random.randint(key_haystack, (batch, size), 0, self.tokens)
        else:
            starts = jax.random.randint(key_haystack, (batch, 1), 0, self.data.size - size)
            haystack = self.data[starts + jnp.arange(size)].astype(jnp.int32)
        tokens, targets, asked = needle.hide(
            key_needle,
            haystack,
            o.needle_length,
            self.first_value,
            o.num_values,
            self.tokens,
            self.tokens + 1,
        )
        return Batch(tokens, targets, asked.astype(jnp.float32))

    def baselines(self) -> dict[str, float]:
        # A needle of pairs holds as many values; one of them is right.
        values = self.o.needle_length if self.o.haystack == "pairs" else self.o.num_values
        return {f"one of {values} values at random": 1 / values}

    def summary(self) -> str:
        o = self.o
        if o.haystack == "pairs":
            return f"{o.needle_length} pairs that count in {o.length} tokens of pairs, always fresh"
        return (
            f"{o.needle_length} of {o.num_values} values in {o.length} tokens of {o.haystack}, always fresh"
        )


class SentenceTask(GeneratedTask[SentenceOptions]):
    """A sentence in a long text; see `sentence.hide`. The data are the two parts of the text."""

    label = "accuracy at the digits of the answer"
    axis = "bytes"
    vocab_size = 256

    def __init__(self, options: SentenceOptions, batch_size: int, seed: int):
        super().__init__(options, batch_size, seed)
        o, self.source = self.o, "repeated words"
        if o.haystack == "text":
            longest = max(o.length, *o.test_lengths)
            corpus = text.load(o.data, o.glob, packages=o.packages, length=longest)
            self.data = {"train": jnp.asarray(corpus.train), "held out": jnp.asarray(corpus.val)}
            self.source = corpus.source

    def _draw(self, key: jax.Array, batch: int, size: int, part: str) -> Batch:
        key_haystack, key_sentence = jax.random.split(key)
        if self.o.haystack == "text":
            haystack = sentence.pieces(key_haystack, self.data[part], batch=batch, length=size + 1)
        else:
            haystack = sentence.noise(batch, size + 1)
        tokens, targets, asked = sentence.hide(key_sentence, haystack, value=self.o.value)
        return Batch(tokens, targets, asked.astype(jnp.float32))

    def draw(self, key: jax.Array, batch: int, size: int) -> Batch:
        return self._draw(key, batch, size, "held out")

    def draw_training(self, key: jax.Array, batch: int, kind: int = 0) -> Batch:
        drawn = self._draw(key, batch, self.size, "train")
        return drawn._replace(weights=jnp.maximum(drawn.weights, self.o.text_weight))

    def draw_validation(self, key: jax.Array, batch: int, kind: int = 0) -> Batch:
        return self.draw(key, batch, self.size)

    def baselines(self) -> dict[str, float]:
        digits = len(sentence.DIGITS[self.o.value][1])
        return {f"one of {digits} digits at random": 1 / digits}

    def summary(self) -> str:
        o, (count, _) = self.o, sentence.DIGITS[self.o.value]
        return f"a {o.value} of {count} digits in {o.length} bytes of {self.source}, {o.freshness()}"


def _tracked(tokens: jax.Array, targets: jax.Array, trained: int) -> Batch:
    """Makes a batch in which every prediction counts; in sequences beyond the trained length, those past it."""
    length = tokens.shape[1]
    counts = jnp.arange(length) >= (trained if length > trained else 0)
    return Batch(tokens, targets, jnp.broadcast_to(counts.astype(jnp.float32), tokens.shape))


class ParityTask(GeneratedTask[ParityOptions]):
    """Parity of the bits so far; see `state_tracking.parity`."""

    label = "accuracy of the running parity"
    vocab_size = 2

    def draw(self, key: jax.Array, batch: int, size: int) -> Batch:
        tokens, targets = state_tracking.parity(key, batch, size)
        return _tracked(tokens, targets, self.size)

    def baselines(self) -> dict[str, float]:
        return {"a guess": 0.5}

    def summary(self) -> str:
        return f"parity of {self.size} bits, {self.o.freshness()}"


class PermutationTask(GeneratedTask[PermutationOptions]):
    """Product of the permutations so far; see `state_tracking.words`."""

    label = "accuracy of the running product"

    def __init__(self, options: PermutationOptions, batch_size: int, seed: int):
        super().__init__(options, batch_size, seed)
        group = state_tracking.elements(int(self.o.group[1]))
        group = state_tracking.even(group) if self.o.group == "A5" else group
        letters = state_tracking.swaps(group) if self.o.elements == "swaps" else np.arange(len(group))
        self.letters, self.table = jnp.asarray(letters), jnp.asarray(state_tracking.products(group))
        self.vocab_size = len(group)

    def draw(self, key: jax.Array, batch: int, size: int) -> Batch:
        tokens, targets = state_tracking.words(key, batch, size, self.letters, self.table)
        return _tracked(tokens, targets, self.size)

    def baselines(self) -> dict[str, float]:
        # Swaps change the sign at every token: half of the group can be told apart by counting them.
        return {"a guess": (2 if self.o.elements == "swaps" else 1) / self.vocab_size}

    def summary(self) -> str:
        o = self.o
        return f"products of {self.size} permutations of {o.group} ({o.elements}), {o.freshness()}"


class CopyTask(GeneratedTask[CopyOptions]):
    """Repeating a sequence; see `copying.sequences`."""

    label = "accuracy of the copy"
    backwards = False

    def __init__(self, options: CopyOptions, batch_size: int, seed: int):
        super().__init__(options, batch_size, seed)
        self.vocab_size = self.o.num_tokens + 1

    def draw(self, key: jax.Array, batch: int, size: int) -> Batch:
        tokens, targets, asked = copying.sequences(
            key, batch, size, self.o.num_tokens, backwards=self.backwards
        )
        return Batch(tokens, targets, asked.astype(jnp.float32))

    def baselines(self) -> dict[str, float]:
        return {f"one of {self.o.num_tokens} tokens at random": 1 / self.o.num_tokens}

    def summary(self) -> str:
        how = "backwards, " if self.backwards else ""
        return f"copies of {self.size} tokens of {self.o.num_tokens}, {how}{self.o.freshness()}"


class PalindromeTask(CopyTask):
    """Repeating a sequence backwards; see `copying.sequences`."""

    label = "accuracy of the copy backwards"
    backwards = True


class StackTask(GeneratedTask[StackOptions]):
    """Values on several stacks; see `stacks.sequences`."""

    label = "accuracy of the popped values"

    def __init__(self, options: StackOptions, batch_size: int, seed: int):
        super().__init__(options, batch_size, seed)
        self.vocab_size = self.o.num_tokens + self.o.num_stacks + 2

    def draw(self, key: jax.Array, batch: int, size: int) -> Batch:
        tokens, targets, asked = stacks.sequences(key, batch, size, self.o.num_stacks, self.o.num_tokens)
        counts = _tracked(tokens, targets, self.size)
        return counts._replace(weights=counts.weights * asked)

    def baselines(self) -> dict[str, float]:
        return {f"one of {self.o.num_tokens} values at random": 1 / self.o.num_tokens}

    def summary(self) -> str:
        o = self.o
        return f"{o.num_stacks} stacks of {o.num_tokens} values, {self.size // 3} operations, {o.freshness()}"
