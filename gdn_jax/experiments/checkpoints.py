"""Checkpoints by Orbax: the state of training and a small JSON of what goes with it."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from gdn_jax.commands.errors import RunError


class Checkpoints:
    """Complete checkpoints of a run, the latest `keep` of them.

    Orbax writes a checkpoint under a temporary name and renames it when everything is on disk: one cut
    short by a crash is never listed, and is removed when the run is opened again.
    """

    def __init__(self, folder: Path, keep: int):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

    def latest(self) -> int | None:
        """Step of the latest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, facts: dict[str, Any]) -> None:
        """Writes arrays and facts; returns when they are on disk."""
        saved = ocp.args.Composite(state=ocp.args.StandardSave(state), facts=ocp.args.JsonSave(facts))
        self._manager.save(step, args=saved, force=True)

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """State of a step, in the structure, dtypes and placement of `like`, and its facts.

        Raises:
          RunError: the checkpoint cannot be read or has other arrays.
        """
        wanted = ocp.args.Composite(
            state=ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, like)),
            facts=ocp.args.JsonRestore(),
        )
        try:
            restored = self._manager.restore(step, args=wanted)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise RunError(f"--resume: cannot restore the checkpoint of step {step}: {reason}") from error
        return restored["state"], restored["facts"]

    def close(self) -> None:
        """Releases the threads of Orbax."""
        self._manager.close()
