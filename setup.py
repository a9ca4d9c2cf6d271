"""The project's description on a package index: README.md without what points into the repository.

Everything else is in pyproject.toml. An index shows the page elsewhere, where a path such as docs/serve.md leads to
nothing: such a link becomes its text, and such a picture goes.
"""

import re
from pathlib import Path

from setuptools import setup

PATH = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)[^)\s]*\)")
"""A link or a picture of Markdown whose target is a path."""

setup(
    long_description=PATH.sub(lambda found: "" if found[1] else found[2], Path("README.md").read_text()),
    long_description_content_type="text/markdown",
)
