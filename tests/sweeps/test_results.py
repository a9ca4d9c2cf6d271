"""The pages of results/: they follow from the runs beside them, and so do verdicts, tables and every number."""

import ast
import dataclasses
import functools
import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from gdn_jax.sweeps import grid, report, settings
from gdn_jax.sweeps import options as sweep_options
from results.pages import apart, figures, markdown, verdicts
from results.pages.__main__ import PAGES
from results.pages.claims import CLAIMS
from results.pages.numbers import Numbers, at_least
from results.pages.questions import OWN
from results.pages.stored import HALF, Arm, Results, half_of
from results.pages.verdicts import Comparison, Fails, Gains, OneSeed, Rates

RESULTS = Path(__file__).parents[2] / "results"
ALL = {claim.id: claim for claim in (*CLAIMS, *OWN)}
NUMBER = re.compile(r"(?<![\w.])\d+(?:[.,]\d+)*(?!\w)")


@functools.cache
def runs():
    return Numbers(RESULTS)


@functools.cache
def pages():
    return {name: page(runs()) for name, page in PAGES.items()}


def test_pages_are_what_is_made():
    """`python -m results.pages` makes them; no other page lies there."""
    for name, text in pages().items():
        assert (RESULTS / name).read_text() == text, f"{name}: run python -m results.pages"
    there = {str(path.relative_to(RESULTS)) for path in RESULTS.rglob("*.md")}
    assert there == {*pages(), *runs().tables()}


def test_pages_execute_nothing_that_a_file_of_data_says():
    """A folder of results is data: the scripts that make its pages evaluate no text of it."""
    for path in (RESULTS / "pages").rglob("*.py"):
        calls = [x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.Call)]
        called = {x.func.id for x in calls if isinstance(x.func, ast.Name)}
        assert not called & {"eval", "exec", "compile", "__import__"}, path.name


def test_every_sweep_names_its_commit():
    for name in runs().names:
        commits = {line.get("commit") for line in runs().folder(name)[1]}
        assert all(re.fullmatch(r"[0-9a-f]{7,40}\+?", str(commit)) for commit in commits), name


def test_a_run_outside_a_checkout_names_no_commit(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "runs.jsonl").write_text('{"commit": null}\n{"commit": "0123456789+"}\n{}\n')
    assert Results(tmp_path).commits(".") == ["0123456"]


def test_sweeps_of_an_experiment_are_told_apart(tmp_path):
    folder = tmp_path / "task" / "experiment"
    folder.mkdir(parents=True)
    (folder / "configs.json").write_text('{"b": {"n": 1}, "a": {"n": 2}}')
    (folder / "runs.jsonl").write_text('{"sweep": "a", "seed": 0}\n{"sweep": "b", "seed": 1}\n')
    results = Results(tmp_path)
    assert results.names == ["task/experiment/b", "task/experiment/a"]
    assert results.folder("task/experiment/a") == ({"n": 2}, [{"seed": 0}])
    assert results.places["task/experiment/b"].table == "task/experiment/table.md#b"
    (folder / "runs.jsonl").write_text('{"sweep": "c", "seed": 0}\n')
    with pytest.raises(KeyError, match="'c'"):
        Results(tmp_path)


def test_links_and_figures():
    """Pages link to files that are there, and show every figure that is made for them."""
    link = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
    links = [(name, to) for name, text in pages().items() for to in link.findall(text)]
    missing = [x for x in links if "//" not in x[1] and not (RESULTS / x[0]).parent.joinpath(x[1]).exists()]
    assert not missing
    shown = {
        (RESULTS / name).parent.joinpath(to).resolve().relative_to(RESULTS).as_posix()
        for name, text in pages().items()
        for to in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    }
    assert shown == figures.DRAWN.keys()
    drawn = {path.relative_to(RESULTS).as_posix() for path in (RESULTS / "figures").iterdir()}
    assert drawn == {path for path in shown if path.startswith("figures/")}
    for page in ("README.md", "claims.md"):
        assert {*re.findall(r"\]\(claims/(\w+)\.md\)", pages()[page])} == ALL.keys()


def test_a_finding_can_be_cited():
    """It has a sentence, a question, a figure, what was done, a result, and what would refute it, in this order."""
    parts = pages()["README.md"].split("\n## ")
    found = [part for part in parts if part.startswith("Finding ")]
    assert [part.split(":")[0] for part in found] == [f"Finding {i}" for i in (1, 2, 3, 4)]
    for part in found:
        places = ["\n\n**", "*Question.*", "![", "*What was done.*", "*Result.*", "*What would refute it.*"]
        assert sorted(places, key=part.index) == places
    assert parts.index(found[-1]) < [part.split("\n")[0] for part in parts].index("Reproductions")


@pytest.mark.parametrize("name", ALL)
def test_a_verdict_is_one_of_the_rule(name):
    """It stands in the table of README.md and on the claim's page; a contradiction says what differs."""
    claim, verdict = ALL[name], runs().verdict(ALL[name])
    shared = (verdicts.NOT_TESTED, verdicts.AT_FLOOR)
    own = (verdicts.SHOWN, verdicts.SHOWN_IN_PART, verdicts.NOT_SHOWN, verdicts.OPPOSITE, verdicts.EXPLORATORY,
           verdicts.NOT_CONFIRMED)  # fmt: skip
    theirs = (verdicts.REPRODUCED, verdicts.IN_SIGN, verdicts.UNDECIDED)
    against = (verdicts.CONTRADICTED, verdicts.IN_PART, verdicts.IN_ONE_SEED)
    if verdict.startswith(against):
        assert claim.differs and (claim.same_setting or verdict.endswith(f"another setting: {claim.differs}"))
    else:
        assert verdict in (*shared, *(own if claim.source is None else theirs))
    assert f"Verdict: **{verdict}**." in pages()[f"claims/{name}.md"]
    assert bool(claim.comparisons) == (verdict != verdicts.NOT_TESTED)
    if claim.comparisons:
        [row] = [x for x in pages()["README.md"].splitlines() if x.startswith(f"| [{claim.says}]")]
        assert f" | **{verdict}** | " in row
        assert {*claim.comparisons} == {key for key, _, _ in runs().made(claim)}


def test_what_the_pages_say_of_verdicts():
    """A claim that comes out reversed is no longer undecided, and what nobody learned says so."""
    assert runs().verdict(ALL["mqar"]).startswith(f"{verdicts.IN_ONE_SEED}, another setting: ")
    assert runs().verdict(ALL["fails"]).startswith(verdicts.IN_ONE_SEED)
    [row] = [x for x in pages()["README.md"].splitlines() if x.startswith(f"| [{ALL['product'].says}]")]
    assert row.count("**floor**") == 2
    assert "the first 5: +42" in pages()["README.md"]  # seeds that were added are told
    assert (
        "at the upper edge of 2 and at the lower edge of 2" in pages()["README.md"]
    )  # so are the edges of grids


def test_other_runs_give_other_results():
    """A comparison is of the runs that it names: another mixer, size, scale, start or rate is noticed."""

    def changed(claim, key, at=None, **values):
        comparison = ALL[claim].comparisons[key]
        of = comparison.of._replace(**values)
        return dataclasses.replace(comparison, of=of, at=at or comparison.at).outcome(runs())

    same = changed("parity", "full")
    assert same == runs().outcome("parity.full")
    assert same not in (
        changed("parity", "full", at=256),
        changed("parity", "full", mixer="mamba2"),
        changed("parity", "full", lr=0.001),
    )
    assert changed("depth", "layers", scale=4) != runs().outcome("depth.layers")
    assert changed("start", "DeltaNet", lr=0.003) != runs().outcome("start.DeltaNet")
    assert Comparison("", Arm("none", "kda"), Arm("none", "mamba2"), 8).outcome(runs()) is None


def made(*gains, of=(3, 3), than=(3, 3), **more):
    return Gains(of, than, (math.nan, math.nan), gains, **more)


SURE, SPLIT, AGAINST = made(10.0, 10.1, 9.9), made(1.0, 9.0, 0.5), made(-10.0, -10.1, -9.9)
FLOOR = made(10.0, 10.1, 9.9, at_floor=True)


def one_seed(*pairs, **more):
    return Rates((4, 4), (4, 4), dict(enumerate(pairs)), **more)


BEHIND, AHEAD = one_seed((15, 23), (12, 22)), one_seed((23, 15), (22, 12))


def test_the_rule():
    """Each verdict of a paper's claim, from hand-made outcomes."""
    assert SURE.p < 1e-3 and 0.05 < SPLIT.p and SURE.excludes_zero and not SPLIT.excludes_zero
    rule = functools.partial(verdicts.verdict, same_setting=True, largest_p=0.01)
    other = functools.partial(rule, same_setting=False, differs="other keys")
    assert rule([]) == verdicts.NOT_TESTED
    assert rule([FLOOR, FLOOR]) == verdicts.AT_FLOOR
    assert rule([SURE, SURE]) == rule([SURE, BEHIND]) == verdicts.REPRODUCED
    assert other([SURE]) == verdicts.IN_SIGN
    assert rule([SURE, SPLIT]) == rule([SPLIT]) == verdicts.IN_SIGN
    assert rule([SURE], largest_p=0.0) == verdicts.IN_SIGN  # not after all tests of the pages
    assert rule([AGAINST]) == rule([SPLIT, AGAINST]) == verdicts.CONTRADICTED
    assert other([AGAINST]) == "contradicted in another setting: other keys"
    assert other([SURE, AGAINST]) == "contradicted in part in another setting: other keys"
    assert rule([AGAINST], largest_p=0.0) == verdicts.UNDECIDED
    assert rule([AGAINST._replace(tested=False)]) == verdicts.UNDECIDED
    weak = made(1.0, -0.1, 2.0)
    assert rule([weak]) == rule([made(5.0)]) == rule([SURE, FLOOR]) == rule([AHEAD]) == verdicts.UNDECIDED
    assert other([weak, BEHIND]) == "contradicted in one seed, another setting: other keys"
    assert rule([BEHIND]) == "contradicted in one seed"
    assert rule([BEHIND, AHEAD]) == rule([one_seed((15, 23), (22, 12))]) == verdicts.UNDECIDED
    assert rule([one_seed((15, 23), (12, 22), at_floor=True), weak]) == verdicts.UNDECIDED


def test_the_rule_of_our_own_questions():
    own = functools.partial(verdicts.own_verdict, largest_p=0.01)
    assert own([]) == verdicts.NOT_TESTED and own([FLOOR]) == verdicts.AT_FLOOR
    assert own([SURE, SURE]) == verdicts.SHOWN
    assert own([SURE, SPLIT]) == own([SURE, made(5.0)]) == verdicts.SHOWN_IN_PART
    assert own([AGAINST, SPLIT]) == verdicts.OPPOSITE
    assert own([SURE, AGAINST]) == own([SPLIT]) == own([SURE, made()]) == own([BEHIND]) == verdicts.NOT_SHOWN
    assert own([SURE], post_hoc=True) == verdicts.EXPLORATORY
    again = SPLIT._replace(earlier=(10.0, 10.1, 9.9))
    assert own([again, again]) == verdicts.NOT_CONFIRMED
    assert own([again, SPLIT]) == own([again._replace(earlier=(1.0, 9.0, 0.5))]) == verdicts.NOT_SHOWN


def folder_of(tmp_path, lines, **about):
    """Results of one sweep."""
    facts = {
        "metric": "accuracy",
        "label": "",
        "axis": "",
        "summary": "",
        "baselines": {"a guess": 0.5},
        "answers": 2.0,
    }
    (tmp_path / "config.json").write_text(json.dumps({"about": facts | about}))
    text = "".join(json.dumps({"scale": 1, "lr": 0.1, "val_loss": 0.1} | line) + "\n" for line in lines)
    (tmp_path / "runs.jsonl").write_text(text)
    return Results(tmp_path)


def of_seeds(*scores, mixer, **more):
    return [{"mixer": mixer, "seed": i, "test_accuracy": {"8": x}} | more for i, x in enumerate(scores)]


def test_seeds_that_were_added_are_tested_alone(tmp_path):
    """Three or more; with fewer nothing is tested, and all are shown."""
    lines = of_seeds(0.9, 0.9, 0.8, 0.7, 0.9, mixer="kda") + of_seeds(0.6, 0.6, 0.7, 0.6, 0.7, mixer="mamba2")
    results = folder_of(tmp_path, lines)
    comparison = Comparison("", Arm(".", "kda"), Arm(".", "mamba2"), 8)
    assert len(comparison.outcome(results).gains) == 5
    added = dataclasses.replace(comparison, first=2).outcome(results)
    np.testing.assert_allclose(added.gains, [10, 10, 20])
    np.testing.assert_allclose(added.earlier, [30, 30])
    assert added.tested and added.scores == pytest.approx((80, 200 / 3))
    few = dataclasses.replace(comparison, first=3).outcome(results)
    assert len(few.gains) == 5 and not few.earlier and not few.tested
    assert few.sign(1.0) == 0 and not few.excludes_zero
    assert not dataclasses.replace(comparison, post_hoc=True).outcome(results).tested


def test_rates_of_one_seed_are_no_replicates(tmp_path):
    """Their outcome has every rate and no interval; more seeds are refused; none counts among the tests."""
    lines = [
        {"mixer": mixer, "seed": 0, "lr": lr, "test_accuracy": {"8": x}}
        for mixer, scores in (("kda", (0.6, 0.9)), ("mamba2", (0.8, 0.7)))
        for lr, x in zip((0.1, 0.2), scores, strict=True)
    ]
    results = folder_of(tmp_path, lines)
    comparison = OneSeed("one", Arm(".", "kda"), Arm(".", "mamba2"), 8)
    outcome = comparison.outcome(results)
    assert outcome.scores == {0.1: (60, 80), 0.2: (90, 70)} and outcome.best == (90, 80)
    assert outcome.everywhere == 0 and not hasattr(outcome, "interval")
    assert Fails("", Arm(".", "mamba2"), 8).outcome(results).scores == {0.1: (75, 80), 0.2: (75, 70)}
    results = folder_of(tmp_path, [*lines, lines[0] | {"seed": 1}])
    with pytest.raises(ValueError, match=r"one: expected one seed a rate, got \[0, 1\] at 0.1"):
        comparison.outcome(results)
    tested = [x for x in runs().outcomes.values() if isinstance(x, Gains) and x.tested]
    assert len(runs().tests()) == len(tested) < len(runs().outcomes)
    assert all(isinstance(runs().outcome(f"mqar.Zoology-K{n}"), Rates) for n in (32, 64, 128))


def test_the_floor(tmp_path):
    """A tenth of the way from a guess to 100 %, by the best run of both arms; losses have none."""
    compared = Comparison("", Arm(".", "kda"), Arm(".", "mamba2"), 8)
    for best, floor in ((0.549, True), (0.551, False)):
        lines = of_seeds(0.5, best, mixer="kda") + of_seeds(0.5, 0.5, mixer="mamba2")
        assert compared.outcome(folder_of(tmp_path, lines)).at_floor is floor
    lines = [x | {"test_bpb": {"8": 1.0}, "val_bpb": 1.0} for x in lines]
    results = folder_of(tmp_path, lines, metric="bpb", answers=None)
    assert not compared.outcome(results).at_floor
    assert runs().outcome("product.A5").at_floor and not runs().outcome("product.S3").at_floor


def test_sizes_of_models_are_not_pooled():
    """An arm has runs of one number of parameters."""
    for claim, comparison in ((x, y) for x in ALL.values() for y in x.comparisons.values()):
        for arm in (getattr(comparison, "of", comparison.than), comparison.than):
            assert len({line["parameters"] for line in runs().records(arm).values()}) == 1, (claim.id, arm)


def test_steps_to_half_are_read_between_points():
    curve = {"steps": [10, 20, 30], "accuracy": {"4": [0.1, 0.4, 0.8], "8": [0.9, 0.9, 0.9]}}
    assert half_of(curve) == pytest.approx(22.5)
    assert half_of({"steps": [10], "accuracy": {"4": [None]}}) == math.inf
    wide = runs().compared("wide_half.DeltaNet")
    assert ALL["wide_half"].comparisons["DeltaNet"].at == HALF and min(wide.gains) > 0 and not wide.tested


def test_the_statistics():
    """Student's test and the procedure of Benjamini and Hochberg against printed numbers."""
    np.testing.assert_allclose(
        made(1.0, 2.0, 3.0).p, 0.0741799, rtol=1e-5
    )  # t = 2 sqrt(3), 2 degrees of freedom
    np.testing.assert_allclose(made(1.0, 2.0, 3.0).interval, 4.302653 / 3**0.5, rtol=1e-6)
    assert made(1.0).p is None and made(1.0).interval is None and not made(1.0).excludes_zero
    assert made(2.0, 2.0).p == 0 and made(2.0, 2.0).excludes_zero
    # Benjamini and Hochberg 1995, the example of section 3.2: four of fifteen.
    p = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240, 0.4262, 0.5719, 0.6528,
         0.7590, 1.0]  # fmt: skip
    assert verdicts.threshold(p) == 0.0095
    assert verdicts.threshold([0.04, 0.041, 0.042]) == 0.042  # the largest that passes takes the others along
    assert verdicts.threshold([]) == verdicts.threshold([0.9]) == 0


def test_rates_at_an_edge_are_told(tmp_path):
    """Of the rates that a mixer tried, where the one of the lowest loss lies."""

    def place(*losses, **arm):
        lines = [
            {"mixer": "kda", "seed": 0, "lr": (i + 1) / 10, "val_loss": loss, "test_accuracy": {"8": 1.0}}
            for i, loss in enumerate(losses)
        ]
        results = Numbers.__new__(Numbers)
        results.__dict__ |= folder_of(tmp_path, lines).__dict__
        return results.grid(Arm(".", "kda", **arm))

    assert place(0.1, 0.2, 0.3) == "0.1, at the lower edge of 3"
    assert (
        place(0.2, 0.1, 0.3) == "0.2, inside the 3 tried" and place(0.3, 0.2) == "0.2, at the upper edge of 2"
    )
    assert place(0.3) == "0.1, the only one tried" and place(0.3, 0.2, lr=0.1) == "0.1, fixed"


def test_words_of_numbers():
    assert at_least(99.96, 1) == "at least 99.9" and at_least(87.9) == "at least 87"
    text = """
    One
    line.

    | a |
    | b |
    - c
      d
    - e
    """
    assert markdown.prose(text) == "One line.\n\n| a |\n| b |\n- c d\n- e"


@functools.cache
def facts():
    """Numbers that a text may say without computing them: options of sweeps, chances, numbers of the papers."""
    said = {"0.9", "95", "5", "100", "50"}
    for name in runs().names:
        values = [
            x for v in runs().folder(name)[0]["options"].values() for x in (v if isinstance(v, list) else [v])
        ]
        said |= {f"{x:g}" for x in values if isinstance(x, int | float)}
        said |= {n for x in values if isinstance(x, str) for n in re.findall(r"\d+", x)}
        said |= {f"{100 * x:.{digits}f}" for x in runs().about(name).baselines.values() for digits in (0, 1)}
    sources = [dataclasses.astuple(claim.source) for claim in CLAIMS]
    said |= {n for x in sources for text in x for n in NUMBER.findall(text)}
    return said | {n for name in settings.ENTRIES for n in NUMBER.findall(name)}


def written(tree):
    """The texts of `prose` in a page's script that somebody wrote, without what is computed in them."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "prose":
            [text] = call.args
            parts = text.values if isinstance(text, ast.JoinedStr) else [text]
            yield "".join(x.value if isinstance(x, ast.Constant) else "{}" for x in parts)


def bare(source):
    """Numbers in texts of a page's script that are neither computed nor facts."""
    for text in written(ast.parse(source)):
        text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
        yield from (n for n in NUMBER.findall(text) if n not in facts())


@pytest.mark.parametrize("path", sorted((RESULTS / "pages").rglob("*.py")), ids=lambda path: path.stem)
def test_numbers_in_texts_are_computed_or_are_facts(path):
    source = path.read_text()
    assert [*bare(source)] == []
    assert [*bare(source + '\nprose("It has 87.3 %.")')] == ["87.3"]


FEW_SEEDS = "text_100m", "text_30m", "text_30m_seeds", "recall_mqar_start", "recall_mqar_place_kept"


@pytest.mark.parametrize("path", sorted((RESULTS / "configs").iterdir()), ids=lambda path: path.stem)
def test_configs_fit(path):
    """Every file of options can be used, is of the size that its name says, and is named in the protocol."""
    assert path.stem in pages()["protocol.md"]
    config = json.loads(path.read_text())
    if apart.is_own(config):
        return  # its mixers are those of `results.erase_and_write`, which has tests of its own
    options = settings.from_file(config["task"].split()[1], path, sweep_options.GridOptions())
    sweep_options.check(options)
    finding, size = path.stem.split(".")
    assert options.sweep.size == size
    if finding not in FEW_SEEDS:
        assert options.sweep.seeds >= 3


@pytest.mark.parametrize("name", Results(RESULTS).names)
def test_grids_are_whole(name):
    """No run of the grid is left out, and none is of another grid."""
    config, lines = runs().folder(name)
    if apart.is_own(config):
        return  # see test_erase_and_write.py
    options, about = report.stored_options(config), runs().about(name)
    o = options.sweep
    there = {grid.as_run(x) for x in lines}
    parts = itertools.product(o.mixers, o.scales)
    assert there == {x for part in parts for x in grid.wanted(options, *part, lines, about.metric)}
    assert len(lines) == len(there) == o.runs()


def test_every_run_is_in_a_table():
    """Tables have the sweeps of their folder, each with its figure, and no line of runs.jsonl is of another one."""
    for path, table in runs().tables().items():
        assert (RESULTS / path).read_text() == table, f"{path}: run python -m results.pages"
    drawn = {path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*.png")}
    assert drawn == {place.figure for place in runs().places.values()} | figures.DRAWN.keys()
    lines = sum(len(path.read_text().splitlines()) for path in RESULTS.rglob("runs.jsonl"))
    assert lines == sum(len(runs().folder(name)[1]) for name in runs().names)
