"""A training step and whole runs on meshes of CPU devices, beside one device."""

import contextlib
import dataclasses
import json
import queue
import shutil
import socket
from pathlib import Path

import forked
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs
from flax import nnx
from harness import tiers
from jax.sharding import PartitionSpec
from meshes import mesh_from
from steps_on_meshes import CONFIG, LENGTH, ROWS, check_same_steps, three_steps

from gdn_jax.bench.collectives import traffic
from gdn_jax.bench.sizes import SIZES
from gdn_jax.commands import cli
from gdn_jax.models import LanguageModel
from gdn_jax.models.config import AttentionConfig, ExpertsConfig, LatentAttentionConfig, SigmoidRouting
from gdn_jax.parallel import context, lifeline, processes, sharding
from gdn_jax.parallel.mesh import MeshShape
from gdn_jax.parallel.token_shards import log_probs_on_mesh, loss_on_mesh

EVERY_AXIS = "data=2,head=2,context=2,sharded"
SHAPES = ["head=8", "context=8", "data=8,sharded"]
"""Each axis alone; data alone is in `test_what_a_step_sends`. The gate has all of them together, and tokens that are
split eightfold in test_parallel_context.py."""
TWO = ["head=4,context=2", "data=2,head=4", "data=2,context=4", "data=4,context=2,sharded"]
"""The pairs."""


@pytest.fixture(scope="module")
def alone():
    """Three steps on one device."""
    return three_steps("data=1")


@pytest.mark.parametrize("text", tiers([EVERY_AXIS, *SHAPES, *TWO], [], [EVERY_AXIS]))
def test_three_steps(text, alone):
    check_same_steps(three_steps(text), alone)


HYBRID = dataclasses.replace(
    CONFIG,
    num_layers=2,
    attention=AttentionConfig(4, 2, 4, "head", output_gate=True, rotary_dim=4),
    layer_types=("gated_delta_net", "attention"),
)


@pytest.mark.crossed
def test_three_steps_of_a_hybrid_model():
    """Every other layer is attention, whose tokens are exchanged for heads."""
    metrics, params, sent = three_steps(EVERY_AXIS, HYBRID)
    check_same_steps((metrics, params), three_steps("data=1", HYBRID))
    assert sent.count["all-to-all"] >= 8


LATENT = dataclasses.replace(
    CONFIG,
    layer_types=("attention",),
    attention=LatentAttentionConfig(4, 4, 4, 4, 6, 8, 100.0, True),
    experts=ExpertsConfig(8, 3, 8, 8, shared_gate=False, routing=SigmoidRouting(4, 2, 2.5)),
)


@pytest.mark.slow
def test_three_steps_with_latent_attention_and_experts():
    """On a mesh with all that there is, from experts in parts."""
    metrics, params, sent = three_steps(EVERY_AXIS, LATENT)
    check_same_steps((metrics, params), three_steps("data=1", LATENT))
    assert sent.count["all-to-all"] >= 8


def test_layers_share_what_is_traced(monkeypatch):
    """The rule over tokens is traced once, in however many layers."""
    calls, split = [], context._split

    def counted(call, x, scale, implementation, axis_name, by):
        calls.append(axis_name)
        return split(call, x, scale, implementation, axis_name, by)

    monkeypatch.setattr(context, "_split", counted)
    config = dataclasses.replace(CONFIG, num_layers=3)
    graphdef, params, rest = nnx.split(
        nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))), nnx.Param, ...
    )
    tokens = jax.ShapeDtypeStruct((2, 24), jnp.int32)
    jax.clear_caches()
    with jax.set_mesh(MeshShape(context=2).make(jax.devices()[:2])):
        jax.eval_shape(lambda p, t: nnx.merge(graphdef, p, rest)(t)[0], params, tokens)
    assert calls == ["context"]


@pytest.mark.slow
def test_what_a_step_sends(alone):
    """Over data one all-reduce, of the gradients and the sums."""
    metrics, params, sent = three_steps("data=8")
    check_same_steps((metrics, params), alone)
    assert set(sent.count) == {"all-reduce"}
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    assert size <= sent.total * 8 / 14 <= 1.01 * size


def test_the_loss_of_more_tokens_than_a_tile():
    """On every device: sums and gradients of one device; with each token's log-probability, times any cotangent."""
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((4, 32, 8), (16, 8)))
    targets, weights = (
        jnp.asarray(rng.integers(0, 16, (4, 32))),
        jnp.asarray(rng.random((4, 32)), jnp.float32),
    )

    @jax.jit
    def loss(x, weight):
        known = dict(label_weights=weights, tile=4)
        found = log_probs_on_mesh(x, weight, targets, **known)
        return loss_on_mesh(x, weight, targets, **known).loss + jnp.sum(found * cotangents), found

    cotangents = rng.standard_normal((4, 32)).astype(np.float32)
    gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)
    expected = gradients(x, weight)
    with jax.set_mesh(mesh_from("data=2,head=2,context=2")[1]):
        got = gradients(x, weight)
    for y, want in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)


def specs(text):
    """PartitionSpecs of the model's parameters by name."""
    params = nnx.state(LanguageModel(CONFIG, rngs=nnx.Rngs(0)), nnx.Param)
    found = sharding.parameter_specs(params, MeshShape.parse(text))
    flat = jax.tree_util.tree_leaves_with_path(found, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return {jax.tree_util.keystr(path): spec for path, spec in flat}


def test_where_parameters_lie():
    """Every one of them, on a mesh with all that there is."""
    block = "['blocks'][0]"
    mixer = {
        **dict.fromkeys((f"['{x}_proj']['kernel']" for x in "qkvabg"), PartitionSpec("data", "head")),
        "['o_proj']['kernel']": PartitionSpec("head", "data"),
        "['A_log']": PartitionSpec("head"),
        "['dt_bias']": PartitionSpec("head"),
        "['conv_weight']": PartitionSpec("data", None),
        "['o_norm']['weight']": PartitionSpec(None),
    }
    mlp = {
        "['gate_proj']['kernel']": PartitionSpec("data", "head"),
        "['up_proj']['kernel']": PartitionSpec("data", "head"),
        "['down_proj']['kernel']": PartitionSpec("head", "data"),
    }
    expected = {
        **{f"{block}['mixer']{name}": spec for name, spec in mixer.items()},
        **{f"{block}['mlp']{name}": spec for name, spec in mlp.items()},
        **{f"{block}['{x}_norm']['weight']": PartitionSpec(None) for x in ("mixer", "mlp")},
        "['embedding']": PartitionSpec("data", None),
        "['head']": PartitionSpec("data", None),
        "['norm']['weight']": PartitionSpec(None),
    }
    found = {k.removesuffix(".value"): s for k, s in specs("data=2,head=2,sharded").items()}
    assert found == expected
    assert all("data" not in s for s in specs("data=2,head=2").values())
    assert all(not any(s) for s in specs("context=2").values())


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("head=3", {}, "head: expected a divisor of the model's heads, 8 of keys and values, got 3"),
        ("head=8", dict(num_heads=4, num_v_heads=8), "head: expected a divisor of the model's heads, 4 of"),
        (
            "head=8",
            dict(intermediate_size=20),
            "head: expected a divisor of the SwiGLU's inner width 20, got 8",
        ),
        ("data=3", {}, "data: expected a divisor of the 8 rows of a batch, got 3"),
        ("context=5", {}, "context: expected a divisor of the 32 tokens of a row, got 5"),
        ("context=16", {}, "context: expected at least 3 tokens of a row on each device, got 2"),
        ("context=2", dict(rule="mamba2"), "context: the rule mamba2 does not run over split tokens"),
    ],
)
def test_refusals(text, options, message):
    with pytest.raises((ValueError, NotImplementedError), match=message):
        sharding.check(dataclasses.replace(CONFIG, **options), MeshShape.parse(text), ROWS, LENGTH)


def test_meshes_as_text():
    shape = MeshShape.parse("data=2,context=4,sharded")
    assert (
        shape == MeshShape(data=2, context=4, shard_parameters=True)
        and str(shape) == "data=2,context=4,sharded"
    )
    assert str(MeshShape()) == "data=1"
    for text in (
        "data=0",
        "rows=2",
        "data=2,data=2",
        "data",
        "head=-1",
        "sharded=1",
        "data=²",
        f"data={'9' * 5000}",
    ):
        with pytest.raises(ValueError, match="expected"):
            MeshShape.parse(text)
    with pytest.raises(ValueError, match="mesh: expected 8 devices as there are, got data=3 with 3"):
        MeshShape(data=3).make(jax.devices()[:8])


def test_neighbours_on_a_mesh():
    """Devices along context follow each other, then those along head: they send the most."""
    devices = jax.devices()[:8]
    mesh = MeshShape(data=2, head=2, context=2).make(devices)
    assert mesh.devices.tolist() == [[devices[0:2], devices[2:4]], [devices[4:6], devices[6:8]]]
    assert mesh.axis_names == ("data", "head", "context")
    mesh = MeshShape(data=1, head=2, context=4).make(devices)
    assert mesh.devices.tolist() == [[devices[0:4], devices[4:8]]]


PROGRAM = """HloModule jit_f, num_partitions=8
%body (p: f32[2]) -> f32[2] {
  %a = f32[2]{0} collective-permute(%p), source_target_pairs={{0,1}}
}
ENTRY %main (x: f32[8]) -> f32[8] {
  %w = f32[2]{0} while(%x), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %r = (f32[4]{0}, bf16[8]{0}) all-reduce(%a, %b), replica_groups=mesh['i'=8] {'i'}, to_apply=%add
  %g = f32[8]{0} all-gather(%a), replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}
  %s = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1}}
  %t = f32[2]{0} reduce-scatter(%x), replica_groups=[2,4]<=[8], dimensions={0}
}
"""


def test_traffic():
    """Operations in loops as often as they run, tuples, groups in each notation, and asynchronous ones once."""
    sent = traffic(PROGRAM)
    assert sent.count == {"collective-permute": 4, "all-reduce": 1, "all-gather": 1, "reduce-scatter": 1}
    assert sent.sent == {
        "collective-permute": 3 * 8 + 32,
        "all-reduce": 56,
        "all-gather": 16,
        "reduce-scatter": 24,
    }


OVER_TWO = "data=2,head=2,sharded"
"""What two processes of two devices share: rows, and a part of the parameters each. What goes over the other axes
stays inside a process."""


@pytest.fixture(scope="module")
def run_alone(tmp_path_factory, folder):
    """The folder of a run on one device."""
    out = tmp_path_factory.mktemp("runs") / "alone"
    assert tiny_runs.train(folder, out, "--num-heads", "2") == 0
    return out


def check_alike(one, other):
    """Metrics of two runs agree within rounding."""
    one, other = tiny_runs.metrics(one), tiny_runs.metrics(other)
    assert [line["step"] for line in one] == [line["step"] for line in other]
    for a, b in zip(one, other, strict=True):
        assert a == pytest.approx(b, rel=1e-5)


def test_a_mesh_that_does_not_fit(tmp_path, folder, capsys):
    assert tiny_runs.train(folder, tmp_path / "run", "--mesh", "data=3") == 1
    message = capsys.readouterr().err
    assert "--mesh: expected" in message and "data=3 with 3" in message
    assert not (tmp_path / "run").exists()


DIES = """
import os, pathlib, signal, time
from gdn_jax.training.tasks.next_byte import BytesTask

saved, original = pathlib.Path({saved!r}), BytesTask.train_batch

def dying(self, step):
    while step == 10 and not saved.exists():
        time.sleep(0.02)
    if step == 10:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, step)

BytesTask.train_batch = dying
"""
"""What makes a process of `gdn` die at step 10 when there is a checkpoint."""
KEEPS = """
from types import SimpleNamespace
from jax._src import compiler

compiler.distributed = SimpleNamespace(global_state=SimpleNamespace(process_id=0))
"""
"""Makes a process keep its compiled programs: JAX lets the first one alone do so, and the others are not its own."""


@contextlib.contextmanager
def kept_port():
    """A port that nothing else is given. A server that shares its port, as gRPC's does, may have it."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind(("", 0))
        yield kept.getsockname()[1]


def launch(folder, arguments, victim=None, saved=None):
    """`gdn` in two processes of two devices each; their exit statuses and outputs.

    folder: where their outputs go.
    victim: number of the process that dies at step 10, after the checkpoint `saved`.
    """
    programs = Path(jax.config.jax_compilation_cache_dir or folder)
    with kept_port() as port:
        children = [
            forked.Child(
                arguments,
                folder / f"{index} {arguments[-1]}",
                {
                    "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                    "JAX_NUM_PROCESSES": "2",
                    "JAX_PROCESS_ID": str(index),
                    "JAX_NUM_CPU_DEVICES": "2",
                    "JAX_COMPILATION_CACHE_DIR": str(programs / f"process {index}"),
                },
                KEEPS + (DIES.format(saved=str(saved)) if index == victim else ""),
            )
            for index in range(2)
        ]
        return forked.run(*children)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.crossed)])
def test_two_processes_of_which_one_dies(tmp_path, folder, run_alone, victim):
    """One mesh over both. The other one ends and says so in a line; the run goes on from the last checkpoint, in two
    processes, and in one on another mesh: the losses are those of one device, within rounding. One folder, written
    by the first."""
    if jax.device_count() != 8:
        pytest.skip(f"needs 8 devices, JAX sees {jax.device_count()}")
    out = tmp_path / "run"
    arguments = ["train", "bytes", "--data", str(folder), "--out", str(out), *tiny_runs.TINY_TEXT]
    arguments += ["--num-heads", "2", "--mesh", OVER_TWO]
    codes, outputs = launch(tmp_path, arguments, victim, out / "checkpoints" / "8")
    assert codes[1 - victim] == 1, outputs
    said = [
        line for line in outputs[1 - victim].splitlines() if line.startswith(f"gdn: process {1 - victim}: ")
    ]
    expected = f"process {victim} of the run is gone; what was saved is kept; continue with: gdn train"
    assert len(said) == 1 and "gone" in said[0], outputs[1 - victim]
    assert "Traceback" not in outputs[1 - victim] and "Check failure" not in outputs[1 - victim]
    assert expected in said[0] or "another process of the run is gone" in said[0]
    (out / "lock").unlink(missing_ok=True)
    alone = shutil.copytree(out, tmp_path / "in one process")
    assert tiny_runs.resume(alone, "--mesh", "data=4,context=2") == 0
    check_alike(run_alone, alone)
    again = ["train", "bytes", "--out", str(out), "--mesh", OVER_TWO, "--resume"]
    codes, outputs = launch(tmp_path, again)
    assert codes == [0, 0], outputs
    check_alike(run_alone, out)
    assert {path.name for path in out.iterdir()} == {path.name for path in run_alone.iterdir()}
    assert json.loads((out / "result.json").read_text())["finished"]
    assert "results in" not in outputs[1]


def test_a_stranger_on_the_port_is_sent_away():
    """Whoever does not greet with the secret is not watched, and takes no other's place; a death is told, an end is
    not."""
    secret, listener = bytes(range(16)), lifeline._listener()
    port, lost = listener.getsockname()[1], queue.Queue()

    def joined(greeting):
        connection = socket.create_connection(("127.0.0.1", port), 10)
        connection.sendall(greeting)
        return connection

    stranger = joined(b"GET / HTTP/1.1 and more than twenty bytes")
    others = [joined(secret + index.to_bytes(4, "big")) for index in (1, 2)]
    accepted: dict[int, socket.socket] = {}
    lifeline._accept(listener, secret, accepted, 2)
    assert sorted(accepted) == [1, 2]
    with contextlib.suppress(ConnectionResetError):
        assert stranger.recv(1) == b""
    others[0].sendall(lifeline._FAREWELL)
    others[1].close()
    for index, connection in accepted.items():
        connection.settimeout(10)
        lifeline._watch(connection, index, lost.put)
    assert [lost.get_nowait()] == [2] and lost.empty()


def test_the_environment_of_several_processes(monkeypatch):
    """Missing or impossible settings are refused before anything waits for them."""
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ValueError, match="JAX_NUM_PROCESSES: expected a value with JAX_COORDINATOR_ADDRESS"):
        processes.join()
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAX_PROCESS_ID", "2")
    with pytest.raises(
        ValueError, match="JAX_PROCESS_ID: expected a number below JAX_NUM_PROCESSES, got 2 of 2"
    ):
        processes.join()


@pytest.mark.slow
@pytest.mark.parametrize(
    "meshes",
    [["head=2,context=4"], pytest.param(["data=8", "head=2,context=4"], marks=pytest.mark.crossed)],
    ids=["one mesh", "two meshes"],
)
def test_bench(meshes, capsys, tmp_path, monkeypatch):
    """The command for several devices, on a problem that is over in seconds."""
    monkeypatch.setitem(SIZES["tiny"], "num_layers", 1)
    sizes = (
        "--tokens 512 --heads 8 8 --width 8 --dtype float32 --calls 1 --repeats 1 --implementation recurrent"
    )
    step = "--model tiny --length 64 --step-tokens 64"
    out = tmp_path / "scale.json"
    arguments = ["bench", "scale", *sizes.split(), *step.split(), "--json", str(out)]
    arguments += ["--context-by", "states"]
    assert cli.main([*arguments, "--mesh", *meshes]) == 0
    results = json.loads(out.read_text())["results"]
    assert [(r["part"].split()[0], r["mesh"]) for r in results] == [
        *(("rule", mesh) for other in meshes for mesh in ("data=1", other)),
        *(("step", mesh) for mesh in ("data=1", *meshes)),
    ]
    alone = [r["mesh"] == "data=1" or (r["part"], r["mesh"]) == ("rule", "data=8") for r in results]
    assert [r["sent MiB"] == 0 for r in results] == alone  # rows need nothing of each other
    errors = [r["error"] for r in results[1 : 2 * len(meshes) : 2]]
    assert errors[-1] < 1e-5 and all(error < 1e-6 for error in errors[:-1])
    assert "efficiency" in capsys.readouterr().out
