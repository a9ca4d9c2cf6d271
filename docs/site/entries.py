"""What the reference has, and by which names texts speak of it."""

import re
from pathlib import Path

DIRECTIVE = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)


def entries(folder: Path) -> list[str]:
    """Full names of all that the pages of the reference have."""
    return [name for path in sorted(folder.glob("*.md")) for name in DIRECTIVE.findall(path.read_text())]


def targets(names: list[str]) -> dict[str, str]:
    """Names as texts write them, `name`, `room.name`, `gdn_jax.room.name`, to the entries of the reference.

    Where two entries end alike, the one of `gdn_jax` or of a room comes before that of a module in a room. Two such
    entries are told apart by longer names only, and so are functions of modules that are common words, as `check`.
    """
    found: dict[str, list[str]] = {}
    for entry in sorted(names, key=lambda name: name.count(".")):
        parts = entry.split(".")
        is_word = len(parts) > 3 and parts[-1].isalpha() and parts[-1].islower()
        for i in range(len(parts) - is_word):
            found.setdefault(".".join(parts[i:]), []).append(entry)
    return {tail: same[0] for tail, same in found.items() if tail == same[0] or _is_plain(same)}


def _is_plain(same: list[str]) -> bool:
    return len(same) == 1 or (same[0].count(".") < 3 <= same[1].count("."))
