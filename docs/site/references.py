"""Cross-references: a name in code that has an entry in the reference becomes a link, in pages and docstrings."""

import re
from pathlib import Path
from xml.etree.ElementTree import Element

from markdown import Extension, Markdown
from markdown.treeprocessors import Treeprocessor

DIRECTIVE = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)


def entries(folder: Path) -> list[str]:
    """Full names of all that the pages of the reference have."""
    return [name for path in sorted(folder.glob("*.md")) for name in DIRECTIVE.findall(path.read_text())]


def targets(names: list[str]) -> dict[str, str]:
    """Names as texts write them, `name`, `room.name`, `gdn_jax.room.name`, to the entries of the reference.

    Where two entries end alike, the one of `gdn_jax` or of a room comes before that of a module in a room. Two such
    entries are told apart by longer names only.
    """
    found: dict[str, list[str]] = {}
    for entry in sorted(names, key=lambda name: name.count(".")):
        parts = entry.split(".")
        for i in range(len(parts)):
            found.setdefault(".".join(parts[i:]), []).append(entry)
    return {tail: same[0] for tail, same in found.items() if tail == same[0] or _is_plain(same)}


def _is_plain(same: list[str]) -> bool:
    return len(same) == 1 or (same[0].count(".") < 3 <= same[1].count("."))


class CrossReferences(Extension):
    """Adds the links. autorefs finds the pages."""

    def __init__(self, names: dict[str, str]):
        super().__init__()
        self.names = names

    def extendMarkdown(self, md: Markdown) -> None:
        """Registers the processor; Markdown calls this."""
        md.treeprocessors.register(_Links(md, self.names), "gdn_references", 1)


class _Links(Treeprocessor):
    def __init__(self, md: Markdown, names: dict[str, str]):
        super().__init__(md)
        self.names = names

    def run(self, root: Element) -> None:
        self._walk(root)

    def _walk(self, parent: Element) -> None:
        for place, child in enumerate(list(parent)):
            if child.tag in ("a", "pre", "autoref", "h1", "h2", "h3", "h4", "h5", "h6"):
                continue
            if child.tag == "code" and (entry := self.names.get("".join(child.itertext()))):
                link = Element("autoref", {"identifier": entry, "optional": ""})
                link.tail, child.tail = child.tail, None
                parent.remove(child)
                link.append(child)
                parent.insert(place, link)
            else:
                self._walk(child)
