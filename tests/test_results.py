"""The page of findings: numbers, verdicts and pages follow from the runs beside them, and tables from their runs."""

import copy
import functools
import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from gdn_jax.findings import claims, verdicts
from gdn_jax.findings.ledger import LEDGER
from gdn_jax.findings.pages import Pages
from gdn_jax.findings.records import Results
from gdn_jax.findings.verdicts import Outcome
from gdn_jax.findings.words import PLACE
from gdn_jax.sweeps import grid, report
from gdn_jax.sweeps import options as sweep_options

RESULTS = Path(__file__).parent.parent / "results"
RUNS = Results(RESULTS)
CONTENT = json.loads((RESULTS / "claims.json").read_text())
CLAIMS = {claim["id"]: claim for claim in CONTENT["claims"]}
COMPARED = [name for name, claim in CLAIMS.items() if any(x["result"] for x in claim["comparisons"])]
NUMBER = re.compile(r"(?<![\w.])\d+(?:[.,]\d+)*(?!\w)")
MOST_WORDS = 1100


@functools.cache
def outcomes():
    return claims.outcomes(RUNS, CONTENT)


@functools.cache
def recomputed():
    return {claim["id"]: claim for claim in claims.refresh(RUNS, CONTENT)["claims"]}


@functools.cache
def pages():
    return Pages(RUNS, CONTENT).all()


def test_pages_are_what_is_generated():
    """`python -m gdn_jax.findings` makes them; no other page lies there."""
    for name, text in pages().items():
        assert (RESULTS / name).read_text() == text, f"{name}: run python -m gdn_jax.findings"
    there = {str(path.relative_to(RESULTS)) for path in RESULTS.rglob("*.md")}
    assert there == {*pages(), *RUNS.tables()}


def test_every_sweep_names_its_commit():
    for name in RUNS.names:
        commits = {line.get("commit") for line in RUNS.folder(name)[1]}
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


def test_the_page_is_short():
    page = pages()["README.md"]
    assert len(page.split()) <= MOST_WORDS
    figures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page)
    assert len(figures) == len({*figures}) == len(CONTENT["cards"]) <= 6
    assert {path.name for path in (RESULTS / "figures").iterdir()} == {Path(path).name for path in figures}
    link = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
    links = [(name, to) for name, text in pages().items() for to in link.findall(text)]
    missing = [x for x in links if "//" not in x[1] and not (RESULTS / x[0]).parent.joinpath(x[1]).exists()]
    assert not missing


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_follows_from_its_runs(name):
    """Every result of its comparisons, and its verdict by the rule."""
    assert CLAIMS[name] == recomputed()[name]
    claim = CLAIMS[name]
    own = claim["source"] is None and name in COMPARED
    assert claim["verdict"] in (verdicts.OWN_VERDICTS if own else verdicts.VERDICTS)
    assert (
        own or claim["source"] is None or {*claim["source"]} == {"paper", "url", "where", "theirs", "setting"}
    )
    assert claim["comparisons"] or claim["verdict"] == verdicts.NOT_TESTED


def wrong(content):
    """Names of claims that are not what their runs give."""
    good = {claim["id"]: claim for claim in claims.refresh(RUNS, content)["claims"]}
    return [claim["id"] for claim in content["claims"] if claim != good[claim["id"]]]


@pytest.mark.parametrize("name", COMPARED)
def test_a_changed_number_interval_or_verdict_is_noticed(name, monkeypatch):
    """In the claims and, where the page shows it, in the page; nothing but the changed claim is called wrong."""
    good = outcomes()  # no change below touches what is compared
    monkeypatch.setattr(claims, "outcomes", lambda *_: good)
    results = [x["result"] for x in CLAIMS[name]["comparisons"] if x["result"]]
    changes = [("verdict", x) for x in verdicts.VERDICTS if x != CLAIMS[name]["verdict"]]
    changes += [(key, results[0][key]) for key in results[0]]
    for key, value in changes:
        content = copy.deepcopy(CONTENT)
        [claim] = [claim for claim in content["claims"] if claim["id"] == name]
        place = claim if key == "verdict" else next(x["result"] for x in claim["comparisons"] if x["result"])
        if key == "learned":
            value = ["9 of 9", value[1]]
        elif key != "verdict":
            value = [1.01 * x + 0.01 for x in value] if isinstance(value, list) else 1.01 * value + 0.01
        place[key] = value
        assert wrong(content) == [name], key
    [row] = [
        line for line in pages()["README.md"].splitlines() if line.startswith(f"| {CLAIMS[name]['claim']} |")
    ]
    assert f"**{CLAIMS[name]['verdict']}** |" in row
    for outcome in (good[f"{name}.{x['name']}"] for x in CLAIMS[name]["comparisons"] if x["result"]):
        assert f"({outcome.of[0]}/{outcome.of[1]}:{outcome.than[0]}/{outcome.than[1]})" in row


def test_other_runs_give_other_results():
    """A comparison is of the runs that it names: another mixer, size, scale or rate is noticed."""

    def changed(claim, **values):
        content = {"claims": [copy.deepcopy(CLAIMS[claim])]}
        comparison = content["claims"][0]["comparisons"][0]
        comparison.update({k: v for k, v in values.items() if k == "at"})
        comparison["of"].update({k: v for k, v in values.items() if k != "at"})
        return claims.refresh(RUNS, content)["claims"][0]["comparisons"][0]["result"]

    same = changed("parity")
    assert same == CLAIMS["parity"]["comparisons"][0]["result"]
    assert same not in (
        changed("parity", at=256),
        changed("parity", mixer="mamba2"),
        changed("parity", lr=0.001),
    )
    assert changed("depth", scale=4) != CLAIMS["depth"]["comparisons"][0]["result"]
    assert changed("start", start=0.25) != CLAIMS["start"]["comparisons"][0]["result"]


def made(*gains, of=(3, 3), than=(3, 3)):
    return Outcome(of, than, (math.nan, math.nan), gains)


def test_the_rule():
    """Each verdict, from hand-made outcomes."""
    sure, split = made(10.0, 10.1, 9.9), made(1.0, 9.0, 0.5)
    assert sure.p < 1e-3 and 0.05 < split.p and sure.excludes_zero and not split.excludes_zero
    rule = functools.partial(verdicts.verdict, same_setting=True, largest_p=0.01)
    assert rule([]) == verdicts.NOT_TESTED
    assert rule([made(of=(0, 3), than=(0, 3))]) == verdicts.NOT_LEARNED
    assert rule([sure, sure]) == verdicts.REPRODUCED
    assert rule([sure], same_setting=False) == verdicts.IN_SIGN
    assert rule([sure, split]) == rule([split]) == verdicts.IN_SIGN
    assert rule([sure], largest_p=0.0) == verdicts.IN_SIGN  # not after all comparisons of the page
    against = made(-10.0, -10.1, -9.9)
    assert rule([against]) == rule([sure, against]) == verdicts.SAYS_LITTLE
    assert rule([made(1.0, -0.1, 2.0)]) == rule([made(5.0)]) == rule([made(of=(1, 3), than=(0, 3))])
    assert rule([made(5.0)]) == verdicts.SAYS_LITTLE
    own = functools.partial(verdicts.own_verdict, largest_p=0.01)
    assert own([]) == verdicts.NOT_TESTED
    assert own([sure, sure]) == verdicts.SHOWN
    assert own([sure, split]) == own([sure, made(5.0)]) == verdicts.SHOWN_IN_PART
    assert own([sure, against]) == own([split]) == own([sure, made()]) == verdicts.NOT_SHOWN


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


@functools.cache
def facts():
    """Numbers that a text may say without computing them: options of sweeps, chances, numbers of the papers."""
    said = {"0.9", "95", "5"}
    for name in RUNS.names:
        values = [
            x for v in RUNS.folder(name)[0]["options"].values() for x in (v if isinstance(v, list) else [v])
        ]
        said |= {f"{x:g}" for x in values if isinstance(x, int | float)}
        said |= {n for x in values if isinstance(x, str) for n in re.findall(r"\d+", x)}
        said |= {f"{100 * x:.{digits}f}" for x in RUNS.about(name).baselines.values() for digits in (0, 1)}
    sources = [claim["source"] for claim in CONTENT["claims"] if claim["source"]]
    said |= {n for x in sources for text in (*x.values(),) for n in NUMBER.findall(text)}
    return said | {n for name in LEDGER for n in NUMBER.findall(name)}


def texts(content):
    """Every text of claims.json that somebody wrote, but claims and sources."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict | list):
        for x in content.values() if isinstance(content, dict) else content:
            yield from texts(x)


def bare(content):
    """Numbers in texts that are neither computed nor facts."""
    parts = [content["page"], content["protocol"], *(task["blocks"] for task in content["tasks"].values())]
    parts += [[card[k] for k in ("see", "caveat", "picture", "question")] for card in content["cards"]]
    for text in texts(parts):
        text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", PLACE.sub("", text))
        yield from (n for n in NUMBER.findall(text) if n not in facts())


def test_numbers_in_texts_are_computed_or_are_facts():
    assert [*bare(CONTENT)] == []
    content = copy.deepcopy(CONTENT)
    content["cards"][0]["see"][0] += " It has 87.3 %."
    assert [*bare(content)] == ["87.3"]


def test_places_say_what_is_wrong():
    words = Pages(RUNS, CONTENT).words
    assert (
        words.fill("{= 2 / 3 | 2} {at least 99.96 | 1} {at most 0.21 | 1}")
        == "0.67 at least 99.9 at most 0.3"
    )
    with pytest.raises(ValueError, match=r"seeds.*KeyError"):
        words.fill("{= min(seeds('parity/full_far', 'delta_net', 3)) | 0}")
    with pytest.raises(ValueError, match=r"\[1\] \+ \[2\]\}: TypeError"):
        words.fill("{= [1] + [2] | 0}")
    with pytest.raises(ValueError, match="NameError"):
        words.fill("{= open('x')}")


@pytest.mark.parametrize("path", sorted((RESULTS / "configs").iterdir()), ids=lambda path: path.stem)
def test_configs_fit(path):
    """Every file of options can be used, is of the size that its name says, and is named in the protocol."""
    options = sweep_options.from_file(
        json.loads(path.read_text())["task"].split()[1], path, sweep_options.GridOptions()
    )
    sweep_options.check(options)
    finding, size = path.stem.split(".")
    assert options.sweep.size == size
    assert path.stem in pages()["protocol.md"]
    if finding not in ("text_100m", "text_30m", "text_30m_seeds", "recall_mqar_start"):
        assert options.sweep.seeds >= 3


@pytest.mark.parametrize("name", RUNS.names)
def test_grids_are_whole(name):
    """No run of the grid is left out, and none is of another grid."""
    config, lines = RUNS.folder(name)
    options, about = report.stored_options(config), RUNS.about(name)
    o = options.sweep
    runs = {grid.as_run(x) for x in lines}
    parts = itertools.product(o.mixers, o.scales)
    assert runs == {x for part in parts for x in grid.wanted(options, *part, lines, about.metric)}
    assert len(lines) == len(runs) == grid.count(options)


def test_every_run_is_in_a_table():
    """Tables have the sweeps of their folder, each with its figure, and no line of runs.jsonl is of another one."""
    for path, table in RUNS.tables().items():
        assert (RESULTS / path).read_text() == table, f"{path}: run python -m gdn_jax.findings"
    for place in RUNS.places.values():
        assert (RESULTS / place.figure).exists()
    lines = sum(len(path.read_text().splitlines()) for path in RESULTS.rglob("runs.jsonl"))
    assert lines == sum(len(RUNS.folder(name)[1]) for name in RUNS.names)
