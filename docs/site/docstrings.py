"""Docstrings as Markdown: the sections of the house (Args, Returns, Raises, Numerics, Source ...) become lists."""

import re

SECTION = re.compile(
    r"(Args|Attributes|Class attributes|Fields|Initial weights|Memory|Metric|Numerics|Parameters|"
    r"Raises|Returns|Source):(?: (.*))?"
)
ITEM = re.compile(r"( *)((?:\*{0,2}\w+(?:\.\w+)*(?:, )?)+): (.*)")
LISTS = ("Args", "Attributes", "Class attributes", "Fields", "Raises")
"""Sections of which each item has a name."""


def to_markdown(text: str) -> str:
    """A docstring's text, its sections as headings in bold with lists beneath."""
    done, lines = [], text.splitlines()
    while lines:
        line = lines.pop(0)
        section = SECTION.fullmatch(line)
        if not section or not (section[2] or (lines and re.match("  \\S", lines[0]))):
            done.append(escaped(line))
            continue
        body = [section[2] or ""]
        while lines and (lines[0].startswith("  ") or not lines[0]):
            body.append(lines.pop(0))
        done += ["", f"**{section[1]}**", "", *_section(section[1], body), ""]
    return "\n".join(done)


def escaped(line: str) -> str:
    """A line of prose, in which a lone * or _ is no emphasis; code keeps what it is."""
    if line.startswith("    "):
        return line
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(x if x.startswith("`") else _plain(x) for x in parts)


def _plain(text: str) -> str:
    return re.sub(r"([*_|\[\]])", r"\\\1", text).replace("<", "&lt;")


def _section(name: str, body: list[str]) -> list[str]:
    """The lines of a section: what stands behind its name, and a list if it has items."""
    first, rest = body[0], body[1:]
    done = [escaped(first)] if first else []
    in_list = False
    for line in rest:
        item = ITEM.fullmatch(line) if name in LISTS else None
        if item and len(item[1]) == 2:
            done += [] if in_list else [""]
            done.append(f"- `{item[2]}`: {escaped(item[3])}")
            in_list = True
        else:
            done.append(("    " if in_list else "") + escaped(line.strip()) if line.strip() else "")
    return done
