"""`gdn bench --what scale`: how much faster several devices are than one.

Times the rule, forward and backward, on meshes that split its rows, its heads or its tokens, beside one device on
the same arrays in the same run. Efficiency is the time of one device over n times that of n. Results are compared
before a time counts: over rows and heads all bits, over tokens within the rounding of the maps that travel. A time is
the mean of calls that follow one another without a pause, by the clock.

Then the training step of a model, with as many tokens for each device as for one: more rows over data, longer rows
over context. Efficiency is the time of one device over that of n.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from gdn_jax import gated_delta_rule
from gdn_jax.bench import device_time
from gdn_jax.bench import rows as bench_rows
from gdn_jax.bench import step as step_bench
from gdn_jax.bench.rows import Inputs, Row
from gdn_jax.commands.errors import fail, one_line
from gdn_jax.commands.files import check_writable, write_text
from gdn_jax.commands.parsing import parse
from gdn_jax.commands.versions import versions
from gdn_jax.models import LanguageModel
from gdn_jax.parallel import context
from gdn_jax.parallel.mesh import CONTEXT, DATA, HEAD, MeshShape
from gdn_jax.tasks.batch import Batch
from gdn_jax.training import steps
from gdn_jax.training.options import ScheduleOptions
from gdn_jax.training.placement import Placement


@dataclasses.dataclass(frozen=True)
class ScaleBenchOptions:
    """Options of `gdn bench --what scale`."""

    what: Literal["scale"] = "scale"
    """The rule on meshes of several devices."""
    mesh: tuple[str, ...] = ()
    """Meshes to time, as in data=2 head=2 context=2. Default: all devices along each axis; of the step, with whole
    and with sharded parameters along data, and along context."""
    parts: tuple[Literal["rule", "step"], ...] = ("rule", "step")
    """What is timed: the rule, forward and backward; the training step of a model."""
    tokens: tuple[int, ...] = (262144,)
    """Tokens of all rows together in the rule, one group of lines for each."""
    rows: int = 8
    """Rows that the tokens are cut into where the mesh has no context axis; there they are one row."""
    heads: tuple[int, int] = (16, 32)
    """Key heads and value heads."""
    width: int = 128
    """Width K = V of a head."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """dtype of q, k, v."""
    implementation: str | None = None
    """Of the rule; default: the fastest that supports the call."""
    model: Literal["tiny", "0.4b", "1.3b"] = "0.4b"
    """Size of the model of the step, as of gdn bench --what step."""
    length: int = 8192
    """Tokens of a row of the step on one device."""
    step_tokens: int = 65536
    """Tokens of a step for each device."""
    calls: int = 8
    """Calls that follow one another in one measurement."""
    repeats: int = 5
    """Measurements."""
    context_by: Literal["states", "heads"] | None = None
    """What the devices of a context axis hand to each other in the rule: states, or all tokens of some heads.
    Default: what is predicted to take less time."""
    kernels: bool = False
    """Also prints what each kernel of the first GPU takes in a call, from a profile."""
    json: Path | None = None
    """File for all numbers, rewritten after every line."""


class Result(NamedTuple):
    """One mesh."""

    what: str
    mesh: str
    rows: int
    length: int
    devices: int
    ms: float
    fastest_ms: float
    slowest_ms: float
    efficiency: float
    temporary_gib: float
    differs: float
    """Of the rule: the largest relative difference of an output or gradient from one device's, rms over rms."""
    kernels: tuple[dict[str, Any], ...] = ()
    """With --kernels: name, launches and ms of each kernel of the first GPU in a call, the longest first."""


def _call(options: ScaleBenchOptions, shape: MeshShape, x: Inputs):
    """Outputs and gradients; on shards of tokens where the mesh has a context axis."""
    rule = partial(gated_delta_rule, implementation=options.implementation)
    if shape.context > 1:
        mesh = jax.sharding.get_abstract_mesh()
        tokens, states = _specs(shape)
        known = dict(implementation=options.implementation, by=options.context_by)
        local = partial(context.gated_delta_rule, axis_name=CONTEXT, **known)

        def rule(*tokens_, initial_state):
            def run(*args):
                return local(*args[:5], initial_state=args[5])

            specs = (tokens,) * 5 + (states,)
            return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=(tokens, states))(
                *tokens_, initial_state
            )

    outputs, vjp = jax.vjp(lambda *a: rule(*a[:5], initial_state=a[5]), *x.tokens, x.initial_state)
    return outputs, vjp((x.do, x.dh_T))


def _specs(shape: MeshShape) -> tuple[PartitionSpec, PartitionSpec]:
    tokens = PartitionSpec(DATA, CONTEXT, HEAD)
    return tokens, PartitionSpec(DATA, HEAD)


def _inputs(options: ScaleBenchOptions, rows: int, length: int) -> Inputs:
    """Random arguments of `rows` rows, on the first device."""
    whole = bench_rows.inputs(Row(*options.heads, (length,) * rows, width=options.width), options.dtype)
    return Inputs(*(x if i in (5, 7) else x.reshape(rows, length, *x.shape[2:]) for i, x in enumerate(whole)))


def _time(call: Callable[[], Any], options: ScaleBenchOptions) -> list[float]:
    """Milliseconds of a call, once for each measurement."""
    times = []
    jax.block_until_ready(call())
    for _ in range(options.repeats):
        started = time.perf_counter()
        jax.block_until_ready([call() for _ in range(options.calls)][-1])
        times.append((time.perf_counter() - started) * 1e3 / options.calls)
    return times


def _kernels(call: Callable[[], Any], options: ScaleBenchOptions) -> tuple[dict[str, Any], ...]:
    """What each kernel of the first GPU takes in a call, where that is asked for; after calls that were timed."""
    if not options.kernels:
        return ()

    def calls() -> None:
        jax.block_until_ready([call() for _ in range(options.calls)][-1])

    found = device_time.kernels(device_time.profile(calls, 1), jax.devices()[0].local_hardware_id)
    return tuple(kernel._asdict() for kernel in device_time.by_kernel(found, options.calls))


def _compiler_options(options: ScaleBenchOptions) -> dict[str, Any]:
    """A profile is of the graphs that are timed, not of single launches."""
    on_gpu = options.kernels and jax.default_backend() == "gpu"
    return {"xla_enable_command_buffers_during_profiling": True} if on_gpu else {}


@jax.jit
def _difference(got, want) -> jax.Array:
    def one(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.sqrt(jnp.mean((a - b) ** 2) / jnp.mean(b**2))

    return jnp.max(
        jnp.stack([one(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)])
    )


def measure(options: ScaleBenchOptions, shape: MeshShape, alone: dict, tokens: int) -> list[Result]:
    """Times a mesh, and one device on the same arrays unless that is known already.

    Args:
      alone: times of one device by rows and length; filled here.
    """
    rows = options.rows if shape.context == 1 else shape.data
    length = tokens // rows
    x = _inputs(options, rows, length)
    results, expected = [], None
    one = MeshShape()
    for where in (one, shape) if shape.size > 1 else (one,):
        mesh = where.make(jax.devices()[: where.size])
        tokens_spec, states_spec = _specs(where)
        specs = [states_spec if i in (5, 7) else tokens_spec for i in range(8)]
        placed = Inputs(*(jax.device_put(y, NamedSharding(mesh, s)) for y, s in zip(x, specs, strict=True)))
        with jax.set_mesh(mesh):
            lowered = jax.jit(partial(_call, options, where)).lower(placed)
            compiled = lowered.compile(_compiler_options(options))
        out = compiled(placed)
        first = jax.devices()[0]
        if where == one:
            expected, differs = jax.device_put(out, first), 0.0
        else:
            differs = float(_difference(jax.device_put(out, first), expected))
            expected = None
        del out
        key = (rows, length)
        if where != one or key not in alone:
            times = _time(partial(compiled, placed), options)
            ms = float(np.median(times))
            if where == one:
                alone[key] = ms
            memory = compiled.memory_analysis()
            results.append(
                Result(
                    "rule",
                    str(where),
                    rows,
                    length,
                    where.size,
                    ms,
                    min(times),
                    max(times),
                    alone[key] / (where.size * ms),
                    memory.temp_size_in_bytes / 2**30 if memory else float("nan"),
                    differs,
                    _kernels(partial(compiled, placed), options),
                )
            )
        del placed
    return results


def measure_step(options: ScaleBenchOptions, shape: MeshShape, alone: list[Result]) -> Result:
    """Times the training step on a mesh.

    Args:
      alone: the result of one device, where there is one.
    """
    config = step_bench.config_of(step_bench.StepBenchOptions(model=options.model, dtype=options.dtype))
    rows, length = options.step_tokens // options.length * shape.data, options.length * shape.context
    placement = Placement(shape, shape.make(jax.devices()[: shape.size]))
    placement.check(config, rows, length)
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    optimizer = steps.make_optimizer(ScheduleOptions(), 1000, 1e-3)
    del model
    with placement.active():
        state, shardings = placement.state(params, optimizer)
        del params
        text = np.random.default_rng(0).integers(0, config.vocab_size, (rows, length + 1)).astype(np.int32)
        batch = placement.batch(Batch(text[:, :-1], text[:, 1:], np.ones((rows, length), np.float32)))
        train: Any = steps.make_functions(graphdef, rest, optimizer, 1, shardings=shardings).train
        compiled = train.lower(state, batch).compile(_compiler_options(options))

        def once() -> Any:
            nonlocal state
            state, metrics = compiled(state, batch)
            return metrics

        jax.block_until_ready(once())
        times, kernels = _time(once, options), _kernels(once, options)
    ms, memory = float(np.median(times)), compiled.memory_analysis()
    return Result(
        f"step of {options.model}",
        str(shape),
        rows,
        length,
        shape.size,
        ms,
        min(times),
        max(times),
        alone[0].ms / ms if alone else 1.0,
        memory.temp_size_in_bytes / 2**30 if memory else float("nan"),
        float("nan"),
        kernels,
    )


def shapes_of(options: ScaleBenchOptions, part: str) -> list[MeshShape]:
    """Meshes that a part is timed on.

    Raises:
      RunError: an option is no mesh, or one of more devices than there are, or the sizes do not divide.
    """
    count = jax.device_count()
    shapes = [MeshShape(data=count), MeshShape(head=count), MeshShape(context=count)]
    if part == "step":
        shapes = [shapes[0], MeshShape(data=count, shard_parameters=True), shapes[2]]
    if options.mesh:
        try:
            shapes = [MeshShape.parse(text) for text in options.mesh]
        except ValueError as error:
            fail("mesh", "axes and devices", error)
    for shape in shapes:
        if shape.size > count:
            fail("mesh", f"at most {count} devices", shape)
    return shapes


def _check(options: ScaleBenchOptions) -> None:
    """Raises RunError where sizes do not divide."""
    for part in options.parts:
        for shape in shapes_of(options, part):
            heads = math.gcd(*options.heads)
            if part == "rule" and options.context_by == "heads" and heads % (shape.head * shape.context):
                fail("context_by", f"states, as {shape} does not divide {heads} heads", "heads")
            for tokens in options.tokens if part == "rule" else ():
                rows = options.rows if shape.context == 1 else shape.data
                if tokens < 1 or rows % shape.data or tokens % (rows * shape.context):
                    fail("tokens", f"a multiple of {rows} rows, which {shape} divides", tokens)
    if options.kernels and jax.default_backend() != "gpu":
        fail("kernels", "a GPU to profile", jax.default_backend())
    if options.length < 1 or options.step_tokens % options.length:
        fail("length", f"a divisor of --step-tokens {options.step_tokens}", options.length)
    if options.json is not None:
        check_writable("json", options.json)


def main(argv: list[str] | None = None) -> int:
    """Prints a line for each mesh."""
    options = parse(ScaleBenchOptions, argv, "gdn bench --what scale", ScaleBenchOptions(), __doc__)
    _check(options)
    console, results = Console(), []
    if not console.is_terminal:
        console.width = 200
    console.print(", ".join(f"{name} {value}" for name, value in versions().items()), highlight=False)

    def add(name: str, measured: Callable[[], list[Result]]) -> None:
        try:
            found = measured()
        except jax.errors.JaxRuntimeError as error:  # out of memory, among others: the other meshes may fit
            console.print(f"{name}: {one_line(error)}", highlight=False)
            return
        results.extend(found)
        for r in found:
            line = f"{r.what}, {r.mesh}: {r.rows}x{r.length}, {r.ms:.3f} ms, {100 * r.efficiency:.1f} %"
            differs = "" if math.isnan(r.differs) or r.devices == 1 else f", differs {r.differs:.1e}"
            console.print(line + differs, highlight=False)
            for kernel in r.kernels:
                line = f"    {kernel['ms']:8.3f} ms, {kernel['launches']:g} launches: {kernel['name']}"
                console.print(line, highlight=False, soft_wrap=True)
        if options.json is not None:
            content = {"versions": versions(), "results": [r._asdict() for r in results]}
            write_text(options.json, json.dumps(content, indent=1, default=str))

    if "rule" in options.parts:
        for tokens in options.tokens:
            times: dict[tuple[int, int], float] = {}
            for shape in shapes_of(options, "rule"):
                add(f"rule, {shape}, {tokens} tokens", partial(measure, options, shape, times, tokens))
    if "step" in options.parts:
        for shape in (MeshShape(), *(shape for shape in shapes_of(options, "step") if shape.size > 1)):
            alone = [r for r in results if r.what != "rule" and r.devices == 1]
            add(f"step, {shape}", lambda shape=shape, alone=alone: [measure_step(options, shape, alone)])
    console.print(_table(results))
    return 0 if results else 1


def _table(results: list[Result]) -> Table:
    table = Table()
    for name in ("what", "mesh", "rows x tokens"):
        table.add_column(name, no_wrap=True)
    for name in ("ms", "spread ms", "efficiency", "temporaries GiB", "differs"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in results:
        table.add_row(
            r.what,
            r.mesh,
            f"{r.rows}x{r.length}",
            f"{r.ms:.3f}",
            f"{r.fastest_ms:.3f} to {r.slowest_ms:.3f}",
            f"{100 * r.efficiency:.1f} %",
            f"{r.temporary_gib:.2f}",
            f"{r.differs:.1e}" if r.devices > 1 and r.what == "rule" else "",
        )
    return table
