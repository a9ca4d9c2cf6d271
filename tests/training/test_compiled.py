"""The folder in which `gdn train` keeps compiled programs."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from gdn_jax.training.compiled import keep_compiled

SECONDS = "jax_persistent_cache_min_compile_time_secs"


@pytest.fixture
def cache_home(tmp_path, monkeypatch):
    """An accelerator by name, a cache directory, and JAX's settings as they were afterwards."""
    before, seconds = jax.config.jax_compilation_cache_dir, getattr(jax.config, SECONDS)
    compilation_cache.set_cache_dir(None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update(SECONDS, 100.0)
    yield tmp_path
    compilation_cache.set_cache_dir(before)
    jax.config.update(SECONDS, seconds)
    compilation_cache.reset_cache()


def test_programs_are_kept(cache_home):
    """Also those that compile in no time."""
    jax.jit(lambda x: x + 1)(jnp.ones(3))  # JAX decides here, before a folder is known
    folder = keep_compiled(True)
    assert folder is not None and folder.parent.parent == cache_home
    jax.jit(lambda x: jnp.sin(x) * 3 + 1)(jnp.ones(7)).block_until_ready()
    assert any(folder.iterdir())


def test_the_users_folder_wins(cache_home):
    compilation_cache.set_cache_dir(str(cache_home / "mine"))  # as JAX_COMPILATION_CACHE_DIR does
    for wanted in (True, False):
        assert keep_compiled(wanted) == cache_home / "mine"
        assert getattr(jax.config, SECONDS) == 100.0


def test_places(cache_home, monkeypatch):
    monkeypatch.setenv("HOME", str(cache_home))
    for given in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        compilation_cache.set_cache_dir(None)
        assert keep_compiled(True) == Path(cache_home) / ".cache" / "gdn-jax" / "compiled"


@pytest.mark.parametrize("backend, wanted", [("gpu", False), ("cpu", True)])
def test_nothing_is_kept(cache_home, monkeypatch, backend, wanted):
    """Switched off, and on a CPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert keep_compiled(wanted) is None
    assert jax.config.jax_compilation_cache_dir is None
