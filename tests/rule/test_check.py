"""`gdn check`: right implementations pass, wrong ones are told by name, and the report is a table."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import gdn_jax
from gdn_jax.checks import cases, check
from gdn_jax.checks.accuracy import NAMES, bound, cancelling
from gdn_jax.commands import cli
from gdn_jax.commands.errors import one_line

SMALL = ("slow-decay", "no-decay")


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(check, "QUICK", SMALL)


def tables(text: str) -> list[list[list[str]]]:
    """The Markdown tables of a report, as rows of cells; the ruler below the header is checked and dropped."""
    found = []
    for part in text.split("\n\n"):
        lines = part.splitlines()
        if all(line.startswith("| ") and line.endswith(" |") for line in lines):
            cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
            assert len({len(row) for row in cells}) == 1, "ragged table"
            assert len({len(line) for line in lines}) == 1, "columns are not aligned"
            assert set("".join(cells.pop(1))) == {"-"}
            found.append(cells)
    return found


@pytest.mark.slow
def test_what_is_printed(small, capsys):
    """A row for every case, dtype and implementation, in the order of its header; a reason for what did not run."""
    assert check.main([]) == 0
    captured = capsys.readouterr()
    text = captured.out
    assert captured.err.splitlines() == [
        "1/4 slow-decay float32", "2/4 no-decay float32", "3/4 slow-decay bfloat16", "4/4 no-decay bfloat16",
    ]  # fmt: skip
    assert text.startswith("### gdn check: ok")
    assert f"jax {jax.__version__}" in text and jax.devices()[0].device_kind in text
    errors, worst = tables(text)
    assert errors[0] == [
        *("case", "dtype", "implementation", "o", "state", "dq", "dk", "dv", "dg", "dbeta", "dh_0", "result")
    ]
    x = jax.tree.map(jnp.asarray, cases.inputs(cases.CASES[SMALL[0]]))
    support = gdn_jax.supported_implementations(**x.arguments)
    runs = [f"`{name}`" for name, reason in support.items() if reason is None]
    for dtype in ("float32", "bfloat16"):
        for name in SMALL:
            group = [row for row in errors[1:] if row[:2] == [name, dtype]]
            assert {row[2] for row in group} >= {*runs, "bound"}
            for row in group:
                limits = [bound(part, dtype, cancelling=name == "no-decay") for part in NAMES]
                values = [float(cell) for cell in row[3:-1]]
                if row[2] == "bound":
                    assert values == limits
                else:
                    assert row[-1] == "ok"
                    assert all(0 <= value <= limit for value, limit in zip(values, limits, strict=True))
    for name, reason in support.items():
        assert reason is None or f"`{name}`, float32: {reason}\n" in text
    # The worst of the table is the largest number of each column.
    chunked = [row for row in errors[1:] if row[1:3] == ["float32", "`chunked`"]]
    line = next(row for row in worst if row[0] == "`chunked`, float32")
    largest = [max(map(float, column)) for column in list(zip(*chunked, strict=True))[3:-1]]
    assert [float(cell) for cell in line[1:]] == largest
    assert [row[0] for row in worst if row[0].startswith("bound")] == [
        "bound, float32", "bound, bfloat16, random keys", "bound, bfloat16, alike keys or no decay",
    ]  # fmt: skip


def slightly_wrong(rule):
    """One output head scaled by 1 + 5e-5 and, with the right values, a gradient of beta that is 1e-3 too large."""

    def broken(q, k, v, g, beta, *args, **options):
        beta = beta + 1e-3 * (beta - jax.lax.stop_gradient(beta))
        o, state = rule(q, k, v, g, beta, *args, **options)
        return o.at[:, :, 1].multiply(1 + 5e-5), state

    return broken


def not_a_number(rule):
    def broken(*args, **options):
        o, state = rule(*args, **options)
        return o, state.at[0, 0, 0, 0].add(jnp.nan)

    return broken


def no_return(rule):
    def broken(*args, **options):
        raise RuntimeError("out of memory, say")

    return broken


@pytest.fixture
def traced_anew():
    """The library keeps what it has traced: one that is broken meanwhile must be traced again, and after it too."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("breaks", "off"),
    [
        pytest.param(slightly_wrong, {"o", "dbeta"}, marks=pytest.mark.slow),
        (not_a_number, {"state"}),
        (no_return, None),
    ],
)
def test_a_broken_implementation_fails(small, traced_anew, monkeypatch, capsys, breaks, off):
    """Exit status 1; its rows say FAIL, the wrong results are in bold, and the others stay ok."""
    monkeypatch.setattr("gdn_jax.rule.chunked.chunked_rule", breaks(gdn_jax.rule.chunked.chunked_rule))
    assert check.main(["--dtypes", "float32"]) == 1
    text = capsys.readouterr().out
    assert text.startswith("### gdn check: FAIL")
    errors = tables(text)[0]
    for row in errors[1:]:
        bold = {name for name, cell in zip(errors[0], row, strict=True) if cell.startswith("**")}
        if row[2] == "`chunked`":
            assert row[-1] == "FAIL" and bold == ({*errors[0][3:-1]} if off is None else off)
        else:
            assert row[-1] in ("ok", "") and not bold
    assert ("raised RuntimeError: out of memory, say" in text) == (off is None)


def test_progress_comes_before_the_work(small, monkeypatch, capsys):
    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "inputs", stop)
    assert cli.main(["check"]) == 130
    captured = capsys.readouterr()
    assert captured.err == "1/4 slow-decay float32\ngdn: interrupted\n" and captured.out == ""


@pytest.mark.parametrize("seed", ["-1", str(2**32)])
@pytest.mark.parametrize("command", ["check", "bench rule"])
def test_seeds_are_checked(command, seed, capsys):
    assert cli.main([*command.split(), "--seed", seed]) == 1
    captured = capsys.readouterr()
    assert captured.err == f"gdn: --seed: expected 0 or more and less than 2**32, got {seed}\n"
    assert captured.out == ""


def test_nothing_compared_is_no_success():
    assert not check.compare((), ("float32",)).ok


@pytest.mark.parametrize("name", check.FULL)
def test_cases(name):
    """Every case that is checked is a call that the library accepts, with inputs as its name says."""
    case = cases.CASES[name]
    x = cases.inputs(case, "bfloat16")
    arguments = jax.tree.map(jnp.asarray, x.arguments)
    shapes = jax.eval_shape(lambda a: gdn_jax.gated_delta_rule(**a, **case.rule_options), arguments)
    assert [y.shape for y in shapes] == [x.do.shape, x.dh_T.shape]
    assert all(y is not None for y in x[:6])  # every result has a column
    alike, never_decays = "correlated" in name, "no-decay" in name
    assert cancelling(x.g, x.k) == (alike or never_decays)
    assert (x.g == 0).all() == never_decays and cancelling(None, x.k)
    assert (x.beta.max() > 1) == ("beta-up-to-2" in name)


def test_an_error_of_no_words_and_of_many_is_one_line():
    assert one_line(AssertionError()) == "AssertionError: "
    assert one_line(ValueError("a\n  b " + 300 * "c")) == f"ValueError: a b {196 * 'c'}"


DOCS = Path(__file__).parents[2] / "docs"


@functools.cache
def stored():
    """The tables of the stored report: its errors and the worst of them, as {words before the numbers: numbers}."""
    rows = [row for part in tables((DOCS / "check.md").read_text()) for row in part[1:]]
    errors = {tuple(row[:3]): [float(x.strip("*")) for x in row[3:-1]] for row in rows if len(row) == 12}
    return errors, {row[0]: row[1:] for row in rows if len(row) == 9}


def test_numbers_of_the_documentation_are_those_of_the_stored_report():
    """The table of docs/accuracy.md and the sentence of the README; the bounds are those of the code."""
    errors, worst = stored()
    lines = re.findall(
        r"(?m)^\| ((?:`chunked`|`recurrent`|bound), .*) \|$", (DOCS / "accuracy.md").read_text()
    )
    assert {label: cells for label, *cells in (line.split(" | ") for line in lines)} == worst
    for label, numbers in worst.items():
        implementation, dtype, kind = (*label.split(", "), "")[:3]
        if implementation == "bound":
            limits = [bound(part, dtype, cancelling=kind.startswith("alike")) for part in NAMES]
            assert [float(x) for x in numbers] == limits, label
            continue
        own = [
            row
            for (name, *which), row in errors.items()
            if which == [dtype, implementation] and kind in ("", kind_of(name))
        ]
        assert [float(x) for x in numbers] == [max(column) for column in zip(*own, strict=True)], label
    said = re.search(
        r"at most (\S+) \(outputs\) and (\S+) \(gradients\) in float32, and (\S+) and (\S+) in bfloat16 with random",
        (DOCS.parent / "README.md").read_text(),
    )
    rows = [[float(x) for x in worst[f"`chunked`, {kind}"]] for kind in ("float32", "bfloat16, random keys")]
    assert [float(x) for x in said.groups()] == [y for row in rows for y in (max(row[:2]), max(row[2:]))]


def kind_of(name: str) -> str:
    """Which of the two bounds of bfloat16 a case has, in the report's words."""
    x = cases.inputs(cases.CASES[name])
    return "alike keys or no decay" if cancelling(x.g, x.k) else "random keys"


@pytest.mark.slow
def test_the_stored_report_is_of_this_code():
    """The two cases that set its numbers for random keys in bfloat16."""
    for row in check.compare(("packed-K128", "l2norm-K96-V192"), ("bfloat16",)).rows:
        for part, now, then in zip(
            NAMES,
            row.errors.values(),
            stored()[0][row.case, row.dtype, f"`{row.implementation}`"],
            strict=True,
        ):
            assert then / 1.5 - 1e-8 <= now <= 1.5 * then + 1e-8, (
                row.case,
                row.dtype,
                row.implementation,
                part,
            )


def test_every_case_of_the_full_check_is_in_the_stored_report():
    assert {name for name, *_ in stored()[0]} == set(check.FULL)
