"""The origin of a loaded model, which `save_hf` follows."""

import dataclasses
from pathlib import Path
from typing import Any

from gdn_jax.hf.family import Names


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """The checkpoint that a model was loaded from; `model.origin` of a loaded model.

    Fields:
      path: of its folder.
      config: its config.json.
      names: of its tensors.
      skipped: names of tensors that the model does not use: of images, and of other heads for more tokens.
      head: names of the tensors of the head for the token after the next, which `model.mtp` is.
      outside: files that were links out of the folder when they were read, which `save_hf` does not publish.
    """

    path: Path
    config: dict[str, Any]
    names: Names
    skipped: tuple[str, ...]
    outside: tuple[Path, ...] = ()
    head: tuple[str, ...] = ()
