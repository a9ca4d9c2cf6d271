"""The compiled step that `gdn train` keeps: read without tracing, with the same bits, never in place of another."""

import os
import pathlib
import subprocess
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compilation_cache

from gdn_jax.parallel.mesh import MeshShape
from gdn_jax.training import kept_step, steps
from gdn_jax.training import options as options_lib
from gdn_jax.training.kept_step import KeptStep
from gdn_jax.training.placement import Placement
from gdn_jax.training.tasks.table import make_task
from gdn_jax.training.trainer import Trainer

ROOT = pathlib.Path(__file__).resolve().parents[2]
X = (jax.ShapeDtypeStruct((4,), jnp.float32),)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """JAX reads no program from its own folder: on a CPU such a one is not written whole."""
    monkeypatch.setattr(compilation_cache, "is_cache_used", lambda backend: False)


def doubled(told=None, scale=2.0):
    """A function that counts its tracings, and warns in each."""
    traced = []

    def function(x):
        traced.append(x)
        if told is not None:
            warnings.warn(told, stacklevel=2)
        return {"y": scale * x}

    return jax.jit(function), traced


def on_two_devices(text):
    """The placement on a mesh of the first two."""
    shape = MeshShape.parse(text)
    return Placement(shape, shape.make(jax.devices()[:2]))


def made(step, function):
    return step.compiling(function, X, {"y": 0.0})()


def test_a_step_is_read_without_tracing(tmp_path):
    """With what tracing had warned of."""
    step = KeptStep.of(tmp_path / "steps", Placement(), "doubled")
    function, traced = doubled("of a part")
    with pytest.warns(UserWarning, match="of a part"):
        made(step, function)
    assert len(traced) == 1 and [*step.path.parent.iterdir()] == [step.path]
    with pytest.warns(UserWarning, match="of a part"):
        program = made(step, doubled(scale=3.0)[0])
    np.testing.assert_array_equal(program(jnp.arange(4.0))["y"], [0, 2, 4, 6])


def test_what_decides_the_program_decides_the_file(tmp_path, monkeypatch):
    """The parts, the source, variables of the environment, JAX's settings, versions, the device and the mesh."""

    def name(*parts):
        return KeptStep.of(tmp_path, Placement(), *(parts or ("a", X))).path.name

    first = name()
    with monkeypatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "3")
        assert name() == first
    others = [name("b", X), name("a")]
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_dump_to=nowhere")
        others.append(name())
    with jax.default_matmul_precision("float32"):
        others.append(name())
    with monkeypatch.context() as patch:
        patch.setattr(kept_step.metadata, "distributions", lambda: [])
        others.append(name())
    for text in ("data=2", "data=2,sharded", "head=2"):
        others.append(KeptStep.of(tmp_path, on_two_devices(text), "a", X).path.name)
    package = tmp_path / "gdn_jax"
    spec = types.SimpleNamespace(origin=str(package / "__init__.py"))
    for text in ("x = 1\n", "x = 2\n"):
        package.mkdir(exist_ok=True)
        (package / "module.py").write_text(text)
        with monkeypatch.context() as patch:
            patch.setattr(kept_step, "find_spec", lambda _: spec)
            others.append(name())
    assert len({first, *others}) == 1 + len(others)


def test_what_is_not_kept(tmp_path, monkeypatch):
    """Parts that no other process has, steps of several processes, and everything without a folder."""
    assert KeptStep.of(None, Placement(), "a").path is None
    assert KeptStep.of(tmp_path, Placement(), lambda: None).path is None
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    step = KeptStep.of(tmp_path, Placement(), "a")
    function, traced = doubled()
    for _ in range(2):
        made(step, function)
    assert step.path is None and traced and not [*tmp_path.iterdir()]


@pytest.mark.parametrize("damage", [lambda x: x[:-200], lambda x: x[: x.index(b"\n")], lambda x: b"\xff" + x])
def test_a_damaged_file_is_made_again(tmp_path, damage):
    step = KeptStep.of(tmp_path, Placement(), "a")
    function, _ = doubled()
    made(step, function)
    step.path.write_bytes(damage(step.path.read_bytes()))
    with pytest.warns(UserWarning, match="the kept step cannot be read"):
        program = made(step, function)
    np.testing.assert_array_equal(program(jnp.ones(4))["y"], 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(step, None)


def test_a_file_of_another_user_is_not_read(tmp_path, monkeypatch):
    step = KeptStep.of(tmp_path, Placement(), "a")
    made(step, doubled()[0])
    assert step.path.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(os, "getuid", lambda: step.path.stat().st_uid + 1)
    function, traced = doubled()
    with pytest.warns(UserWarning, match="cannot be read .it belongs to another user"):
        made(step, function)
    assert traced


def test_a_folder_that_cannot_be_written(tmp_path):
    """The step is compiled all the same."""
    (tmp_path / "file").write_text("")
    step = KeptStep.of(tmp_path / "file" / "steps", Placement(), "a")
    with pytest.warns(UserWarning, match="the kept step cannot be"):
        program = made(step, doubled()[0])
    np.testing.assert_array_equal(program(jnp.ones(4))["y"], 2)


def test_a_program_that_cannot_be_written(tmp_path):
    """With a call of a function of this process."""

    @jax.jit
    def function(x):
        return {"y": 2 * jax.pure_callback(np.asarray, X[0], x)}

    step = KeptStep.of(tmp_path, Placement(), "a")
    with pytest.warns(UserWarning, match="the kept step cannot be written"):
        program = made(step, function)
    np.testing.assert_array_equal(program(jnp.ones(4))["y"], 2)
    assert not [*tmp_path.iterdir()]


def test_old_steps_go(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_step, "MOST", 2)
    paths = [KeptStep.of(tmp_path, Placement(), i).path for i in range(3)]
    for path, seconds in zip(paths, (2, 1, None), strict=True):
        made(KeptStep(path, Placement()), doubled()[0])
        if seconds is not None:
            os.utime(path, (seconds, seconds))
    assert {*tmp_path.iterdir()} == {paths[0], paths[2]}


def options(**run):
    """Options of a tiny run."""
    start = options_lib.TASKS["parity"]
    sizes = dict(hidden_size=16, num_layers=1, num_heads=2, head_dim=8, implementation="recurrent")
    return options_lib.TrainOptions(
        start.task,
        options_lib.RunOptions(batch_size=4, **run),
        options_lib.ModelOptions(**sizes),
        start.optimizer,
    )


def steps_of(options, placement, kept):
    """The losses and the state of two steps."""
    task = make_task(options.task, options.run.batch_size, options.run.seed)
    trainer = Trainer.make(options, task, placement, kept=kept)
    losses = []
    for step in (1, 2):
        trainer.state, metrics = trainer._train(trainer.state, step)
        losses.append(float(metrics.loss))
    return losses, trainer.state


@pytest.mark.parametrize("mesh", [None, "data=2,sharded"])
def test_a_trainer_reads_its_step(tmp_path, monkeypatch, mesh):
    """Another number of steps has another schedule, and is traced."""
    placement = Placement() if mesh is None else on_two_devices(mesh)
    compiled, state = steps_of(options(), placement, tmp_path)
    (file,) = tmp_path.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(steps, "train_step", None)
        read, again = steps_of(options(log_every=7), placement, tmp_path)
        assert compiled == read
        jax.tree.map(np.testing.assert_array_equal, state, again)
        with pytest.raises(TypeError, match="NoneType"):
            steps_of(options(steps=50), placement, tmp_path)
    assert [*tmp_path.iterdir()] == [file]


def test_options_that_name_no_other_step_make_no_other_program(monkeypatch):
    """Those that are left out of a step's name; another number of steps is another program."""
    lowered = []

    def lower(step, function, arguments, result):
        lowered.append(function.lower(*arguments).as_text())
        return lambda: None

    monkeypatch.setattr(KeptStep, "compiling", lower)
    for run in ({}, dict(seed=3), dict(log_every=7, eval_every=9, save_every=11), dict(steps=50)):
        of_run = options(**run)
        Trainer.make(of_run, make_task(of_run.task, of_run.run.batch_size, of_run.run.seed))
    assert [text == lowered[0] for text in lowered] == [True, True, True, False]


@pytest.mark.slow
def test_another_process_has_the_same_name():
    """Whatever the order of its sets."""
    program = (
        "from gdn_jax.training.kept_step import KeptStep\n"
        "from gdn_jax.training.options import TASKS, of_step\n"
        "from gdn_jax.training.placement import Placement\n"
        "from gdn_jax.training.steps import model_config\n"
        "from pathlib import Path\n"
        "for options in TASKS.values():\n"
        "    config = model_config(options.model, 64)\n"
        "    print(KeptStep.of(Path('.'), Placement(), of_step(options), config))"
    )
    names = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert names[0] == names[1] and names[0].count(".step") == len(options_lib.TASKS)


@pytest.mark.gpu
def test_processes_read_a_step_with_kernels(tmp_path):
    """Also one that JAX had read from its own folder when it was kept."""
    program = (
        "import sys, warnings\n"
        "warnings.simplefilter('error')\n"
        "from pathlib import Path\n"
        "from gdn_jax.training import options as o, steps\n"
        "from gdn_jax.training.tasks.table import make_task\n"
        "from gdn_jax.training.trainer import Trainer\n"
        "if sys.argv[2] == 'read': steps.train_step = None\n"
        "start = o.TASKS['parity']\n"
        "model = o.ModelOptions(hidden_size=128, num_layers=2, num_heads=2, head_dim=64, dtype='bfloat16')\n"
        "options = o.TrainOptions(start.task, o.RunOptions(batch_size=4), model, start.optimizer)\n"
        "trainer = Trainer.make(options, make_task(start.task, 4, 0), kept=Path(sys.argv[1]))\n"
        "for step in (1, 2):\n"
        "    trainer.state, metrics = trainer._train(trainer.state, step)\n"
        "    print(float(metrics.loss).hex())"
    )
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax")}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

    def losses(how):
        words = [sys.executable, "-c", program, str(tmp_path / "steps"), how]
        done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0 and "JIT session error" not in done.stderr, done.stderr[-4000:]
        return done.stdout.split()

    first = losses("make")
    (file,) = (tmp_path / "steps").iterdir()
    assert len(first) == 2 and losses("read") == first
    file.unlink()
    assert losses("make") == first and losses("read") == first
