"""The smallest sweep: its command, and its options for tests of its parts."""

from gdn_jax.commands import cli
from gdn_jax.sweeps import options as sweep_options
from gdn_jax.training.tasks.state_tracking import ParityOptions

TINY = (
    "--hidden-size 8 --num-layers 1 --num-heads 1 --head-dim 4 --dtype float32 --length 6 --test-lengths 6 9 "
    "--val-sequences 16 --batch-size 8 --steps 5 --seeds 2 --lrs 0.01 0.03 --mixers gated_delta_net mamba2 "
    "--together 2"
).split()
"""The tiny sweep as words of a command."""

CONFIG = {
    "task": "sweep bytes",
    "options": {
        "length": 16, "test_lengths": [8, 24], "val_bytes": 96, "hidden_size": 8, "num_heads": 1, "head_dim": 4,
        "num_layers": 1, "expand_v": 1.0, "implementation": "recurrent", "dtype": "float32", "mixers": ["mamba2"],
        "scales": [2], "lrs": [0.01, 0.03], "seeds": 2, "lr_seeds": 1, "steps": 3, "batch_size": 4,
    },
}  # fmt: skip
"""A configuration file of another one, of text."""


def start(out, *more):
    """Runs the tiny sweep into a folder; its exit status."""
    return cli.main(["sweep", "parity", "--out", str(out), *TINY, *more])


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
