"""Options of each task: one frozen dataclass a task, with the checks that need no data.

The docstring of a class is the task's description on the command line, that under a field its help text.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from gdn_jax.commands.errors import RunError, fail, flag
from gdn_jax.commands.fields import Distinct, Later, MayChange, NotNegative, Positive, Range, Repeated


def prompt_bytes(prompt: str) -> bytes:
    """Returns a prompt in UTF-8. Bytes of a command line that are no UTF-8 come as surrogates and leave as they were.

    Raises:
      RunError: it holds other surrogates, which stand for no bytes.
    """
    try:
        return prompt.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        fail("prompt", "text, or bytes of a command line", ascii(prompt))


def prompt_text(prompt: str) -> str:
    """Returns a prompt as text that can be written and printed: bytes that are no UTF-8 become U+FFFD.

    Raises:
      RunError: see `prompt_bytes`.
    """
    return prompt_bytes(prompt).decode(errors="replace")


@dataclasses.dataclass(frozen=True)
class CorpusOptions:
    """A text, a part of which is held out."""

    data: Annotated[Path | None, MayChange] = None
    """File or folder. Without it, the .py files of the running Python's standard library. With --resume: where the
    same text lies now."""
    glob: str = "*"
    """Names of the files read below a folder."""
    packages: bool = False
    """The folder is one of packages: whole packages are held out, and a file that comes again is left out. Without
    --data, the .py files of all packages that are installed beside this one."""


@dataclasses.dataclass(frozen=True)
class TextOptions(CorpusOptions):
    """Next-byte modelling of real text; validated in bits per byte on held-out files."""

    task: ClassVar[str] = "bytes"

    length: Annotated[int, Positive] = 256
    """Bytes of a training sequence, T."""
    test_lengths: Annotated[tuple[int, ...] | None, Distinct, Positive] = None
    """Held-out text is also read in windows of the longest of these, and scored between one length and the next:
    what more context is worth. None: it is not."""
    val_bytes: Annotated[int, Positive] = 131072
    """Held-out bytes scored by a validation, spread evenly over the held-out text."""
    prompt: str = ""
    """Start of the sample, any bytes; empty: the start of a new file."""
    sample_bytes: Annotated[int, Positive] = 600
    """Bytes of the sample."""
    temperature: Annotated[float, NotNegative] = 0.7
    """Temperature of the sample; 0 takes the likeliest byte."""

    def check(self) -> None:
        """Raises RunError naming an option that does not fit the others."""
        prompt_bytes(self.prompt)
        if self.test_lengths is not None and list(self.test_lengths) != sorted(self.test_lengths):
            fail("test_lengths", "ascending lengths", " ".join(map(str, self.test_lengths)))


@dataclasses.dataclass(frozen=True)
class TokensOptions(CorpusOptions):
    """Fine-tuning of a Hugging Face checkpoint on real text, in its own tokens; validated in bits per byte."""

    task: ClassVar[str] = "tokens"

    from_: Annotated[Path | None, MayChange] = None
    """Folder of the checkpoint, whose model and tokenizer the run has. With --resume: where it lies now."""
    lora_rank: Annotated[int | None, Positive] = None
    """Train low-rank changes of this rank, and leave the weights as they are. None: train all weights."""
    lora_projections: Annotated[tuple[str, ...], Distinct] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Projections with such a change, in all layers that have them. Experts have none."""
    length: Annotated[int, Positive] = 256
    """Tokens of a training sequence, T."""
    val_tokens: Annotated[int, Positive] = 32768
    """Held-out tokens scored by a validation, spread evenly over the held-out text."""
    prompt: str = ""
    """Start of the sample; empty: the start of a new text."""
    sample_tokens: Annotated[int, Positive] = 150
    """Tokens of the sample."""
    temperature: Annotated[float, NotNegative] = 0.7
    """Temperature of the sample; 0 takes the likeliest token."""

    def check(self) -> None:
        """Raises RunError naming an option that does not fit the others."""
        prompt_bytes(self.prompt)


@dataclasses.dataclass(frozen=True)
class GeneratedOptions:
    """Sequences drawn at random, as many as are wanted."""

    val_sequences: Annotated[int, Positive] = 512
    """Fresh sequences of a validation, and of a test at one size."""
    train_sequences: Annotated[int | None, Positive] = None
    """Different training sequences (of each of --cases), drawn with replacement. None: every one is fresh."""

    def freshness(self) -> str:
        """Says in words whether training sequences come again."""
        n = self.train_sequences
        return "always fresh" if n is None else f"trained on {n} sequences"

    def check(self) -> None:
        """Raises RunError naming an option that does not fit the others; here all do."""


@dataclasses.dataclass(frozen=True)
class RecallOptions(GeneratedOptions):
    """Multi-query associative recall (Arora et al. 2023, "Zoology"); accuracy on fresh sequences."""

    task: ClassVar[str] = "recall"

    vocab_size: Annotated[int, Positive] = 64
    """Tokens: the first half are keys, the second half values."""
    num_pairs: Annotated[int, Positive] = 8
    """Key-value pairs of a training sequence, each queried once."""
    vary_pairs: bool = False
    """Draw the number of pairs of every training sequence from 1 to --num-pairs; fill takes the place of the rest."""
    rewrite: bool = False
    """Let keys come again with other values: the last value counts."""
    length: Annotated[int, Positive] = 32
    """Tokens of a sequence, even and at least four a pair."""
    power: Annotated[float, Range("a number above 0 and up to 1000", lambda x: 0 < x <= 1000)] = 0.01
    """Exponent a of the gap law p(gap) ~ gap^(a - 1): small is short gaps."""
    questions: Annotated[Literal["gaps", "shuffled"], Later] = "gaps"
    """Order of the questions. gaps: as Zoology's law draws the gaps, pairs written early are mostly asked early;
    shuffled: independent of the order of the pairs, with the same gaps."""
    test_pairs: Annotated[tuple[int, ...], Distinct, Positive] = (2, 4, 8)
    """Numbers of pairs that the trained model is tested with."""
    cases: Annotated[tuple[str, ...] | None, Repeated] = None
    """Lengths and pairs like 64:4 128:8 that take turns from step to step, and that the trained model is tested at.
    One that stands here twice has two turns. They take the place of --length, --num-pairs and --test-pairs."""

    test_cases: Annotated[tuple[str, ...] | None, Distinct] = None
    """Lengths and pairs that the trained model is tested at beside those of --cases."""

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

    def check(self) -> None:
        more = dict(self.parsed_cases("test_cases"))
        if more and (not self.cases or more.keys() & dict(self.parsed_cases()).keys()):
            fail("test_cases", "numbers of pairs beside those of --cases", " ".join(self.test_cases or ()))
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


@dataclasses.dataclass(frozen=True)
class NeedleOptions(GeneratedOptions):
    """A few marked values in a long haystack, asked for at the end; accuracy on fresh sequences."""

    task: ClassVar[str] = "needle"

    haystack: Literal["noise", "text", "pairs"] = "noise"
    """noise: tokens drawn at random; text: pieces of the standard library's .py files, in bytes; pairs: key-value
    pairs that the marker makes void, and a needle of pairs like them."""
    noise_tokens: Annotated[int, Positive] = 32
    """Different tokens of the noise; the values of a needle are among them. Of pairs, half are keys."""
    num_values: Annotated[int, Positive] = 16
    """Different values of a needle (of pairs: all)."""
    needle_length: Annotated[int, Positive] = 2
    """Values (or pairs) of a needle, all of them asked at the end."""
    length: Annotated[int, Positive] = 64
    """Tokens of a training sequence."""
    test_lengths: Annotated[tuple[int, ...], Distinct, Positive] = (64, 128, 256, 512)
    """Lengths that the trained model is tested at."""

    def check(self) -> None:
        pairs = self.haystack == "pairs"
        # marker and values, question and all values but the last; or two marks and the needle's pairs twice
        least = 4 * self.needle_length + 2 if pairs else 2 * self.needle_length + 1
        expected = f"at least {'4 * --needle-length + 2' if pairs else '2 * --needle-length + 1'} = {least}"
        if self.length < least:
            fail("length", expected, self.length)
        if min(self.test_lengths) < least:
            fail("test_lengths", expected, min(self.test_lengths))
        if pairs:
            if self.noise_tokens % 2 or self.noise_tokens < 2 * self.needle_length:
                expected = f"an even number, at least 2 * --needle-length = {2 * self.needle_length}"
                fail("noise_tokens", expected, self.noise_tokens)
            return
        most = 26 if self.haystack == "text" else self.noise_tokens
        if self.num_values > most:
            name = "26 letters" if self.haystack == "text" else f"--noise-tokens = {most}"
            fail("num_values", f"at most {name}", self.num_values)


@dataclasses.dataclass(frozen=True)
class SentenceOptions(GeneratedOptions, CorpusOptions):
    """A sentence in a long text, asked for at the end (Hsieh et al. 2024, "RULER"; S-NIAH 1 to 3), in bytes."""

    task: ClassVar[str] = "sentence"

    haystack: Literal["repeated", "text"] = "repeated"
    """repeated: the same few words over and over; text: pieces of --data, the held-out part of which is for tests."""
    value: Literal["number", "code"] = "number"
    """Answer that the sentence gives: a number of seven digits, or a code of 32 hexadecimal digits."""
    text_weight: Annotated[float, NotNegative] = 0.0
    """Weight in training of every other byte beside the value's: above 0 the model learns to read as well."""
    length: Annotated[int, Positive] = 512
    """Bytes of a training sequence."""
    test_lengths: Annotated[tuple[int, ...], Distinct, Positive] = (512, 1024)
    """Lengths that the trained model is tested at."""

    def check(self) -> None:
        for name, given in (("length", self.length), ("test_lengths", min(self.test_lengths))):
            if given < 256:
                fail(name, "at least 256: the sentence and the question take up to 150 bytes", given)


@dataclasses.dataclass(frozen=True)
class ParityOptions(GeneratedOptions):
    """The parity of the bits so far, after every bit; accuracy on fresh sequences."""

    task: ClassVar[str] = "parity"

    length: Annotated[int, Positive] = 32
    """Bits of a training sequence."""
    test_lengths: Annotated[tuple[int, ...], Distinct, Positive] = (32, 64, 128)
    """Lengths that the trained model is tested at; beyond the training length only bits past it count."""


@dataclasses.dataclass(frozen=True)
class PermutationOptions(GeneratedOptions):
    """The product of the permutations so far (word problem of a group); accuracy on fresh sequences."""

    task: ClassVar[str] = "permutation"

    group: Literal["S3", "A5", "S5"] = "S3"
    """Permutations of three or of five things; A5: the even ones of five."""
    elements: Literal["all", "swaps"] = "all"
    """Tokens of a word: all elements of the group, or those that exchange two things."""
    length: Annotated[int, Positive] = 32
    """Permutations of a training sequence."""
    test_lengths: Annotated[tuple[int, ...], Distinct, Positive] = (32, 64, 128)
    """Lengths that the trained model is tested at; beyond the training length only products past it count."""

    def check(self) -> None:
        """Raises RunError naming an option that does not fit the others."""
        if self.group == "A5" and self.elements == "swaps":
            fail("elements", "all, since no swap is in A5", self.elements)


@dataclasses.dataclass(frozen=True)
class CopyOptions(GeneratedOptions):
    """Repeating a random sequence; accuracy on fresh sequences."""

    task: ClassVar[str] = "copy"

    num_tokens: Annotated[int, Positive] = 32
    """Different tokens to copy."""
    length: Annotated[int, Positive] = 16
    """Tokens to copy; a sequence has twice as many."""
    test_lengths: Annotated[tuple[int, ...], Distinct, Positive] = (8, 16, 32)
    """Numbers of tokens that the trained model is tested with."""


@dataclasses.dataclass(frozen=True)
class PalindromeOptions(CopyOptions):
    """Repeating a random sequence backwards; accuracy on fresh sequences."""

    task: ClassVar[str] = "palindrome"


@dataclasses.dataclass(frozen=True)
class StackOptions(GeneratedOptions):
    """Values pushed on several stacks and popped again; accuracy on fresh sequences."""

    task: ClassVar[str] = "stack"

    num_stacks: Annotated[int, Positive] = 8
    """Stacks, drawn evenly for every operation."""
    num_tokens: Annotated[int, Positive] = 16
    """Different values."""
    length: Annotated[int, Positive] = 96
    """Tokens of a training sequence, three for an operation."""
    test_lengths: Annotated[tuple[int, ...], Distinct, Positive] = (96, 192)
    """Lengths that the trained model is tested at; beyond the training length only pops past it count."""

    def check(self) -> None:
        """Raises RunError naming an option that does not fit the others."""
        for name, given in (("length", (self.length,)), ("test_lengths", self.test_lengths)):
            if wrong := [length for length in given if length % 3 or length < 6]:
                fail(name, "a multiple of 3, at least 6: three tokens for an operation", wrong[0])


TaskOptions = (
    TextOptions
    | TokensOptions
    | RecallOptions
    | NeedleOptions
    | SentenceOptions
    | ParityOptions
    | PermutationOptions
    | CopyOptions
    | StackOptions
)
