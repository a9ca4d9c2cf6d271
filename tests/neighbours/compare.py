"""A library with this one's rule inside: functions put into its places, and results compared with its own."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import numpy as np

OUTPUT, GRADIENT = 1e-5, 1e-4
"""How far results in float32 may be apart, as a share of the largest value of the array."""


def put(module: ModuleType, ours: ModuleType, names: tuple[str, ...]) -> set[str]:
    """Puts our functions of these names into the places of the module's; the names of those called so far."""
    called: set[str] = set()

    def counted(name: str) -> Callable:
        def call(*args, **options):
            called.add(name)
            return getattr(ours, name)(*args, **options)

        return call

    for name in names:
        assert hasattr(module, name), f"{module.__name__} has no {name}"
        setattr(module, name, counted(name))
    return called


def compare(what: str, theirs: Any, ours: Any, bound: float) -> None:
    """Prints the largest difference of two trees of arrays; AssertionError where one array is off by more."""
    pairs = zip(jax.tree.leaves_with_path(theirs), jax.tree.leaves(ours), strict=True)
    worst = 0.0
    for (path, x), y in pairs:
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert x.shape == y.shape, f"{what}{jax.tree_util.keystr(path)}: {y.shape} for {x.shape}"
        error = float(np.abs(x - y).max() / max(np.abs(x).max(), 1e-30))
        assert error <= bound, f"{what}{jax.tree_util.keystr(path)}: {error:.1e} > {bound:.0e}"
        worst = max(worst, error)
    print(f"  {what}: {worst:.1e}", flush=True)
