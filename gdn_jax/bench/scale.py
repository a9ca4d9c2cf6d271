"""How much faster several devices are than one.

Times rules, forward and backward, on meshes that split their rows, heads or tokens, and on one device with the same
arrays in the same run. Efficiency is one device's time over n times the time of n. Results are compared with one
device's before a time counts: both may be off by rounding, together by twice the bound of one. A time is the mean of
calls that follow one another without a pause, by the clock.

Then the training steps of models, with as many tokens for each device as for one: more rows over data, longer rows
over context. Efficiency is one device's time over the time of n.

Next to each time stand the bytes that a device sends, read from the compiled program, its temporary memory, and the
seconds of lowering, compiling and running it first. Programs are compiled several at a time.

The defaults fit GPUs of 80 GB, of which JAX takes 60 GiB. Arguments of the rule have 25 KB a token at 16 and 32 heads
of width 128, and outputs and gradients as much. The first device holds the arguments twice and the results of two
calls, the last one the expected results: 30 GiB at 262144 tokens on one device, and the kernels' own memory. The step
of the model 0.4b needs 34 GiB at 32768 tokens.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from gdn_jax import delta_rule, erase_then_delta_rule, gated_delta_rule
from gdn_jax.bench import measure, passes, profiles, training
from gdn_jax.bench import rows as bench_rows
from gdn_jax.bench.benchmark import Benchmark, Case, Result, Width
from gdn_jax.bench.collectives import traffic
from gdn_jax.bench.measure import Timing
from gdn_jax.bench.rows import Inputs, Row
from gdn_jax.bench.sizes import model_config
from gdn_jax.bench.together import Lowering, Program, compiled_together
from gdn_jax.bench.training import StepProblem
from gdn_jax.commands.errors import fail
from gdn_jax.commands.fields import Distinct, Positive
from gdn_jax.commands.files import parse_json
from gdn_jax.models import ModelConfig
from gdn_jax.parallel import context
from gdn_jax.parallel.mesh import CONTEXT, DATA, HEAD, MeshShape
from gdn_jax.training.placement import Placement

TOKENS, STATES = PartitionSpec(DATA, CONTEXT, HEAD), PartitionSpec(DATA, HEAD)
"""Axes of arrays with tokens, and of states."""


class ScaledRule(NamedTuple):
    """A rule by plain jit and over split tokens, and the kind of its inputs, one of `bench.rows.GATES`."""

    whole: Callable[..., Any]
    over_tokens: Callable[..., Any]
    gates: str


RULES = {
    "gated_delta_rule": ScaledRule(gated_delta_rule, context.gated_delta_rule, "head"),
    "delta_rule": ScaledRule(delta_rule, context.delta_rule, "uniform"),
    "erase_then_delta_rule": ScaledRule(erase_then_delta_rule, context.erase_then_delta_rule, "erase"),
}
"""The rules by name: a decay of each head, of each channel, and of each channel with an erasure."""


@dataclasses.dataclass(frozen=True)
class ScaleBenchmark(Benchmark):
    """The rule and a training step on meshes of several devices."""

    on_cpu: ClassVar[dict[str, Any]] = {
        "tokens": (4096,),
        "heads": (2, 4),
        "width": 32,
        "model": ("tiny",),
        "length": 256,
        "step_tokens": 1024,
    }

    repeats: Annotated[int, Positive] = 5
    """Measurements."""
    mesh: tuple[str, ...] = ()
    """Meshes to time, as in data=2 head=2 context=2. Default: all devices along each axis; of the step, with whole
    and with sharded parameters along data, and along context."""
    parts: Annotated[tuple[Literal["rule", "step"], ...], Distinct] = ("rule", "step")
    """Rules, forward and backward; training steps of models."""
    rules: Annotated[
        tuple[Literal["gated_delta_rule", "delta_rule", "erase_then_delta_rule"], ...], Distinct
    ] = ("gated_delta_rule",)
    """The rules: with a decay of each head, of each channel, and of each channel with an erasure."""
    tokens: Annotated[tuple[int, ...], Distinct, Positive] = (262144,)
    """Tokens of all rows together in the rule, one group of lines for each."""
    rows: Annotated[int, Positive] = 8
    """Rows that the tokens are cut into where the mesh has no context axis; there they are one row."""
    heads: Annotated[tuple[int, int], Positive] = (16, 32)
    """Key heads and value heads."""
    width: Annotated[int, Width] = 128
    """Width K = V of a head."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """dtype of q, k, v."""
    implementation: str | None = None
    """Implementation of the rule; default: the fastest that supports the call."""
    model: Annotated[tuple[Literal["tiny", "0.4b", "1.3b"], ...], Distinct] = ("0.4b",)
    """Sizes of the models of the step, as of gdn bench step."""
    matmul: Annotated[tuple[Literal["default", "float8", "float8_e4m3"], ...], Distinct] = ("default",)
    """Dtypes of the products of projections in the step, as of gdn train."""
    xla: tuple[str, ...] = ()
    """Lists of options of XLA with which the steps on several devices are timed too, as in
    xla_gpu_enable_latency_hiding_scheduler=true,xla_gpu_all_reduce_combine_threshold_bytes=8388608."""
    length: Annotated[int, Positive] = 8192
    """Tokens of a row of the step on one device."""
    step_tokens: Annotated[int, Positive] = 32768
    """Tokens of a step for each device."""
    calls: Annotated[int, Positive] = 8
    """Calls that follow one another in one measurement."""
    context_by: Literal["states", "heads"] | None = None
    """Whether the devices of a context axis hand to each other states in the rule, or all tokens of some heads.
    Default: the one that is predicted to take less time."""
    at_once: Annotated[int, Positive] = 4
    """Programs that are compiled at the same time. With 1 the seconds of each are its own."""
    kernels: bool = False
    """Also prints the time of each kernel of the first GPU in a call, from a profile."""

    def check(self) -> None:
        """See `Benchmark.check`."""
        super().check()
        for part in self.parts:
            for shape in self.shapes(part):
                heads = math.gcd(*self.heads)
                if part == "rule" and self.context_by == "heads" and heads % (shape.head * shape.context):
                    fail("context_by", f"states, as {shape} does not divide {heads} heads", "heads")
                for tokens in self.tokens if part == "rule" else ():
                    rows = self.rows_of(shape)
                    if rows % shape.data or tokens % (rows * shape.context):
                        fail("tokens", f"a multiple of {rows} rows, which {shape} divides", tokens)
        if self.kernels and not measure.on_gpu():
            fail("kernels", "a GPU to profile", jax.default_backend())
        if self.step_tokens % self.length:
            fail("length", f"a divisor of --step-tokens {self.step_tokens}", self.length)
        for text in self.xla:
            self.flags(text)

    def shapes(self, part: str) -> list[MeshShape]:
        """Meshes that a part is timed on.

        Raises:
          RunError: an option is no mesh, or one of more devices than there are.
        """
        count = jax.device_count()
        shapes = [MeshShape(data=count), MeshShape(head=count), MeshShape(context=count)]
        if part == "step":
            shapes = [shapes[0], MeshShape(data=count, shard_parameters=True), shapes[2]]
            if count > 2 and count % 2 == 0:
                shapes.append(MeshShape(data=count // 2, context=2, shard_parameters=True))
        if self.mesh:
            try:
                shapes = [MeshShape.parse(text) for text in self.mesh]
            except ValueError as error:
                fail("mesh", "axes and devices", error)
        for shape in shapes:
            if shape.size > count:
                fail("mesh", f"at most {count} devices", shape)
        if part == "rule":  # which has no parameters
            shapes = [dataclasses.replace(shape, shard_parameters=False) for shape in shapes]
        return [*dict.fromkeys(shapes)]

    def rows_of(self, shape: MeshShape) -> int:
        """Rows that the tokens of the rule are cut into on a mesh."""
        return self.rows if shape.context == 1 else shape.data

    def flags(self, text: str = "") -> dict[str, Any]:
        """Compiler options: what a text of --xla names, and what makes a profile one of whole graphs.

        Raises:
          RunError: the text is no list of options.
        """
        options: dict[str, Any] = (
            {"xla_enable_command_buffers_during_profiling": True} if self.kernels else {}
        )
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            try:
                options[name] = parse_json(value)
            except ValueError:
                fail("xla", "options with a value, as in xla_gpu_enable_x=true", part)
        return options

    def cases(self, note: Callable[[str], None]) -> Iterator[Case]:
        """A case for each rule, number of tokens and mesh; then for each model, dtype of products and mesh."""
        if "rule" in self.parts:
            shapes = itertools.groupby(sorted(self.shapes("rule"), key=self.rows_of), self.rows_of)
            for (rows, some), tokens, rule in itertools.product(
                [(rows, [*some]) for rows, some in shapes][::-1], self.tokens, self.rules
            ):
                yield from _Rows(self, rule, rows, tokens // rows, some).cases()
        if "step" in self.parts:
            yield from _Steps(self).cases()

    def timed(self, call: Callable[[], Any], program: Program) -> tuple[Timing, dict[str, Any]]:
        """The time of a call and what is known of its program; if asked for, each kernel of the first GPU."""
        timing = measure.by_clock(call, self.repeats, self.calls)
        sent = traffic(program.compiled.as_text() or "")
        numbers: dict[str, Any] = {
            "temp GiB": measure.temporary_gib(program.compiled),
            "sent MiB": sent.total / 2**20,
            "sent": sent._asdict(),
            "lower s": program.lower_s,
            "compile s": program.compile_s,
        }
        if self.kernels:
            profile = profiles.profile(partial(measure.in_a_row, call, self.calls), 1)
            found = profiles.kernels(profile, jax.devices()[0].local_hardware_id)
            numbers["by kernel"] = [x._asdict() for x in profiles.by_kernel(found, self.calls)]
        return timing, numbers

    def summary(self, results: list[Result]) -> list[str]:
        """Kernels of each line, the longest first, where they are asked for."""
        return [
            f"{r.about['mesh']}: {x['ms']:.3f} ms, {x['launches']:g} launches: {x['name']}"
            for r in results
            for x in r.numbers.get("by kernel", ())
        ]


@dataclasses.dataclass
class _Rows:
    """A rule on the same rows, on one device and on meshes."""

    options: ScaleBenchmark
    rule: str
    rows: int
    length: int
    shapes: list[MeshShape]
    expected: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    """Results of one device, on the last device; empty where it had no room for them."""
    alone: float = math.nan
    """Milliseconds of one device."""

    def cases(self) -> Iterator[Case]:
        """A case for one device, then for each mesh."""
        self.shapes = [*dict.fromkeys((MeshShape(), *self.shapes))]
        for shape in self.shapes:
            about = {"part": "rule", "rule": self.rule, "mesh": str(shape), "rows": self.rows}
            yield Case(about | {"length": self.length}, partial(self.time, shape))

    def time(self, shape: MeshShape) -> Iterator[Result]:
        """Compares a mesh with one device and times it."""
        about = {"part": "rule", "rule": self.rule, "mesh": str(shape), "rows": self.rows}
        about |= {"length": self.length}
        program, x = self.programs[shape].result(), self.x
        args = jax.tree.map(jax.device_put, self._args(x), self._places(shape))
        last = jax.devices()[-1]
        out = passes.named("training", jax.device_put(program.compiled(*args), last))
        errors = {name: float(_difference(out[name], y)) for name, y in self.expected.items()}
        if shape.size == 1:
            self.expected = out
        del out
        if failure := passes.miss(errors, x, self.options.dtype, slack=2.0):
            yield Result(about, errors=errors, failure=failure)
            return
        timing, numbers = self.options.timed(partial(program.compiled, *args), program)
        if shape.size == 1:
            self.alone = timing.ms
        numbers["efficiency"] = self.alone / (shape.size * timing.ms)
        yield Result(about, timing, numbers, errors)

    @cached_property
    def x(self) -> Inputs:
        """Random arguments, on the first device."""
        return self._inputs()

    @cached_property
    def programs(self) -> dict[MeshShape, "Future[Program]"]:
        """The programs of all meshes."""
        flags = self.options.flags()
        todo: dict[MeshShape, Lowering] = {x: (partial(self._lowered, x), flags) for x in self.shapes}
        return compiled_together(todo, self.options.at_once)

    def _inputs(self) -> Inputs:
        o, rows, length = self.options, self.rows, self.length
        row = Row(*o.heads, (length,) * rows, width=o.width, gates=RULES[self.rule].gates)
        x, states = bench_rows.inputs(row, o.dtype, o.seed), ("initial_state", "dh_T")
        arrays = {name: y for name, y in x._asdict().items() if y is not None and name not in states}
        return x._replace(**{name: y.reshape(rows, length, *y.shape[2:]) for name, y in arrays.items()})

    def _args(self, x: Inputs) -> tuple[Any, ...]:
        return x.initial_state, x.tokens, x.do, x.dh_T

    def _places(self, shape: MeshShape) -> tuple[Any, ...]:
        mesh = shape.make(jax.devices()[: shape.size])
        states, tokens = NamedSharding(mesh, STATES), NamedSharding(mesh, TOKENS)
        return states, (tokens,) * (7 if RULES[self.rule].gates == "erase" else 5), tokens, states

    def _lowered(self, shape: MeshShape) -> jax.stages.Lowered:
        places = self._places(shape)
        args = jax.eval_shape(lambda: self._args(self._inputs()))
        args = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), args, places)
        with jax.set_mesh(places[0].mesh):
            return jax.jit(partial(passes.training, self._call(shape))).lower(*args)

    def _call(self, shape: MeshShape) -> Callable[..., Any]:
        """The rule of (tokens, state) on the mesh that is set, over shards of tokens where it has a context axis."""
        rule = RULES[self.rule]
        known: dict[str, Any] = dict(implementation=self.options.implementation)
        if shape.context == 1:
            return lambda tokens, state: rule.whole(*tokens, initial_state=state, **known)
        known |= dict(axis_name=CONTEXT, by=self.options.context_by)
        return jax.shard_map(
            lambda tokens, state: rule.over_tokens(*tokens, initial_state=state, **known),
            mesh=jax.sharding.get_abstract_mesh(),
            in_specs=(TOKENS, STATES),
            out_specs=(TOKENS, STATES),
        )


class _Step(NamedTuple):
    """A training step by the names of its options."""

    model: str
    matmul: str
    shape: MeshShape
    xla: str = ""


@dataclasses.dataclass
class _Steps:
    """All training steps."""

    options: ScaleBenchmark
    alone: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    """Milliseconds of one device by model and dtype of products."""
    kept: tuple[ModelConfig, Any] | None = None
    """The configuration whose weights were made last, and these, on the host."""

    @cached_property
    def steps(self) -> list[_Step]:
        """The steps in order."""
        o = self.options
        shapes = [shape for shape in o.shapes("step") if shape.size > 1]
        on_meshes = [*itertools.product(shapes, dict.fromkeys(("", *o.xla)))]
        return [
            _Step(*names, *where)
            for names in itertools.product(o.model, o.matmul)
            for where in ((MeshShape(), ""), *on_meshes)
        ]

    def cases(self) -> Iterator[Case]:
        """A case for each step, one device before its meshes."""
        for step in self.steps:
            yield Case(self._about(step), partial(self.time, step))

    def _about(self, step: _Step) -> dict[str, Any]:
        problem = self._problem(step)
        about: dict[str, Any] = {"part": f"step of {step.model}", "mesh": str(step.shape)}
        about |= {"rows": problem.rows, "length": problem.length}
        return about | {"matmul": step.matmul} | ({"xla": step.xla} if self.options.xla else {})

    def _problem(self, step: _Step) -> StepProblem:
        o, shape = self.options, step.shape
        config = model_config(step.model, dtype=o.dtype, matmul=step.matmul)
        rows, length = o.step_tokens // o.length * shape.data, o.length * shape.context
        return StepProblem(
            config, rows, length, Placement(shape, shape.make(jax.devices()[: shape.size])), o.seed
        )

    @cached_property
    def programs(self) -> dict[_Step, "Future[Program]"]:
        """The programs of all steps."""

        def lower(step: _Step) -> jax.stages.Lowered:
            problem = self._problem(step)
            problem.placement.check(problem.config, problem.rows, problem.length)
            return training.lowered(problem)

        todo: dict[_Step, Lowering] = {
            step: (partial(lower, step), self.options.flags(step.xla)) for step in self.steps
        }
        return compiled_together(todo, self.options.at_once)

    def time(self, step: _Step) -> Iterator[Result]:
        """Times a training step."""
        program, problem = self.programs[step].result(), self._problem(step)
        names, before = step[:2], program.lower_s + program.compile_s
        if self.kept is None or self.kept[0] != problem.config:
            params, rest = training.weights(problem)
            self.kept = problem.config, (jax.tree.map(np.asarray, params), rest)
        with training.running(problem, program.compiled, self.kept[1], before) as running:
            timing, numbers = self.options.timed(running.once, program)
        if step.shape.size == 1:
            self.alone[names] = timing.ms
        tokens = problem.rows * problem.length
        numbers |= {"first s": running.first_step_s, "run s": running.run_s, "loss": running.loss}
        numbers |= {
            "tokens/s": tokens / timing.ms * 1e3,
            "efficiency": self.alone.get(names, math.nan) / timing.ms,
        }
        yield Result(self._about(step), timing, numbers)


@jax.jit
def _difference(got, want) -> jax.Array:
    """Relative rms difference."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.sqrt(jnp.mean((got - want) ** 2) / jnp.mean(want**2))
