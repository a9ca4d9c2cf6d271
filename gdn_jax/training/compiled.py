"""The folder in which `gdn train` keeps compiled programs for the next run."""

import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache


def keep_compiled(wanted: bool) -> Path | None:
    """Makes JAX keep compiled programs on disk, for all that this process compiles from now on.

    It keeps all of them: a run begins with dozens that take less than the second from which JAX itself keeps one. A
    folder that the user gave JAX (JAX_COMPILATION_CACHE_DIR) stays, with JAX's settings. On a CPU none is chosen: its
    programs are bound to the instructions of one machine, and compile fast.

    Args:
      wanted: False chooses no folder.

    Returns:
      The folder in use, None where programs are not kept.
    """
    if not jax.config.jax_enable_compilation_cache:
        return None
    if given := jax.config.jax_compilation_cache_dir:
        return Path(given)
    if not wanted or jax.default_backend() == "cpu":
        return None
    folder = user_cache() / "gdn-jax" / "compiled"
    compilation_cache.reset_cache()  # a program that was compiled before has settled that nothing is kept
    compilation_cache.set_cache_dir(str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return folder


def user_cache() -> Path:
    """Returns the user's cache directory: XDG_CACHE_HOME where that is an absolute path, as its rules say."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return given if given.is_absolute() else Path.home() / ".cache"
