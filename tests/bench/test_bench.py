"""`gdn bench`: the loop over cases, the table, options, sizes on a CPU, errors."""

import dataclasses
import json
import math
import re

import jax
import pytest
from bench_tables import run

from gdn_jax.bench import benchmark, command, measure
from gdn_jax.bench.benchmark import Benchmark, Case, Result
from gdn_jax.bench.measure import Timing
from gdn_jax.bench.table import table
from gdn_jax.commands import cli
from gdn_jax.commands.parsing import Help


def test_table():
    """Markdown: a column for each number, empty where a row has none; what is no text or number is left out."""
    rows = [
        {"name": "a", "ms": 0.25, "errors": {"o": 1}},
        {"name": "bc", "ms": 211700.4, "more": 1e-7, "n": 3},
    ]
    assert table(["name", "of"], rows).splitlines() == [
        "| name |     ms |    more |   n |",
        "| ---- | -----: | ------: | --: |",
        "| a    |   0.25 |         |     |",
        "| bc   | 211700 | 1.0e-07 |   3 |",
    ]


def test_table_on_a_terminal():
    """A column that does not fit follows below with the same keys; keys that do not differ are said once."""
    rows = [{"length": 2**i, "by": "x", **{f"number {j}": 1.0 * j for j in range(12)}} for i in (10, 15)]
    said, *blocks = table(["length", "by"], rows, 80).split("\n\n")
    assert said == "by x" and len(blocks) == 2
    assert max(len(line) for block in blocks for line in block.splitlines()) <= 80
    assert [line.split()[0] for block in blocks for line in block.splitlines()] == [
        "length",
        "1024",
        "32768",
    ] * 2
    cells = " ".join(block.splitlines()[2] for block in blocks).split()
    assert sorted(cells) == sorted(["32768"] * 2 + [str(j) for j in range(12)])
    assert "by" in table(["length", "by"], rows[:1], 80).splitlines()[0]
    assert max(map(len, table(["length"], [{"length": "y" * 90, "ms": 1.0}], 80).splitlines())) > 90


@dataclasses.dataclass(frozen=True)
class Three(Benchmark):
    """Three cases, of which the second runs out of memory and the third is wrong."""

    seen: list = dataclasses.field(default_factory=list)

    def cases(self, note):
        note("seen once")
        for i in range(3):
            yield Case({"case": i}, lambda i=i: self.time(i))

    def time(self, i):
        if i == 1:
            raise MemoryError("too large")
        errors = {"o": 0.1 * i}
        yield Result({"case": i, "half": 1}, Timing(1.0, 0.5, 2.0), {"no": None, "nan": math.nan}, errors)
        failure = benchmark.wrong(errors, {"o": 0.1})
        yield (
            Result({"case": i, "half": 2}, errors=errors, failure=failure) if failure else Result({"case": i})
        )

    def save(self, content, results):
        super().save(content, results)
        self.seen.append(len(json.loads(self.json.read_text())["results"]) if self.json else len(results))


def test_the_loop_over_cases(tmp_path):
    """Results are written and told as they come. One that failed is not in the table and does not lose the others."""
    bench = Three(json=tmp_path / "three.json")
    status, out, progress = run(bench, width=80, force_terminal=True)
    assert status == 1 and bench.seen == [2, 3, 5, 5]
    assert "case 0, half 1: 1 ms (0.5 to 2)" in progress and progress.startswith("python ")
    assert out.splitlines()[-3:] == [
        "seen once",
        "FAILED case 1: raised MemoryError: too large",
        "FAILED case 2, half 2: wrong: o 2.0e-01 > 1.0e-01",
    ]
    assert [line.split() for line in out.splitlines()[:3]] == [
        ["case", "half", "ms", "fastest", "slowest", "error"],
        ["0", "1", "1", "0.5", "2", "0"],
        ["0"],
    ]
    content = json.loads((tmp_path / "three.json").read_text())
    assert content["results"][0] == {
        **{"case": 0, "half": 1, "ms": 1.0, "fastest": 0.5, "slowest": 2.0, "kernels": []},
        **{"error": 0.0, "errors": {"o": 0.0}},
    }
    assert content["results"][-1]["failure"].startswith("wrong: o") and content["notes"] == ["seen once"]
    assert content["options"]["repeats"] == "9" and "jax" in content["versions"]
    status, out, _ = run(Three(max_minutes=1e-9))
    assert status == 1 and "not timed, --max-minutes: case 2" in out


NO_KERNELS = "(the default device is a cpu; the kernels need an NVIDIA GPU)"


@pytest.mark.parametrize(
    "words, message",
    [
        ("rule --heads 2 3", "--heads: expected value heads that are a multiple of the key heads, got 2 3"),
        ("rule --lengths 4 0", "--lengths: expected a number above 0, got 0"),
        ("rule --lengths", "--lengths: expected one value or more, got none"),
        ("rule --width 257", "--width: expected 1 to 256, got 257"),
        ("rule --repeats 0", "--repeats: expected a number above 0, got 0"),
        ("rule --calls 0", "--calls: expected a number above 0, got 0"),
        ("rule --passes", "--passes: expected different values, at least one, got none"),
        ("rule --implementations fast", "fast"),
        (
            "rule --rows 1x --width 8",
            "--rows: expected no --heads, --lengths, --width or --dtype with it, got 1x",
        ),
        ("rule --rows 1x", f"--rows: expected a GPU {NO_KERNELS}, got 1x"),
        ("kernels --variants auto", f"--variants: expected a device for the kernels {NO_KERNELS}, got auto"),
        ("rule --json nowhere/x.json", "--json: expected a file in a folder that exists, got nowhere/x.json"),
        ("decode --batches 0", "--batches: expected a number above 0, got 0"),
        (
            "decode --heads 2 3",
            "--heads: expected a number of value heads that the key heads divide, got 2 3",
        ),
        ("decode --width 300", "--width: expected 1 to 256, got 300"),
        ("decode --implementations triton", "triton"),
        ("decode --tokens 17", "--tokens: expected no more than a ring holds, got 17"),
        ("prefill --tokens 0", "--tokens: expected a number above 0, got 0"),
        ("prefill --tokens 70 --requests 71", "--requests: expected no more than there are tokens, got 71"),
        ("step --lengths 60", "--lengths: expected divisors of --tokens 32768, got 60"),
        ("step --model qwen9", "--model: expected one of tiny, 0.4b, 1.3b, qwen3.5-small"),
        ("step --tokens 0", "--tokens: expected a number above 0, got 0"),
        ("step --options depth=3", "--options: expected fields of ModelConfig"),
        ("step --options remat=some", "--options: expected values that fit"),
        (
            "step --peers jax-linear-attention",
            "--peers: expected libraries that can be timed here, got jax-linear-attention: not installed",
        ),
        ("generate --model qwen9", "--model: expected one of tiny, 0.4b, 1.3b, qwen3.5-small"),
        ("generate --contexts 8 -1", "--contexts: expected a number above 0, got -1"),
        ("generate --prefill -1", "--prefill: expected 0 or more, got -1"),
        ("generate --largest-cache 0", "--largest-cache: expected a number above 0, got 0"),
        ("generate --figure nowhere/x.png", "--figure: expected a file in a folder that exists"),
        (
            f"step --options hidden_size={'9' * 5000}",
            "--options: expected values that fit (",
        ),
        (f"step --options hidden_size={'[' * 100_000}", "--options: expected values that fit ("),
        ("parts --length 60", "--length: expected a divisor of --tokens 65536, got 60"),
        ("parts --only flight", "--only: expected parts of names such as residual sum and RMSNorm"),
        ("scale --mesh data=99", "--mesh: expected at most"),
        ("scale --length 60", "--length: expected a divisor of --step-tokens 32768, got 60"),
        ("scale --kernels", "--kernels: expected a GPU to profile, got cpu"),
        ("scale --xla xla_gpu_x", "--xla: expected options with a value, as in"),
        (
            "walk",
            "expected a benchmark rule, kernels, parts, step, generate, decode, prefill, serve, scale, devices or "
            "all, got walk",
        ),
        ("--width 257", "--width: expected 1 to 256, got 257"),
        (
            "rule --sizez 1x256 2x64 --many",
            "gdn: Unrecognized options: --sizez 1x256 2x64, --many (see gdn bench rule --help)\n",
        ),
        ("--sizes 1x256", "--sizes 1x256 (see gdn bench rule --help)"),
    ],
)
def test_wrong_options_are_one_line(words, message, monkeypatch, capsys):
    """They are told before anything is timed."""
    monkeypatch.setattr(measure, "by_clock", lambda *_, **__: pytest.fail("something was timed"))
    assert cli.main(["bench", *words.split()]) != 0
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_sizes_on_a_cpu(monkeypatch):
    """They are smaller where none is named, and options that fit each other."""
    smaller = {name: cls for name, (cls, _) in command.BENCHMARKS.items() if cls.on_cpu}
    assert {*smaller} == {*command.BENCHMARKS} - {"rule", "kernels"}
    for cls in smaller.values():
        found, words = benchmark.sized(cls(), ["--repeats"] if "repeats" not in cls.on_cpu else [])
        found.check()
        assert dataclasses.asdict(found) == dataclasses.asdict(cls()) | cls.on_cpu
        assert all(f"--{name.replace('_', '-')} " in words for name in cls.on_cpu)
        for name in cls.on_cpu:  # typed, though it be the default
            assert benchmark.sized(cls(), [f"--{name.replace('_', '-')}"]) == (cls(), "")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert benchmark.sized(smaller["step"](), []) == (smaller["step"](), "")


def test_sizes_that_are_typed_stay(monkeypatch):
    """Also by "=", with "_", and where they are the defaults."""
    asked = []
    monkeypatch.setattr(command, "run", lambda bench, *_: asked.append((bench, _[2])) or 0)
    for words in (
        "step",
        "step --repeats 2",
        "step --tokens 32768",
        "step --tokens=32768",
        "step --model 0.4b",
    ):
        assert cli.main(["bench", *words.split()]) == 0
    tokens, notes = ([f(x) for x in asked] for f in (lambda x: x[0].tokens, lambda x: x[1]))
    assert tokens == [2048, 2048, 32768, 32768, 32768]
    assert [len(x) for x in notes] == [1, 1, 0, 0, 0] and "--tokens 2048" in notes[0][0]
    assert cli.main(["bench", "scale", "--step_tokens", "32768"]) == 0 and not asked[-1][1]


def test_help(capsys):
    """A line for each benchmark, as tyro lists them from the modules; one by itself says all, and its options."""
    assert cli.main(["bench", "--help"]) == 0
    quick = dict(re.findall(r"(?m)^  (\w+) +(.*)$", capsys.readouterr().out))
    with pytest.raises(Help):
        command.main(["--help"])
    whole = " ".join(capsys.readouterr().out.split("(default: rule)")[1].split())
    assert dict(re.findall(r"• (\w+) (.*?)(?= •|$)", whole)) == quick and [*quick] == [*command.BENCHMARKS]
    assert cli.main(["bench", "step", "--help"]) == 0
    assert {"--lengths", "--max-minutes", "AdamW"} <= {*capsys.readouterr().out.replace(",", "").split()}
