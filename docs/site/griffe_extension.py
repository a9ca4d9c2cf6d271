"""Docstrings on their way into the reference. Griffe loads this file; it reads sources and never imports them."""

from typing import Any

from docstrings import to_markdown
from griffe import Extension, Object


class HouseDocstrings(Extension):
    """Changes the text of every docstring that is loaded."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Turns the docstring of one module, class, function or attribute into Markdown."""
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)
