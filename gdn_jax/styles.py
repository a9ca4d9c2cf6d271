"""How the project draws: colours, and the look of a rule or a mixer, which is the same in every figure.

Colours are those of Okabe and Ito, and for rules beyond these of Paul Tol, which differ for colour-blind readers;
`COLORS`, and line styles next to them, also survive a print in grey. A rule or a mixer has
its `Style` as a field, and no other has its colour.
"""

from typing import Any, NamedTuple

BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, BLACK, GREY = "#E69F00", "#56B4E9", "#000000", "#777777"
OLIVE, WINE, ROSE, TEAL, INDIGO, BROWN = "#999933", "#882255", "#CC6677", "#44AA99", "#332288", "#7F4F24"
PLUM, MAROON = "#AA4499", "#661100"
COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)


class Style(NamedTuple):
    """Name and look of a rule or a mixer: told apart in grey as well.

    Fields:
      color: one of those above.
      marker, fill: matplotlib's marker and filling of it.
      line: matplotlib's line style.
      label: its name in words.
      words: other words for it in the label of a curve, in lower case; the longest of all styles counts.
    """

    color: str
    marker: str
    fill: str
    line: Any
    label: str
    words: tuple[str, ...] = ()
