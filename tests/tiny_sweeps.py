"""Options of the smallest sweep, for tests of its parts."""

from gdn_jax.sweeps import options as sweep_options
from gdn_jax.tasks.options import ParityOptions


def options(**grid):
    """Options of the tiny sweep."""
    model = sweep_options.SizeOptions(
        hidden_size=8,
        num_layers=1,
        num_heads=1,
        head_dim=4,
        expand_v=1.0,
        dtype="float32",
        implementation="recurrent",
    )
    task = ParityOptions(length=6, test_lengths=(6, 9), val_sequences=16)
    grid = {"steps": 5, "batch_size": 8, "seeds": 2, "lrs": (0.01, 0.03)} | grid
    return sweep_options.SweepOptions(task, sweep_options.GridOptions(**grid), model)
