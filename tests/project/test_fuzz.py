"""A handful of random calls, in a process that does not check annotations; and that faults are seen."""

import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from fuzz import illegal, legal, served

RUN = Path(__file__).parents[1] / "fuzz" / "run.py"


@pytest.mark.slow
def test_a_handful_of_random_calls():
    counts = ["--legal", "20", "--served", "6", "--illegal", "150"]
    done = subprocess.run([sys.executable, RUN, "--seed", "7", *counts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for kind, count in (("legal", 20), ("served", 6), ("illegal", 150)):
        assert f"\n{kind}: {count} calls, 0 with findings" in f"\n{done.stdout}"


def test_a_wrong_result_is_found():
    rng = np.random.default_rng(0)
    p = legal.draw_program(rng, ("chunked",))._replace(dtype="float32", family=False, channels=())
    p = p._replace(given=("q", "k", "v", "g"), options=p.options | {"scale": None})
    x = legal.draw_values(p, rng)
    right = legal.truth(p, x)
    results = {name: right[name] for name in ("o", "final_state", "dv")}
    assert not legal.compare(p, x, right, results)
    for name, y in results.items():
        assert legal.compare(p, x, right, results | {name: y + 1e-3})
        assert legal.compare(p, x, right, results | {name: y * np.nan})
        assert legal.compare(p, x, right, results | {name: y[..., :-1]})


def test_a_changed_slot_is_found():
    episode = served.Episode(np.random.default_rng(0), False)
    episode.ring, episode.pool = False, jnp.ones((served.SLOTS, 2, 4, 3))
    before = episode.states()
    none = np.zeros(1)
    assert not episode.check("", none, none, before, {3: before[3]})
    assert episode.check("", none, none, before, {3: before[3] + 1})
    assert episode.check("", none, none + 1, before, {})
    episode.pool = episode.pool.at[5, 0, 0, 0].add(1e-6)
    assert episode.check("", none, none, before, {})


def test_an_accepted_or_unnamed_argument_is_found(monkeypatch):
    def takes_all(**arguments):
        return 0.0

    def says_nothing(**arguments):
        raise ValueError("wrong")

    for function in (takes_all, says_nothing):
        monkeypatch.setattr(illegal, "CALLS", {"copy": (function, illegal._copy)})
        assert all(wrong for _, wrong in illegal.illegal(0, 5))
