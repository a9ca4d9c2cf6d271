"""What the notebooks share: how their figures look, claims, and sliders with a picture for pages without a kernel."""

import base64
import io
import json
import os
from pathlib import Path

import ipywidgets
from IPython.display import display
from matplotlib import pyplot as plt
from matplotlib_inline.backend_inline import set_matplotlib_formats

STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}
FAST = os.environ.get("GDN_NOTEBOOK_FAST") == "1"
SEED = int(os.environ.get("GDN_NOTEBOOK_SEED", "0"))
"""Of the trained models; the runs that are kept have 0."""
FAILED = "does not hold: "


def claim(text: str, holds: bool) -> None:
    """Prints a claim on a trained model, and insists on it unless training was cut short or has another seed."""
    print(text if holds or FAST else FAILED + text)
    assert holds or FAST or SEED, text


def other_seeds(notebook: str, words: str) -> None:
    """Prints which claims of a notebook did not hold in runs with other seeds, and those that have the words."""
    kept = json.loads(Path(__file__).with_name("other_seeds.json").read_text())
    for seed, said in kept.get(notebook, {"seeds": {}})["seeds"].items():
        failed = [text.removeprefix(FAILED) for text in said if text.startswith(FAILED)]
        print(f"seed {seed}: {len(said) - len(failed)} of {len(said)} claims hold")
        for text in (*(f"not: {text}" for text in failed), *(text for text in said if words in text)):
            print(f"    {text}")


def look() -> None:
    """Makes figures of open axes, with twice the pixels for screens of high density unless in haste."""
    if not FAST:
        set_matplotlib_formats("retina")
    plt.rcParams.update(STYLE)


def sliders(draw, *, when_released: bool = False, **controls: ipywidgets.Widget) -> ipywidgets.interactive:
    """Shows controls above the figure that `draw` makes of their values; a page without a kernel shows the picture.

    Args:
      draw: from the values of the controls to a figure.
      when_released: draws when a slider is let go, not on the way: for a figure that takes seconds.
      controls: widgets by the names of draw's arguments.

    Returns:
      The widget. Its `result` is the figure of the present values.
    """
    figure = draw(**{name: control.value for name, control in controls.items()})
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=2 * figure.dpi)
    width, height = (int(figure.dpi * inches) for inches in figure.get_size_inches())
    plt.close(figure)
    for control in controls.values():
        if when_released and hasattr(control, "continuous_update"):
            control.continuous_update = False

    def shown(**values):
        figure = draw(**values)
        plt.show()
        return figure

    widget = ipywidgets.interactive(shown, **controls)
    bundle = widget._repr_mimebundle_()
    bundle |= {
        "text/plain": "Sliders, in a live notebook.",
        "image/png": base64.b64encode(picture.getvalue()).decode(),
    }
    display(bundle, raw=True, metadata={"image/png": {"width": width, "height": height}})
    return widget
