"""`gdn reproduce`: published settings can be run, and put the paper's numbers next to those of the runs."""

import json
import re
from pathlib import Path

import pytest

from gdn_jax.commands import cli
from gdn_jax.commands.errors import RunError
from gdn_jax.sweeps import settings
from gdn_jax.sweeps.reproduce import ReproduceOptions, compared, sweep_of
from gdn_jax.sweeps.settings import ENTRIES, Published
from gdn_jax.training import options as options_lib
from gdn_jax.training.tasks.recall import RecallOptions
from results.pages.claims import CLAIMS

RESULTS = Path(__file__).parents[2] / "results"


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("small", [False, True], ids=["full", "small"])
def test_entries_can_be_run(name, small):
    """Options fit one another; what is put beside the paper's numbers is run and asked for."""
    made, entry = sweep_of(name, ReproduceOptions(small=small)), ENTRIES[name]
    assert made.sweep.size == ("small" if small else "full")
    task, mixers = made.task, {x.mixer for x in entry.published} - {None}
    assert {*made.sweep.mixers} <= mixers if small else {*made.sweep.mixers} >= mixers
    if isinstance(task, RecallOptions):
        asked = {pairs for pairs, _ in [*task.parsed_cases(), *task.parsed_cases("test_cases")]}
        asked |= set() if task.cases else {*task.test_pairs}
    else:
        asked = {*task.test_lengths}
    assert {x.here[small] for x in entry.published} <= asked
    assert made.sweep.runs() <= (4 if small else 60)


def test_numbers_of_papers_stand_in_two_places():
    """A number that the page gives for a paper is one of the setting's, or of what the setting says of it."""
    known = {f"{x.value}" for entry in ENTRIES.values() for x in entry.published if x.value is not None}
    said = " ".join(entry.setting for entry in ENTRIES.values())
    for claim in CLAIMS:
        for number in re.findall(r"\d+\.\d+", claim.source.theirs if claim.comparisons else ""):
            assert number in known or number in said, (claim.id, number)


def test_a_stored_reproduction_goes_on(tmp_path):
    """Its options count where the entry states none: a default of today is none of the setting of that day."""
    name, folder = "2412.06464/table2", tmp_path / "run"
    again = ReproduceOptions(out=folder, resume=True)
    config = json.loads((RESULTS / "needle" / "words" / "configs.json").read_text())["ledger"]
    folder.mkdir()

    def store(**changes):
        changed = config | {"options": config["options"] | changes}
        (folder / "config.json").write_text(json.dumps(changed))

    store()
    made, today = sweep_of(name, again), sweep_of(name, ReproduceOptions())
    stored = config["options"].items()  # what came later has its default
    assert stored <= options_lib.to_json(made).items() and not stored <= options_lib.to_json(today).items()
    assert made.sweep.resume and made.sweep.out == folder
    store(steps=500)
    with pytest.raises(RunError, match="--steps: expected 500 as in the run to resume, got 2000"):
        sweep_of(name, again)
    store()
    with pytest.raises(RunError, match="--val-sequences: expected 256 as in the run to resume"):
        sweep_of(name, ReproduceOptions(out=folder, resume=True, small=True))
    with pytest.raises(RunError, match="expected a run of the task sweep recall, got sweep sentence"):
        sweep_of("2312.04927/mqar", again)


@pytest.mark.slow
def test_an_entry(tmp_path, monkeypatch, capsys):
    """The smallest of all: what is printed is of the runs, and running it again goes on."""
    tiny = ENTRIES["2411.12537/parity"]._replace(
        small={
            "length": 6, "test_lengths": [6, 9], "val_sequences": 16, "steps": 5, "batch_size": 8, "seeds": 2,
            "lrs": [0.01, 0.03], "mixers": ["mamba2"], "together": 4, "hidden_size": 8, "num_heads": 1, "head_dim": 4,
        },
        published=(
            Published("Mamba", "40", (9, 9), 51.5, "mamba2"),
            Published("another", "40", (9, 9)),
            Published("DeltaNet", "40", (9, 9), None, "delta_net"),
        ),
        best_run=True,
    )  # fmt: skip
    monkeypatch.setitem(settings.ENTRIES, "tiny/one", tiny)
    monkeypatch.setenv("COLUMNS", "200")
    words = ["reproduce", "tiny/one", "--small", "--out", str(tmp_path / "run")]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "run" / "runs.jsonl").read_text().splitlines()]
    score = max(line["test_accuracy"]["9"] for line in lines)
    [row] = [line for line in out.splitlines() if re.match(" *Mamba ", line)]
    cells = row.split()
    assert len(lines) == 4
    assert cells[:5] == ["Mamba", "51.5", "40", "1", f"{100 * score:.1f}"]
    assert re.search(r"[012] of 2 +9 tokens", row)
    assert re.search(r"another +not confirmed +40 +no such mixer", out), out
    assert re.search(r"DeltaNet +not confirmed +40 +not run", out)
    assert "Grazzi et al.: rows of 3 to 40 bits" in out and (tmp_path / "run" / "table.md").exists()
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    by_loss = sorted(lines, key=lambda line: line["val_loss"])
    by_loss[0]["val_loss"] = None  # one that has diverged is not the best one
    [shown, *_] = compared(tiny._replace(best_run=False), config, lines, small=True).columns[4].cells
    assert shown == f"{100 * by_loss[1]['test_accuracy']['9']:.1f}"
    assert cli.main([*words, "--resume"]) == 0 and row in capsys.readouterr().out
    assert cli.main(["reproduce", "2411.12537/parity", *words[2:], "--resume"]) == 1
    assert "as in the run to resume" in capsys.readouterr().err


def test_what_there_is(capsys):
    assert cli.main(["reproduce"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.split("  ")[-1].strip() == "paper's numbers known"
    claims = [ENTRIES[line.split()[0]].claim for line in lines]  # one line for each, which is not broken
    assert len(claims) == len(ENTRIES) and all(x in y for x, y in zip(claims, lines, strict=True))
    assert cli.main(["reproduce", "2412.06464/table4"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("gdn reproduce: expected one of 2312.04927/mqar, ")
    assert cli.main(["reproduce", "--small"]) == 2
    assert "expected the entry before the options, got --small" in capsys.readouterr().err
    assert cli.main(["reproduce", "2412.06464/table2", "--max-minutes", "-1"]) == 1
