"""Progress of a run: a bar on a terminal, plain lines in a file."""

import time
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Bars:
    """Bars on a terminal, and nothing elsewhere; a context manager.

    Args:
      console: where they are drawn.
      before, behind: formats of what stands at either side of a bar, in rich's mark-up.
      options: of `rich.progress.Progress`.
    """

    def __init__(self, console: Console, before: str, behind: str, **options: Any):
        self.console = console
        self.bars = Progress(
            TextColumn(before),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn(behind),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
            **options,
        )

    def __enter__[B: "Bars"](self: B) -> B:
        self.bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bars.stop()


_EARLY = (1, 10, 20)
"""Steps of a start after each of which a file gets a line: the first validation may be minutes away."""


class Reporter(Bars):
    """Progress of a training loop on a console; a context manager.

    Attributes:
      doing: what the loop is at, in words.
    """

    doing = "compiling and taking the first step"

    def __init__(self, console: Console, steps: int, done: int):
        super().__init__(console, "training", "{task.fields[state]}")
        self._before, self._begin = done, time.monotonic()
        self._task = self.bars.add_task("training", total=steps, completed=done, state="compiling")

    def __enter__(self) -> "Reporter":
        super().__enter__()
        if not self.console.is_terminal:
            self.line("compiling")
        return self

    def step(self, done: int) -> None:
        """Moves the bar; in a file, writes a line after the first steps."""
        self.doing = "finishing the step"
        self.bars.update(self._task, completed=done)
        if not self.console.is_terminal and done - self._before in _EARLY:
            self.line(f"step {done:6d}   {time.monotonic() - self._begin:.0f} s")

    def state(self, loss: float, tokens_per_second: float) -> None:
        """Shows the mean loss since the last call, and the speed."""
        self.bars.update(self._task, state=f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s")

    def line(self, text: str) -> None:
        """Prints a line that stays."""
        self.console.print(text, highlight=False, markup=False)
