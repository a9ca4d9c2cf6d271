"""What a run shows while it works: a bar on a terminal, plain lines in a file."""

from collections.abc import Sequence

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class SweepReporter:
    """Progress of a sweep on a console: a bar for all runs and one for the group in progress; a context manager."""

    def __init__(self, console: Console, total: int, done: int, steps: int):
        self.console = console
        self._steps = steps
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            speed_estimate_period=600,
            disable=not console.is_terminal,
            transient=True,
        )
        self._all = self._bar.add_task("sweep", total=total * steps, completed=done * steps, unit="steps")
        self._group = self._bar.add_task("compiling", total=steps, unit="steps")
        self._before, self._count = done * steps, 0

    def __enter__(self) -> "SweepReporter":
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def group(self, runs: Sequence[tuple[str, float, int]]) -> None:
        """Begins runs (mixer, learning rate, seed) that advance side by side."""
        self._before += self._count * self._steps
        self._count = len(runs)
        mixer, lr, seed = runs[0]
        name = f"{mixer} lr {lr:g} seed {seed}" if len(runs) == 1 else f"{mixer} x {len(runs)}"
        self._bar.update(self._group, description=name, completed=0)

    def step(self, done: int) -> None:
        """Moves both bars: the runs of the group have made so many steps."""
        self._bar.update(self._group, completed=done)
        self._bar.update(self._all, completed=self._before + done * self._count)

    def done(self, run: tuple[str, float, int], accuracy: float, tests: dict[str, float]) -> None:
        """Prints a line for a finished run."""
        mixer, lr, seed = run
        scores = "  ".join(f"{size}: {value:.3f}" for size, value in tests.items())
        self.console.print(
            f"{mixer:20s} lr {lr:<7g} seed {seed}   validation {accuracy:.3f}   test {scores}",
            highlight=False,
            markup=False,
            soft_wrap=True,
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
