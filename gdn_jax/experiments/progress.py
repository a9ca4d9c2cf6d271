"""What a run shows while it works: a bar on a terminal, plain lines in a file."""

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Reporter:
    """Progress of a training loop on a console; a context manager."""

    def __init__(self, console: Console, steps: int, done: int):
        self.console = console
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("training", total=steps, completed=done, state="compiling")

    def __enter__(self) -> "Reporter":
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def step(self, done: int) -> None:
        """Moves the bar."""
        self._bar.update(self._task, completed=done)

    def state(self, loss: float, tokens_per_second: float) -> None:
        """Shows the mean loss since the last call, and the speed."""
        self._bar.update(self._task, state=f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s")

    def line(self, text: str) -> None:
        """Prints a line that stays."""
        self.console.print(text, highlight=False, markup=False)
