"""How the repository becomes the site: which files are pages, and what is done to them. MkDocs calls them."""

import html
import re
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import math_core
from entries import entries, targets
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from references import CrossReferences
from tables import named_cells

import notebooks

ROOT = Path(__file__).parents[2]
PUBLISHED = (
    "*.md",
    "LICENSE",
    "CITATION.cff",
    "docs/**/*.md",
    "docs/**/*.svg",
    "docs/*.png",
    "docs/*.html",
    "docs/site/*.css",
    "docs/site/*.js",
    "notebooks/*",
    "results/**/*.md",
    "results/**/*.png",
)
"""Files of the repository that the site has. README.md is left out: docs/index.md stands in its place."""
EQUATION = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
FONT = "STIXTwoMath-Regular.ttf"
LATEX = math_core.LatexToMathML()
FIRST = "docs/index.md"
"""The first page of the site."""
LOG = "docs/log/"
"""Pages that the search leaves out: they are half of all words, for whoever changes a kernel."""
STATE = "<!-- state.html -->"
"""Where the page shows the state under writes and decay, which is also a page of its own."""


class Published(File):
    """A file of the repository, at the same place on the site but for the folder docs/, which is left out."""

    def is_documentation_page(self) -> bool:
        """Whether it becomes a page: Markdown, and notebooks."""
        return super().is_documentation_page() or self.src_uri.endswith(".ipynb")


def published(config: MkDocsConfig) -> list[File]:
    """Everything that the site has of the repository."""
    names = {
        path.relative_to(ROOT).as_posix()
        for pattern in PUBLISHED
        for path in ROOT.glob(pattern)
        if path.is_file()
    }
    files = [Published(name, str(ROOT), config.site_dir, config.use_directory_urls) for name in sorted(names)]
    return [_moved(file) for file in files if file.src_uri != "README.md"]


def _moved(file: File) -> File:
    file.dest_uri = file.dest_uri.removeprefix("docs/")
    return file


@event_priority(100)  # before the plugins read the list of extensions
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the links to the reference."""
    sys.path.insert(0, str(Path(__file__).parent))  # for griffe_extension.py, which is loaded later
    config.markdown_extensions.append(CrossReferences(targets(entries(ROOT / "docs" / "reference"))))
    return config


@event_priority(100)
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Puts the repository's files in the place of those of docs/, with figures of notebooks and a font."""
    theme = [file for file in files if file.src_dir != config.docs_dir]
    own = published(config)
    drawn = [
        File.generated(config, f"notebooks/{name}", content=content)
        for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
        for name, content in notebooks.figures(path).items()
    ]
    letters = File.generated(config, f"docs/site/{FONT}", content=font())
    _moved(letters)
    return Files([*own, *drawn, letters, *theme])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Gives the first page the whole width, and leaves the log out of the search."""
    if page.file.src_uri == FIRST:  # `is_homepage` is False inside of a part of the menu
        page.meta["hide"] = ["navigation", "toc"]
    if page.file.src_uri.startswith(LOG):
        page.meta["search"] = {"exclude": True}
    return markdown


def font() -> bytes:
    """A font with the measures that MathML needs, which not every device has. The package ziamath brings it."""
    package = Path(find_spec("ziamath").origin).parent
    return (package / "fonts" / FONT).read_bytes()


def on_page_read_source(page: Page, config: MkDocsConfig) -> str | None:
    """Turns a notebook into Markdown."""
    if page.file.src_uri.endswith(".ipynb"):
        return notebooks.page(ROOT / page.file.src_uri)
    return None


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Draws equations as MathML, marks tables of sentences, and puts the state into the page that asks for it."""
    content = named_cells(content)
    content = EQUATION.sub(partial(_equation, page.file.src_uri), content)
    if STATE in content:
        content = content.replace(STATE, state())
    return content


def state() -> str:
    """The part of docs/state.html between its marks."""
    text = (ROOT / "docs" / "state.html").read_text()
    return text.split("<!-- begin -->")[1].split("<!-- end -->")[0]


def _equation(page: str, match: re.Match) -> str:
    """MathML of the TeX that arithmatex has found."""
    tex, is_block = html.unescape(match[3]), match[2] == "["
    try:
        equation = LATEX.convert_with_local_state(tex, displaystyle=is_block)
    except math_core.LatexError as error:
        raise PluginError(f"{page}: no equation: {tex}\n{error}") from error
    return f'<div class="equation">{equation}</div>' if is_block else equation
