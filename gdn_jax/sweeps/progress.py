"""Progress of a sweep: bars on a terminal, plain lines in a file."""

from collections.abc import Sequence

from rich.console import Console

from gdn_jax.sweeps.grid import Run
from gdn_jax.training.progress import Bars


class SweepReporter(Bars):
    """Progress of a sweep on a console: a bar for all runs and one for the group in progress; a context manager."""

    def __init__(self, console: Console, total: int, done: int, steps: int):
        super().__init__(console, "{task.description}", "{task.fields[unit]}", speed_estimate_period=600)
        self._steps = steps
        self._all = self.bars.add_task("sweep", total=total * steps, completed=done * steps, unit="steps")
        self._group = self.bars.add_task("compiling", total=steps, unit="steps")
        self._before, self._count = done * steps, 0
        self._program: tuple[str, int] | None = None  # mixer and scale of the group before

    def group(self, runs: Sequence[Run]) -> None:
        """Begins runs that advance side by side."""
        self._before += self._count * self._steps
        self._count = len(runs)
        mixer, lr, seed, scale, *_ = runs[0]
        name = f"{mixer} lr {lr:g} seed {seed}" if len(runs) == 1 else f"{mixer} x {len(runs)}"
        name += f" scale {scale}" if scale != 1 else ""
        self.bars.update(self._group, description=name, completed=0)
        if not self.console.is_terminal and self._program != (mixer, scale):
            self.console.print(f"{name}: compiling", highlight=False, markup=False, soft_wrap=True)
        self._program = mixer, scale

    def step(self, done: int) -> None:
        """Moves both bars to the number of steps that the runs of the group have made."""
        self.bars.update(self._group, completed=done)
        self.bars.update(self._all, completed=self._before + done * self._count)

    def done(self, run: Run, validation: float | None, tests: dict[str, float | None]) -> None:
        """Prints a line for a finished run; None for a number that is not finite."""
        mixer, lr, seed, scale, *_ = run

        def show(value: float | None) -> str:
            return "diverged" if value is None else f"{value:.3f}"

        scores = "  ".join(f"{size}: {show(value)}" for size, value in tests.items())
        scaled = f" scale {scale}" if scale != 1 else ""
        scaled += "".join(f" {name}" for name in run.start.names())
        self.console.print(
            f"{mixer:20s} lr {lr:<7g} seed {seed}{scaled}   validation {show(validation)}   test {scores}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
