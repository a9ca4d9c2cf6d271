"""The weights of a sweep's runs, where --keep-weights asks for them: a file `weights/<run>.npz` for each run."""

from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from gdn_jax.commands.files import replacing
from gdn_jax.models import LanguageModel
from gdn_jax.sweeps import report
from gdn_jax.sweeps.grid import Run
from gdn_jax.sweeps.program import make_model
from gdn_jax.training.runs import RunFolder
from gdn_jax.training.tasks.table import make_task


def path(folder: Path, run: Run) -> Path:
    """Returns the file of a run's weights."""
    return folder / "weights" / ("-".join(f"{value}" for value in run.record().values()) + ".npz")


def save(folder: Path, run: Run, params: PyTree) -> None:
    """Writes the parameters of a run by their names, such as `blocks.0.mixer.q_proj.kernel`."""
    file = path(folder, run)
    file.parent.mkdir(exist_ok=True)
    with replacing(file) as content:
        np.savez(content, **_named(jax.device_get(params)))


def load(folder: Path, run: Run) -> LanguageModel:
    """Makes the model of a finished run of a sweep with --keep-weights.

    Args:
      folder: of the sweep.
      run: as `grid.as_run` makes it of a line of runs.jsonl.

    Raises:
      RunError: there is no such sweep, or its data cannot be read.
      FileNotFoundError: the run has kept no weights.
    """
    options = report.stored_options(RunFolder.open(folder)[1])
    task = make_task(options.task, options.sweep.batch_size, options.sweep.data_seed)
    model = nnx.eval_shape(lambda: make_model(options, task, run.mixer, run.seed, run.scale))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    with np.load(path(folder, run)) as weights:
        leaves = [jax.numpy.asarray(weights[name]) for name in _named(params)]
    return nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(params), leaves), rest)


def _named(params: PyTree) -> dict[str, PyTree]:
    """Returns the leaves by their names."""
    leaves, _ = jax.tree.flatten_with_path(params)
    return {
        jax.tree_util.keystr(where, simple=True, separator=".").removesuffix(".value"): x
        for where, x in leaves
    }
