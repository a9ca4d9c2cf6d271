"""The compiled step of a run, kept for the next process, which then neither traces nor lowers it.

JAX finds a compiled program by its lowered form, and Python takes longer to make this form of a deep model than JAX
takes to read the program: 10.2 and 3.0 s for 0.4b on an H200. Here a step is found by all that decides its lowered
form: options and shapes, devices and mesh, JAX's settings, and the source of whatever may be traced.
"""

import contextlib
import dataclasses
import hashlib
import importlib
import json
import os
import platform
import re
import tempfile
import warnings
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jaxtyping import PyTree

from gdn_jax.commands.files import replacing
from gdn_jax.training.placement import Placement

MOST = 16
"""Steps that a folder holds; of more, those go whose files are oldest."""
ENDING = ".step"
"""Ending of their files: warnings of tracing as a line of JSON, then what JAX makes of a compiled program."""
SETTINGS = ("JAX_", "XLA_", "NVIDIA_", "CUDA_", "TF_", "LIBTPU_", "GDN_")
"""How names of environment variables begin that may change a program."""
NO_SETTING = "CUDA_VISIBLE_DEVICES"
"""Another card of the same kind has the same program."""
PACKAGES = re.compile(r"jax|flax|optax|numpy|nvidia", re.IGNORECASE)
"""In the names of packages whose versions may change a program."""


@dataclasses.dataclass(frozen=True)
class KeptStep:
    """A step with a place for it on disk.

    Fields:
      path: its file; None: it is not kept.
      placement: where the step runs.
    """

    path: Path | None
    placement: Placement

    @classmethod
    def of(cls, folder: Path | None, placement: Placement, *parts: Any) -> "KeptStep":
        """The step that is made from these parts. One that several processes share is not kept.

        Args:
          folder: of all steps; None: it is not kept.
          placement: where it runs.
          parts: all that decides what is traced. They count by their `repr`; with an address in it, which another
            process does not have, the step is not kept.
        """
        said = repr(parts)
        # Processes that share a run would have to agree on who has read its step and who traces it.
        if folder is None or jax.process_count() > 1 or re.search(r"\bat 0x[0-9a-f]", said):
            return cls(None, placement)
        about = said, _source(), _surroundings(), placement.shape, [*map(_about, placement.devices)]
        return cls(folder / (hashlib.sha256(repr(about).encode()).hexdigest() + ENDING), placement)

    def compiling(self, function: Any, arguments: tuple, result: PyTree) -> Callable[[], jax.stages.Compiled]:
        """Returns a function for a thread, which reads the step, or compiles and keeps it.

        A step that is not kept is traced and lowered at once, so that this raises what tracing raises. Warnings of
        tracing are given again with a step that is read.

        Args:
          function: a jitted function.
          arguments: shapes of its arguments.
          result: a tree with the structure of its result.
        """
        if (found := self._read()) is None:
            with _recorded() as told:
                lowered = function.lower(*arguments)
            return lambda: self._compiled(lowered, told)
        told, stored = found
        for text in told:
            warnings.warn(text, stacklevel=2)

        def load() -> jax.stages.Compiled:
            # XLA finds Mosaic's run-time library by a variable that this module sets. Tracing a kernel imports it.
            importlib.import_module("jax.experimental.mosaic.gpu")
            trees = jax.tree.structure((arguments, {})), jax.tree.structure(result)
            devices = self.placement.devices
            try:
                return serialize_executable.deserialize_and_load(stored, *trees, execution_devices=devices)
            except Exception as error:  # JAX does not say which; the step is made as if it had not been kept
                _cannot("read", self.path, error)
            with self.placement.active():
                return self._compiled(function.lower(*arguments), told)

        return load

    def _read(self) -> tuple[list[str], bytes] | None:
        """The warnings and the program of the file, None where there is none."""
        if self.path is None:
            return None
        try:
            with open(self.path, "rb") as file:
                if os.fstat(file.fileno()).st_uid != os.getuid():  # JAX would run whatever it holds
                    raise PermissionError("it belongs to another user")
                told, _, stored = file.read().partition(b"\n")
            return json.loads(told), stored
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _cannot("read", self.path, error)
            return None

    def _compiled(self, lowered: jax.stages.Lowered, told: list[str]) -> jax.stages.Compiled:
        """The program, after it was written to the file."""
        program = lowered.compile()
        if self.path is None:
            return program
        try:
            stored, *_ = serialize_executable.serialize(program)
            folder = self.path.parent
            folder.mkdir(parents=True, exist_ok=True)
            # A folder of its own: two processes may keep the same step at the same time.
            with tempfile.TemporaryDirectory(dir=folder) as own:
                with replacing(Path(own) / self.path.name) as file:
                    os.fchmod(file.fileno(), 0o600)
                    file.write(json.dumps(told).encode() + b"\n" + stored)
                os.replace(Path(own) / self.path.name, self.path)
            steps = sorted(folder.glob("*" + ENDING), key=lambda path: path.stat().st_mtime)
            for path in steps[:-MOST]:
                path.unlink(missing_ok=True)
        except Exception as error:  # JAX does not say which, for parts of a program that it cannot write
            _cannot("written", self.path, error)
        return program


def _cannot(what: str, path: Path | None, error: Exception) -> None:
    """Warns that a file does not serve; the run goes on without it."""
    warnings.warn(f"{path}: the kept step cannot be {what} ({error})", stacklevel=3)


@contextlib.contextmanager
def _recorded():
    """Gives a list that has the texts of the block's warnings after it; they are shown as ever."""
    told: list[str] = []
    shown = warnings.showwarning

    def show(message, category, *args, **kwargs):
        told.append(str(message))
        shown(message, category, *args, **kwargs)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield told


def _source() -> str:
    """A hash of the source of the packages that a step is traced from."""
    found = hashlib.sha256()
    for package in ("gdn_jax", "pallas_kernels"):
        spec = find_spec(package)
        assert spec is not None and spec.origin is not None, "both are installed together"
        folder = Path(spec.origin).parent
        for path in sorted(folder.rglob("*.py")):
            text = path.read_bytes()
            found.update(f"{path.relative_to(folder.parent)} {len(text)}\n".encode() + text)
    return found.hexdigest()


def _surroundings() -> tuple[Any, ...]:
    """Versions, JAX's settings and variables of the environment that may change a program."""
    packages = {x.name: x.version for x in metadata.distributions() if PACKAGES.search(x.name or "")}
    environment = {name: value for name, value in os.environ.items() if name.startswith(SETTINGS)}
    environment.pop(NO_SETTING, None)
    return platform.python_version(), *(sorted(x.items()) for x in (packages, environment, jax.config.values))


def _about(device: jax.Device) -> tuple[Any, ...]:
    """Returns the properties of a device that may change a program."""
    kind = [getattr(device, name, None) for name in ("compute_capability", "core_count")]
    return device.id, device.platform, device.device_kind, *kind, device.client.platform_version
