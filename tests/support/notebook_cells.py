"""Cells of notebooks and what they show: in the form that is kept, and compared with that of another machine."""

import ast
import base64
import hashlib
import io
import re
import struct
import zlib

import nbformat
import numpy as np

# Live widgets need a kernel. The picture that `course.sliders` shows with them takes their place in what is kept.
WIDGET = "application/vnd.jupyter.widget-view+json"


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def digest(notebook) -> str:
    """Of the code of a notebook. A full run keeps it, so that code which has changed since is found."""
    code = "\n\n".join(cell.source for cell in code_cells(notebook))
    return hashlib.sha256(code.encode()).hexdigest()


def claims(cell) -> list[str]:
    """Patterns of what the claims of a cell print, in their order: their texts, with any value in each brace."""
    found = []
    for node in ast.walk(ast.parse(cell.source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            call = node.value
            if isinstance(call.func, ast.Name) and call.func.id == "claim":
                text = call.args[0]
                parts = text.values if isinstance(text, ast.JoinedStr) else [text]
                values = (re.escape(x.value) if isinstance(x, ast.Constant) else ".+?" for x in parts)
                found.append((node.lineno, "".join(values)))
    return [pattern for _, pattern in sorted(found)]


def small_png(encoded: str) -> str:
    """The same picture in full colour, pixel for pixel, as the smaller of two files.

    Pillow filters every row, which suits maps. Lines and letters become smaller without a filter, a fifth.
    """
    from PIL import Image

    picture = Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGB")
    out = io.BytesIO()
    picture.save(out, "PNG", optimize=True)
    return base64.b64encode(min(out.getvalue(), unfiltered_png(np.asarray(picture)), key=len)).decode()


def unfiltered_png(pixels: np.ndarray) -> bytes:
    """A PNG of bytes [height, width, 3] whose rows have the filter 0, none."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width, _ = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    rows = np.pad(pixels.reshape(height, -1), ((0, 0), (1, 0)))
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def tidy(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """An executed notebook, small, without what differs from machine to machine or needs a live kernel.

    Its cells are counted from 1, without the one that `run` begins with.
    """
    notebook.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
        "full_run": digest(notebook),
    }
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i:02d}"
        cell.metadata = {}
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            data.pop(WIDGET, None)
            if "image/png" in data:
                data["image/png"] = small_png(data["image/png"])
    for count, cell in enumerate(code_cells(notebook), 1):
        cell.execution_count = count
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = count
    return notebook


def kinds(cell) -> list[tuple]:
    """What a cell shows: the stream or the types of data of each output."""
    return [
        (output.output_type, output.get("name"), *sorted(set(output.get("data", {})) - {WIDGET}))
        for output in cell.outputs
    ]


# Of errors that only rounding makes, and of numbers of which a power of ten is what matters.
SCIENTIFIC = re.compile(r"(?<![\w.])[-+]?\d(?:\.\d+)?e[-+]\d\d")
DECIMAL = re.compile(r"(?<![\w.])[-+]?\d[\d,]*\.\d*")
ROUNDING = 1e-5  # float32: up to this what is off by rounding, from here on what is measured
SMALLEST = 2.0**-52  # of an error that is zero here and not elsewhere


def alike(committed: str, fresh: str) -> bool:
    """Whether two texts differ in nothing but what another machine or version of jax may change in their numbers:
    errors of rounding may be smaller, or ten times as large; other powers of ten twice as large or half; decimals by
    one per cent or by two of their last digit. Whole numbers and words are the same."""
    rest = [DECIMAL.sub("#", SCIENTIFIC.sub("#", text)).split() for text in (committed, fresh)]
    if rest[0] != rest[1]:
        return False
    for a, b in zip(SCIENTIFIC.findall(committed), SCIENTIFIC.findall(fresh), strict=True):
        a, b = abs(float(a)), abs(float(b))
        if not (b <= 10 * max(a, SMALLEST) if a < ROUNDING else a / 2 <= b <= 2 * a):
            return False
    decimals = (DECIMAL.findall(SCIENTIFIC.sub("#", text)) for text in (committed, fresh))
    for a, b in zip(*decimals, strict=True):
        digit = 10.0 ** -len(a.split(".")[1])
        a, b = (float(x.replace(",", "")) for x in (a, b))
        if abs(a - b) > max(2.01 * digit, 0.01 * abs(a)):
            return False
    return True


def printed(cell) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def visible_text(notebook) -> str:
    """Sources and textual outputs, without images."""
    parts = [cell.source for cell in notebook.cells]
    for cell in code_cells(notebook):
        for output in cell.outputs:
            parts.append(output.get("text", ""))
            parts += [str(data) for kind, data in output.get("data", {}).items() if kind != "image/png"]
    return "\n".join(parts)
