"""Cross-references: a name in code that has an entry in the reference becomes a link, in pages and docstrings."""

from xml.etree.ElementTree import Element

from markdown import Extension, Markdown
from markdown.treeprocessors import Treeprocessor


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
