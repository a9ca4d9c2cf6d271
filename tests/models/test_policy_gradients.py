"""The page on policy gradients: its code runs, and the rewards grow as it says."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "policy_gradients.md"


@pytest.mark.slow
def test_the_page_runs():
    """All blocks, one after another; the last one asserts what the rewards are before and after."""
    blocks = re.findall(r"(?ms)^```python\n(.*?)^```$", PAGE.read_text())
    assert len(blocks) == 3 and sum(block.count("\n") for block in blocks) < 110
    exec(compile("\n".join(blocks), str(PAGE), "exec"), {"__name__": "page"})
