"""The guides that generate with a model or train one: their code runs, taken from the pages."""

import pytest
from test_guides import run


@pytest.mark.slow
@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("page", ["finetune", "fp8", "generation"])
def test_a_guide_runs(page, tmp_path, monkeypatch):
    """In a folder of its own, as one writes files."""
    monkeypatch.chdir(tmp_path)
    run(page)
