"""Checkpoints by Orbax: the state of training and a small JSON of what goes with it."""

import contextlib
import gc
import glob
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from gdn_jax.commands.errors import RunError, one_line, out_of_memory
from gdn_jax.commands.files import parse_json, read_file
from gdn_jax.training.runs import RunFolder


class Restored(NamedTuple):
    """A checkpoint that was read.

    Fields:
      step: optimiser steps that led to it.
      state: arrays of the training.
      facts: the JSON object that was saved with them.
      damaged: later checkpoints that could not be read, by step, with the reason.
    """

    step: int
    state: Any
    facts: dict[str, Any]
    damaged: dict[int, str]


class Checkpoints:
    """Complete checkpoints of a run, the latest `keep` of them.

    Orbax writes a checkpoint under a temporary name and renames it when everything is on disk: one cut
    short by a crash is never listed, and is removed when the run is opened again.

    Args:
      run: the folder whose `checkpoints` they are.
      keep: how many; None: they are only read, and the run may be at work.
    """

    def __init__(self, run: RunFolder, keep: int | None):
        self._folder, self._damaged = run.checkpoints.resolve(), run.damaged
        self._keep, self._reads = keep, keep is None
        if not self._reads:
            self._folder.mkdir(exist_ok=True)
            self._remove_unfinished()
        _check_metadata(self._folder)
        self._alias = _Alias(self._folder)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=None,  # an older checkpoint goes when the new one has been looked at
            enable_async_checkpointing=False,
            cleanup_tmp_directories=False,  # it would be done by a thread that may outlive the link
            create=False,
            read_only=self._reads,
            save_interval_steps=0 if self._reads else 1,
        )
        manager, failure = _attempt(lambda: ocp.CheckpointManager(self._alias.path, options=options))
        if failure is not None:
            self._alias.remove()
            raise OSError(f"cannot open {self._folder}: {failure}")
        self._manager: ocp.CheckpointManager = manager

    def latest(self) -> int | None:
        """Returns the step of the latest complete checkpoint, None without any."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, facts: dict[str, Any]) -> None:
        """Writes arrays and facts; returns when they are on disk, can be found again, and older ones are gone.

        Raises:
          OSError: they cannot be written, or what was written lacks something; every older checkpoint is kept.
        """
        saved = ocp.args.Composite(
            state=ocp.args.StandardSave(state), facts=ocp.args.JsonSave(facts | {"digest": _digest(state)})
        )

        def save() -> None:
            self._manager.save(step, args=saved, force=True)
            self._check_whole(step, state)
            for old in sorted(self._manager.all_steps())[: -(self._keep or 0)]:
                self._manager.delete(old)

        _, failure = _attempt(save)
        if failure is not None:
            raise OSError(f"cannot write the checkpoint of step {step}: {failure}")

    def restore(self, like: Any) -> Restored | None:
        """Reads the latest whole checkpoint in the structure, dtypes and placement of `like`; None without any.

        Later ones that are damaged move to the folder `damaged` of the run, unless the folder is only read: they
        would be in the way of the checkpoints to come.

        Raises:
          RunError: there are checkpoints, and none can be read.
        """
        damaged: dict[int, str] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            found, failure = _attempt(partial(self._read, step, like))
            if failure is not None:
                damaged[step] = failure
                continue
            if not self._reads:
                self._set_aside(damaged)
            state, facts = found
            return Restored(step, state, facts, damaged)
        if damaged:
            tried, (newest, reason) = ", ".join(map(str, damaged)), next(iter(damaged.items()))
            raise RunError(
                f"{self._folder}: expected a checkpoint that can be read, got none of {tried} "
                f"(of step {newest}: {reason})"
            )
        return None

    def _read(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        self._check_whole(step, like)
        wanted = ocp.args.Composite(
            state=ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, like)),
            facts=ocp.args.JsonRestore(),
        )
        restored = self._manager.restore(step, args=wanted)
        state, facts = restored["state"], dict(restored["facts"])
        if facts.pop("digest", None) != _digest(state):
            raise ValueError("the arrays are not those that were saved")
        return state, facts

    def _remove_unfinished(self) -> None:
        """Removes what a save that was cut short has left."""
        if jax.process_index() == 0:
            for unfinished in self._folder.glob("*.orbax-checkpoint-tmp"):
                shutil.rmtree(unfinished, ignore_errors=True)

    def _check_whole(self, step: int, like: Any) -> None:
        """Raises ValueError unless a checkpoint lists the arrays of `like`, before any of them is read.

        Without this list, or with arrays of other shapes, Orbax gives up many reads at once, which has ended the
        process.
        """
        folder = self._alias.path / str(step)
        if odd := [path for path in folder.rglob("*") if not (path.is_file() or path.is_dir())]:
            # Orbax would wait for a pipe for ever.
            raise ValueError(f"{odd[0].relative_to(folder)} is no regular file")
        state = folder / "state"
        if not (state / "manifest.ocdbt").exists():
            raise ValueError("its list of arrays is missing")
        _check_arrays(ocp.PyTreeCheckpointer().metadata(state).item_metadata, like)

    def _set_aside(self, steps: dict[int, str]) -> None:
        for step in steps:
            aside = self._damaged / str(step)
            shutil.rmtree(aside, ignore_errors=True)
            aside.parent.mkdir(exist_ok=True)
            os.replace(self._folder / str(step), aside)
        if steps:
            self._manager.reload()

    def close(self) -> None:
        """Releases the threads of Orbax."""
        self._manager.close()
        self._alias.remove()


def stored_layers(run: RunFolder) -> int | None:
    """Returns how many layers the checkpoints of a run have, at most; None where there is none that tells.

    Whether checkpoints are whole, and fit the model, is seen when they are read.
    """
    found = []
    for file in run.checkpoints.glob("*/state/_METADATA"):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            names = parse_json(read_file(file))["tree_metadata"].keys()
            found.append(len({layer[1] for name in names if (layer := _LAYER.match(name))}))
    return max(found, default=None)


_LAYER = re.compile(r"\('params', 'blocks', '(\d+)'")
"""How a checkpoint names a trained array of a layer."""


class _Alias:
    """A name of a folder that Orbax can use: a link in a folder of its own where the name has brackets or stars.

    Orbax joins the arrays of a checkpoint from what `glob` finds under the whole name, where "[1]" stands for "1":
    it found nothing, and wrote checkpoints without their list of arrays. `test_names_of_run_folders` fails without
    the link.

    Args:
      folder: that exists, or that is only read.
    """

    def __init__(self, folder: Path):
        self.path, self._scratch = folder, None
        if glob.has_magic(str(folder)):
            self._scratch = tempfile.TemporaryDirectory(prefix="gdn-")
            self.path = Path(self._scratch.name).resolve() / folder.name
            self.path.symlink_to(folder, target_is_directory=True)

    def remove(self) -> None:
        """Removes the link, not what it points to."""
        if self._scratch is not None:
            self._scratch.cleanup()


def _attempt(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """Calls Orbax. Returns the result and None, or None and the error in one line.

    On a full disk and for a damaged file Orbax and its parts raise errors of many types. They also log them with
    tracebacks, which say no more and are left out, and reads and writes that were given up log when they are freed.
    """
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    levels = [logger.level for logger in loggers]
    hook = sys.unraisablehook
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    sys.unraisablehook = lambda unraisable: None
    try:
        try:
            return call(), None
        except Exception as error:
            if out_of_memory(error):
                raise
            failure = one_line(error)
        with warnings.catch_warnings(
            action="ignore", category=RuntimeWarning
        ):  # tasks that were never awaited
            gc.collect()
        return None, failure
    finally:
        sys.unraisablehook = hook
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _check_metadata(folder: Path) -> None:
    """Raises RunError for a checkpoint's facts about itself that end Orbax, nested too deep, or a pipe."""
    for path in sorted(folder.glob("*/_CHECKPOINT_METADATA")):
        try:
            parse_json(read_file(path))
        except (UnicodeDecodeError, json.JSONDecodeError):
            continue  # Orbax does without them
        except (ValueError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise RunError(
                f"{path}: expected facts about a checkpoint, got none: {reason}; delete the folder "
                f"{path.parent.name} to use the checkpoint before it"
            ) from None


def _check_arrays(found: Any, like: Any) -> None:
    """Checks names and shapes before any array is read: Orbax would notice in the middle of other reads.

    Raises:
      ValueError: they are not those of `like`.
    """
    wanted, got = (
        {".".join(name): tuple(leaf.shape) for name, leaf in ocp.tree.to_flat_dict(tree).items()}
        for tree in (like, found.tree)
    )
    if missing := sorted(wanted.keys() - got.keys()):
        raise ValueError(f"expected {len(wanted)} arrays, got none of the name {missing[0]}")
    if unknown := sorted(got.keys() - wanted.keys()):
        raise ValueError(f"expected {len(wanted)} arrays, got one more of the name {unknown[0]}")
    for name in wanted:
        if wanted[name] != got[name]:
            raise ValueError(f"expected {name} of shape {wanted[name]}, got {got[name]}")


def _digest(state: Any) -> str:
    """Returns a digest of the bytes of all arrays: without it a changed bit in a file would go unnoticed."""
    digest = hashlib.sha256()
    for array in jax.tree.leaves(state):
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            array = multihost_utils.process_allgather(array, tiled=True)
        digest.update(np.asarray(jax.device_get(array)).tobytes())
    return digest.hexdigest()[:16]
