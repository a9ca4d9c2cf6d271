"""A notebook as a page: its text, its code and the outputs that are kept in it. Nothing is run."""

import base64
import json
import re
from pathlib import Path

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def cells(path: Path) -> list[dict]:
    """The cells of a notebook."""
    return json.loads(path.read_text())["cells"]


def figures(path: Path) -> dict[str, bytes]:
    """PNG files of a notebook's figures by the names that `page` gives them, in the order of the notebook."""
    outputs = [x for cell in cells(path) for x in cell.get("outputs", []) if "image/png" in x.get("data", {})]
    return {
        f"{path.stem}_{number}.png": base64.b64decode("".join(x["data"]["image/png"]))
        for number, x in enumerate(outputs, 1)
    }


def page(path: Path) -> str:
    """The notebook as Markdown.

    Raises:
      ValueError: an output is of a kind that a page cannot show.
    """
    parts, names = [], iter(figures(path))
    for cell in cells(path):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source.replace("$$\n$$", "$$\n\n$$"))  # each equation is a block of its own
        elif source.strip():
            parts.append(_fenced(source, "python"))
        parts += [_output(path, output, names) for output in cell.get("outputs", [])]
    return "\n\n".join(parts) + "\n"


def _output(path: Path, output: dict, names) -> str:
    data = output.get("data", {})
    if output["output_type"] == "stream":
        return _fenced(COLOURS.sub("", "".join(output["text"])), "text")
    if "image/png" in data:
        name = next(names)
        return f"![Figure {name.rpartition('_')[2][:-4]} of this notebook]({name})"
    if "text/plain" in data:
        return _fenced("".join(data["text/plain"]), "text")
    raise ValueError(
        f"{path.name}: no way to show an output of the kinds {sorted(data) or output['output_type']}"
    )


def _fenced(text: str, language: str) -> str:
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 3)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
