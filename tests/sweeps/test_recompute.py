"""`results.recompute`: the numbers of the pages by code that shares nothing with what made them."""

import ast
import sys
from pathlib import Path

import pytest

from results.pages.__main__ import PAGES
from results.pages.claims import CLAIMS
from results.recompute import __main__ as recompute
from results.recompute import claims, printed, sentences, tasks

RESULTS = Path(__file__).parents[2] / "results"


def test_every_number_of_the_tables_by_other_code():
    """`results.recompute` shares no code with the pages; here it computes all that they have."""
    imported = {
        name
        for path in (RESULTS / "recompute").iterdir()
        if path.suffix == ".py"
        for x in ast.walk(ast.parse(path.read_text()))
        if isinstance(x, ast.Import | ast.ImportFrom)
        for name in ([x.module or ""] if isinstance(x, ast.ImportFrom) else [y.name for y in x.names])
    }
    others = {name.split(".")[0] for name in imported if not name.startswith("results.recompute")}
    assert others <= sys.stdlib_module_names
    assert recompute.main(["--count", "0"]) == 0
    assert recompute.main(["--count", "20", "--seed", "1"]) == 0
    assert printed.agrees("+0.148", 0.1484) and not printed.agrees("+0.148", 0.1486)
    checked = {where.split(",")[0] for where, _, _ in [*claims.of_claims(), *tasks.of_tasks()]}
    without = {f"claims/{claim.id}.md" for claim in CLAIMS if not claim.comparisons}
    assert checked == {*PAGES} - {"protocol.md", "claims.md"} - without


def test_a_sentence_that_is_gone_or_wrong_is_noticed(monkeypatch):
    gone = {("README.md", r"no such sentence (\d+)"): lambda: [1]}
    monkeypatch.setattr(sentences, "SENTENCES", gone)
    with pytest.raises(AssertionError, match="has no sentence"):
        [*sentences.of_sentences()]
    wrong = {("README.md", r"All of these runs recall all (\d+) pairs"): lambda: [63]}
    monkeypatch.setattr(sentences, "SENTENCES", wrong)
    assert [printed.agrees(said, value) for _, said, value in sentences.of_sentences()] == [False]
    assert recompute.main(["--count", "0"]) == 1
