"""Sequences of multi-query associative recall (MQAR).

    k1 v1 k2 v2 ... kn vn | q . . q . q ...      q is one of the keys; its value must be predicted there

Source: Arora et al. 2023, "Zoology". As there: keys and values are disjoint halves of the vocabulary, every
key occurs once in the pairs and is queried once, on even places after them, and the gap between the end of
the pairs and a query follows p(gap) ~ gap^(a - 1), drawn without replacement. Unlike there, the tokens
between queries are values only, so that a small vocabulary never shows a key twice by accident. With `rewrite`, keys
come again with other values and the last one counts: what a state does not erase is in its way.

The first pair gets the gap with the largest `log p + noise`, the next one the largest of the others. So early pairs
have short gaps: the order of the questions is tied to that of the pairs. With `shuffled` it is independent of it.
"""

import dataclasses
from functools import partial
from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key

from gdn_jax.commands.errors import RunError, fail, flag
from gdn_jax.commands.fields import Distinct, Later, Positive, Range, Repeated
from gdn_jax.training.tasks.batch import Batch
from gdn_jax.training.tasks.generated import GeneratedOptions, GeneratedTask


@dataclasses.dataclass(frozen=True)
class RecallOptions(GeneratedOptions):
    """Multi-query associative recall (Arora et al. 2023, "Zoology"); accuracy on fresh sequences."""

    task: ClassVar[str] = "recall"

    vocab_size: Annotated[int, Positive] = 64
    """Size of the vocabulary: the first half are keys, the second half values."""
    num_pairs: Annotated[int, Positive] = 8
    """Number of key-value pairs in a training sequence; each is queried once."""
    vary_pairs: bool = False
    """Draw the number of pairs of every training sequence from 1 to --num-pairs; fill takes the place of the rest."""
    rewrite: bool = False
    """Repeat keys with other values: the last value counts."""
    length: Annotated[int, Positive] = 32
    """Tokens of a sequence: an even number, at least four for each pair."""
    power: Annotated[float, Range("a number above 0 and up to 1000", lambda x: 0 < x <= 1000)] = 0.01
    """Exponent a of the gaps between pair and query, p(gap) ~ gap^(a - 1): a small a makes short gaps."""
    questions: Annotated[Literal["gaps", "shuffled"], Later] = "gaps"
    """Order of the questions. gaps: as Zoology's law draws the gaps, pairs written early are mostly asked early;
    shuffled: independent of the order of the pairs, with the same gaps."""
    test_pairs: Annotated[tuple[int, ...], Distinct, Positive] = (2, 4, 8)
    """Numbers of pairs that the trained model is tested with."""
    cases: Annotated[tuple[str, ...] | None, Repeated] = None
    """Lengths and numbers of pairs, like 64:4 128:8, instead of --length, --num-pairs and --test-pairs. Training
    steps take turns among them; repeat one to give it more turns. The trained model is tested at each."""

    test_cases: Annotated[tuple[str, ...] | None, Distinct] = None
    """More lengths and numbers of pairs to test the trained model at, next to --cases."""

    def parsed_cases(self, name: str = "cases") -> list[tuple[int, int]]:
        """Pairs and length of every one of --cases, or of --test-cases.

        Raises:
          RunError: one of them is no length and pairs, or two have the same number of pairs in different lengths.
        """
        cases: dict[int, int] = {}
        turns = []
        for case in getattr(self, name) or ():
            length, colon, pairs = case.partition(":")
            numbers = all(number.isdecimal() and len(number) < 10 for number in (length, pairs))
            if not (colon and numbers and int(pairs)):
                fail(name, "length and pairs like 64:4", case[:60])
            if cases.setdefault(int(pairs), int(length)) != int(length):
                fail(name, "one length for a number of pairs", " ".join(getattr(self, name)))
            if int(length) < 4 * int(pairs):
                need = f"{pairs} pairs need at least {4 * int(pairs)} tokens"
                raise RunError(f"{flag(name)}: {need}, got {length} in {case}")
            if int(length) % 2:
                fail(name, "an even length", case)
            turns.append((int(pairs), int(length)))
        return turns

    def tests(self) -> dict[int, int]:
        cases = dict(self.parsed_cases() + self.parsed_cases("test_cases"))
        return cases or dict.fromkeys(self.test_pairs, self.length)

    def longest(self) -> int:
        return max((length for _, length in self.parsed_cases()), default=self.length)

    def trained_size(self) -> int:
        return max(dict(self.parsed_cases()), default=self.num_pairs)

    def check(self) -> None:
        more = dict(self.parsed_cases("test_cases"))
        if more and (not self.cases or more.keys() & dict(self.parsed_cases()).keys()):
            fail("test_cases", "numbers of pairs that --cases does not have", " ".join(self.test_cases or ()))
        if cases := more | dict(self.parsed_cases()):
            if self.vocab_size % 2 or self.vocab_size < 2 * (1 if self.rewrite else max(cases)):
                least = 2 if self.rewrite else 2 * max(cases)
                fail("vocab_size", f"an even number, at least {least}", self.vocab_size)
            return
        if self.length % 2:
            fail("length", "an even number", self.length)
        for name, most in (("num_pairs", self.num_pairs), ("test_pairs", max(self.test_pairs))):
            if self.length < 4 * most:
                fail("length", f"at least 4 * --{name.replace('_', '-')} = {4 * most}", self.length)
            if self.vocab_size % 2 or self.vocab_size < 2 * (1 if self.rewrite else most):
                least = "2" if self.rewrite else f"2 * --{name.replace('_', '-')} = {2 * most}"
                fail("vocab_size", f"an even number, at least {least}", self.vocab_size)

    def check_sweep(self, batch_size: int | None) -> None:
        if batch_size is None:
            return
        # Batches of the validation set take the kinds of rows in turn.
        least = (len(dict(self.parsed_cases())) - 1) * batch_size + 1
        if self.val_sequences < least:
            fail("val_sequences", f"at least {least}, a batch of each of --cases", self.val_sequences)


SLICES = 8
"""Parts that the pairs of a sequence are told apart in, at most."""


@partial(jax.jit, static_argnums=(1, 2, 3, 4, 5), static_argnames=("rewrite", "shuffled"))
def sequences(
    key: Key[Array, ""],
    batch: int,
    length: int,
    vocab_size: int,
    num_pairs: int,
    power: float,
    kept: Int[Array, " B"] | None = None,
    *,
    rewrite: bool = False,
    shuffled: bool = False,
) -> tuple[Int[Array, "B T"], Int[Array, "B T"], Bool[Array, "B T"]]:
    """Draws sequences of recall.

    Args:
      key: source of the randomness; the same key gives the same sequences.
      batch, length: B and T; T even, at least 4 * num_pairs.
      vocab_size: even, at least 2 * num_pairs without rewrite; keys are below vocab_size / 2, values from there on.
      num_pairs: pairs, and queries, of a sequence.
      power: exponent a of the gap law, > 0.
      kept: pairs that each sequence keeps, the first of them; the others, and their queries, become fill. All by
        default.
      rewrite: draw keys and values with replacement, and ask each key once, for its last value.
      shuffled: let the queries of the pairs take the drawn gaps in any order, with even chances.

    Returns:
      tokens; targets, the value that belongs to the key at a query (0 elsewhere); and where the queries are.
    """
    half = vocab_size // 2
    slots = length // 2 - num_pairs  # even places after the pairs
    log_law = (power - 1) * jnp.log(jnp.arange(1, slots + 1, dtype=jnp.float32))

    def one(key, kept):
        key_keys, key_values, key_gaps, key_fill = jax.random.split(key, 4)
        if rewrite:
            keys, values = (jax.random.randint(k, (num_pairs,), 0, half) for k in (key_keys, key_values))
        else:
            keys, values = (
                jax.lax.top_k(jax.random.uniform(k, (half,)), num_pairs)[1] for k in (key_keys, key_values)
            )
        values = half + values
        # The largest of log p + Gumbel noise are a draw without replacement.
        gaps = jax.lax.top_k(log_law + jax.random.gumbel(key_gaps, (slots,)), num_pairs)[1]
        if shuffled:
            gaps = jax.random.permutation(jax.random.fold_in(key_gaps, 0), gaps)
        at, pair = 2 * num_pairs + 2 * gaps, jnp.arange(num_pairs)
        here = pair < kept
        # asked for: a pair without a later one of its key
        last = here & ~jnp.any((keys[:, None] == keys) & (pair[:, None] < pair) & here, axis=1)
        tokens = jax.random.randint(key_fill, (length,), half, vocab_size)
        for places, written, where in (
            (2 * pair, keys, here),
            (2 * pair + 1, values, here),
            (at, keys, last),
        ):
            tokens = tokens.at[places].set(jnp.where(where, written, tokens[places]))
        targets = jnp.zeros((length,), tokens.dtype).at[at].set(jnp.where(last, values, 0))
        return tokens, targets, jnp.zeros((length,), bool).at[at].set(last)

    kept = jnp.full((batch,), num_pairs) if kept is None else kept
    return jax.vmap(one)(jax.random.split(key, batch), kept)


def slices(
    tokens: Int[Array | np.ndarray, "B T"], asked: Bool[Array | np.ndarray, "B T"], num_pairs: int
) -> dict[str, Bool[np.ndarray, "S B T"]]:
    """Splits the queries of sequences by the place of their pairs, as written, and by their own order.

    The S = min(num_pairs, SLICES) slices of each are of equal size where S divides the number of pairs.

    Args:
      tokens: of `sequences`.
      asked: where the queries are.
      num_pairs: pairs that each sequence keeps.

    Returns:
      where the queries of each slice are, by "place" and by "order".
    """
    tokens, asked = np.asarray(tokens), np.asarray(asked)
    count, rows = min(num_pairs, SLICES), np.arange(len(tokens))[:, None]
    place = np.zeros((len(tokens), tokens.max() + 1), int)
    place[rows, tokens[:, : 2 * num_pairs : 2]] = np.arange(
        num_pairs
    )  # a key that comes again has its last place
    order = np.cumsum(asked, axis=1) - 1
    found = {
        "place": place[rows, tokens] * count // num_pairs,
        "order": order * count // asked.sum(axis=1, keepdims=True),
    }
    number = np.arange(count)[:, None, None]
    return {name: (at == number) & asked for name, at in found.items()}


class RecallTask(GeneratedTask[RecallOptions]):
    """Multi-query associative recall; see `sequences`."""

    Options = RecallOptions
    training = GeneratedTask.training | {"steps": 800}  # of two seeds, one has learned nothing at 400
    label = "accuracy at the queries"
    axis = "pairs"

    def __init__(self, options: RecallOptions, batch_size: int, seed: int):
        super().__init__(options, batch_size, seed)
        self.vocab_size = options.vocab_size
        pairs = options.parsed_cases()
        self.cases, self.lengths = dict(pairs), options.tests()  # length by pairs
        if pairs:
            self.turns = tuple(self.test_sizes.index(n) for n, _ in pairs)

    def kind_names(self) -> tuple[str, ...]:
        return tuple(map(str, self.cases or (self.size,)))

    def asked(self, kind: int) -> int:
        return [*self.cases][kind] if self.cases else self.size

    def _draw(self, key: jax.Array, kept: jax.Array, num_pairs: int) -> Batch:
        o = self.o
        length = self.lengths.get(num_pairs, o.length)
        tokens, targets, asked = sequences(
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
        return slices(batch.tokens, np.asarray(batch.weights) != 0, size)

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
