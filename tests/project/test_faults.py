"""The run over known faults: what it prints and keeps, with tests that this file makes up."""

import pytest
from faults import run
from faults.fault import Fault

FAULTS = [
    Fault(name, f"find {name}", "put", f"tests/{name}.py") for name in ("seen", "unseen", "broken", "lost")
]


@pytest.fixture
def ran(monkeypatch, tmp_path):
    """Tests that were run, each with the texts that the copy held then."""
    calls = []

    def copy_of_the_project(folder):
        (folder / "gdn_jax").mkdir(parents=True)
        text = "".join(f"{fault.find}\n" for fault in FAULTS if fault.name != "lost")
        (folder / "gdn_jax" / "all.py").write_text(text)
        return folder

    def pytest_of(copy, *tests):
        held = (copy / "gdn_jax" / "all.py").read_text()
        calls.append((tests, held))
        if "tests/broken.py" in tests:
            return 2, "ModuleNotFoundError: No module named 'x': ERROR tests/broken.py"
        failed = "tests/seen.py" in tests and "find seen" not in held
        return (run.FAILED, "FAILED") if failed else (run.PASSED, "passed")

    monkeypatch.setattr(run, "FAULTS", FAULTS)
    monkeypatch.setattr(run, "copy_of_the_project", copy_of_the_project)
    monkeypatch.setattr(run, "pytest", pytest_of)
    return calls


def test_verdicts_are_kept_as_they_come(ran, tmp_path, capsys):
    """What is not caught is named at the end; what a report has as caught does not run again."""
    report = tmp_path / "report.txt"
    assert run.main([], 1, report) == 1
    lines = report.read_text().splitlines()
    assert [line for line in lines if "\t" in line and not line.startswith(" ")] == [
        "caught\tseen",
        "SURVIVED\tunseen",
        "NOT JUDGED\tbroken",
        "NOT JUDGED\tlost",
    ]
    words = ["SURVIVED\tunseen", "NOT JUDGED\tbroken", "NOT JUDGED\tlost"]
    assert lines[-4].startswith("4 faults (0 caught before), 3 not caught; ")
    assert [line.strip() for line in lines[-3:]] == words
    assert any("No module named 'x'" in line for line in lines) and any(
        "text found 0 times" in x for x in lines
    )
    assert capsys.readouterr().out.splitlines() == [line.replace("\t", "  ") for line in lines]

    before = len(ran)
    assert run.main(["seen"], 1, report) == 1
    again = {tests for tests, _ in ran[before:]}
    assert again == {("tests/unseen.py",)}
    assert "1 faults (1 caught before), 1 not caught; " in report.read_text()
    assert run.main(["broken"], 1) == 1 and len(report.read_text().splitlines()) > len(lines)
