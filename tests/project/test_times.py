"""The page on performance and the README's table are those of the files of `gdn bench all`."""

import json
import re

import pytest
from release import package
from test_site import load

DOCS = package.ROOT / "docs"
script = load(DOCS / "times.py")


def rule(row, ms, **more):
    return {"part": "forward", "row": row, "pass": "forward", "by": "mosaic_gpu", "ms": ms} | more


def content(kind, **parts):
    versions = {"jax": "0.12", "driver": "580"}
    common = {
        "date": "2026-11-28",
        "versions": versions,
        "libraries": {"torch": "2", "flashinfer-python": "0.7"},
    }
    return {"device": kind, "parts": {name: common | part for name, part in parts.items()}}


@pytest.fixture
def folder(tmp_path):
    """An H200, whose other library is published, and an H100 with one in the same run, which lacks a part."""
    published = {"FlashQLA": 1.265, "FlashInfer": 0.826}
    forward = {
        "results": [
            rule("16,32 1x32768", 0.652, published=published),
            rule("16,32 1024x8", 0.121, lengths="known", published={"FlashInfer": 0.12}),
            rule("16,32 1024x8", 0.125, lengths="traced", published={"FlashInfer": 0.12}),
            {"row": "16,32 1x8192", "pass": "forward", "failure": "wrong"},
        ]
    }
    peers = {"FlashInfer": {"ms": 0.9, "fastest": 0.8, "slowest": 1.0}}
    here = {"results": [rule("16,32 1x32768", 0.7, peers=peers, published=published)]}
    step = {
        "model": "0.4b",
        "results": [{"length": 8192, "ms": 107.61, "tokens/s": 152290.4, "of peak": 0.334}],
    }
    serve = {"model": "0.4b", "results": [{"model": "0.4b", "requests": 32, "ms": 1.5, "loop %": 4.94}]}
    (tmp_path / "h200.json").write_text(json.dumps(content("NVIDIA H200", forward=forward, step=step)))
    (tmp_path / "h100.json").write_text(json.dumps(content("NVIDIA H100", forward=here, serve=serve)))
    return tmp_path


def test_the_pages_are_made():
    for path, text in script.made().items():
        assert path.read_text() == text, "run python docs/times.py"
    assert script.PLACE.search(script.README.read_text())


def test_a_page_has_a_column_for_each_device(folder):
    """A star marks what is published; a result without a time has no row, a part without results no table."""
    text = script.page(script.devices(folder))
    titles = ["How to read the tables", "Forward", "Training a model", "A server under traffic"]
    assert re.findall(r"(?m)^## (.*)$", text) == titles
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows[:4] == [
        "| sequences | H100: ms | H100: other | H100: ratio | H200: ms | H200: other | H200: ratio |",
        "| 1x32768 | 0.7 | 0.9 FlashInfer | 0.78 | 0.652 | 0.826 FlashInfer * | 0.79 |",
        "| 1024x8 |  |  |  | 0.121 | 0.12 FlashInfer * | 1.01 |",
        "| 1024x8 (lengths known only at run time) |  |  |  | 0.125 | 0.12 FlashInfer * | 1.04 |",
    ]
    assert "| 0.4b, rows of 8192 | 107.6 | 152,300 | 33.4 |" in rows
    assert rows[-2:] == [
        "| model | H100: ms a step | H100: loop, % |",
        "| 0.4b, 32 requests | 1.5 | 4.9 |",
    ]
    assert "*H200: NVIDIA H200, 2026-11-28, jax 0.12, driver 580, flashinfer-python 0.7.*" in text


def test_the_readme_has_the_device_with_most_other_libraries(folder, tmp_path):
    lines = script.short(script.devices(folder)).splitlines()
    assert "on an NVIDIA H200, 2026-11-28" in lines[0] and lines[2].startswith("A star marks")
    assert lines[-2:] == [
        "| forward | 1x32768 | 0.652 | 0.826 FlashInfer * | 0.79 |",
        "| forward | 1024x8 | 0.121 | 0.12 FlashInfer * | 1.01 |",
    ]
    assert script.short(script.devices(tmp_path / "none")) is None
    assert "No file of `gdn bench all` is stored" in script.page([])
