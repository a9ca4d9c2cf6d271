"""How much faster several devices are than one.

Times the rule, forward and backward, on meshes that split its rows, its heads or its tokens, beside one device on
the same arrays in the same run. Efficiency is the time of one device over n times that of n. Results are compared
with one device's before a time counts: both may be off by rounding, together by twice the bound of one. A time is
the mean of calls that follow one another without a pause, by the clock.

Then the training step of a model, with as many tokens for each device as for one: more rows over data, longer rows
over context. Efficiency is the time of one device over that of n.

The defaults fit GPUs of 80 GB, of which JAX takes 60 GiB. Arguments of the rule have 25 KB a token at 16 and 32 heads
of width 128, and outputs and gradients as much. The first device holds the arguments twice, the expected results and
those of two calls: 30 GiB at 262144 tokens, and the kernels' own memory beside. The step of the model 0.4b needs
34 GiB at 32768 tokens.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from gdn_jax import gated_delta_rule
from gdn_jax.bench import measure, passes, profiles
from gdn_jax.bench import rows as bench_rows
from gdn_jax.bench.benchmark import Benchmark, Case, Result, Width, wrong
from gdn_jax.bench.measure import Timing
from gdn_jax.bench.rows import Inputs, Row
from gdn_jax.bench.sizes import model_config
from gdn_jax.bench.training import training_step
from gdn_jax.checks.accuracy import NAMES, bound, cancelling
from gdn_jax.commands.errors import fail
from gdn_jax.commands.fields import Distinct, Positive
from gdn_jax.parallel import context
from gdn_jax.parallel.mesh import CONTEXT, DATA, HEAD, MeshShape
from gdn_jax.training.placement import Placement

TOKENS, STATES = PartitionSpec(DATA, CONTEXT, HEAD), PartitionSpec(DATA, HEAD)
"""Axes of arrays with tokens, and of states."""


@dataclasses.dataclass(frozen=True)
class ScaleBenchmark(Benchmark):
    """The rule and a training step on meshes of several devices."""

    on_cpu: ClassVar[dict[str, Any]] = {
        "tokens": (4096,),
        "heads": (2, 4),
        "width": 32,
        "model": "tiny",
        "length": 256,
        "step_tokens": 1024,
    }

    repeats: Annotated[int, Positive] = 5
    """Measurements."""
    mesh: tuple[str, ...] = ()
    """Meshes to time, as in data=2 head=2 context=2. Default: all devices along each axis; of the step, with whole
    and with sharded parameters along data, and along context."""
    parts: Annotated[tuple[Literal["rule", "step"], ...], Distinct] = ("rule", "step")
    """The rule, forward and backward; the training step of a model."""
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
    model: Literal["tiny", "0.4b", "1.3b"] = "0.4b"
    """Size of the model of the step, as of gdn bench step."""
    length: Annotated[int, Positive] = 8192
    """Tokens of a row of the step on one device."""
    step_tokens: Annotated[int, Positive] = 32768
    """Tokens of a step for each device."""
    calls: Annotated[int, Positive] = 8
    """Calls that follow one another in one measurement."""
    context_by: Literal["states", "heads"] | None = None
    """Whether the devices of a context axis hand to each other states in the rule, or all tokens of some heads.
    Default: the one that is predicted to take less time."""
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
                    rows = self.rows if shape.context == 1 else shape.data
                    if rows % shape.data or tokens % (rows * shape.context):
                        fail("tokens", f"a multiple of {rows} rows, which {shape} divides", tokens)
        if self.kernels and not measure.on_gpu():
            fail("kernels", "a GPU to profile", jax.default_backend())
        if self.step_tokens % self.length:
            fail("length", f"a divisor of --step-tokens {self.step_tokens}", self.length)

    def shapes(self, part: str) -> list[MeshShape]:
        """Meshes that a part is timed on.

        Raises:
          RunError: an option is no mesh, or one of more devices than there are.
        """
        count = jax.device_count()
        shapes = [MeshShape(data=count), MeshShape(head=count), MeshShape(context=count)]
        if part == "step":
            shapes = [shapes[0], MeshShape(data=count, shard_parameters=True), shapes[2]]
        if self.mesh:
            try:
                shapes = [MeshShape.parse(text) for text in self.mesh]
            except ValueError as error:
                fail("mesh", "axes and devices", error)
        for shape in shapes:
            if shape.size > count:
                fail("mesh", f"at most {count} devices", shape)
        return shapes

    def cases(self, note: Callable[[str], None]) -> Iterator[Case]:
        """A case for each mesh, number of tokens and part; the step on one device first."""
        if "rule" in self.parts:
            for tokens in self.tokens:
                for shape in dict.fromkeys(self.shapes("rule")):
                    about = {"part": "rule", "mesh": str(shape), "tokens": tokens}
                    yield Case(about, partial(self.time_rule, shape, tokens))
        if "step" in self.parts:
            times: list[float] = []
            for shape in (MeshShape(), *(shape for shape in self.shapes("step") if shape.size > 1)):
                yield Case({"part": "step", "mesh": str(shape)}, partial(self.time_step, shape, times))

    def time_rule(self, shape: MeshShape, tokens: int) -> Iterator[Result]:
        """Times one device, and a mesh on the same arrays."""
        rows = self.rows if shape.context == 1 else shape.data
        x, expected, alone = self._inputs(rows, tokens // rows), {}, math.nan
        bounds = {name: 2 * bound(name, self.dtype, cancelling=cancelling(x.g, x.k)) for name in NAMES}
        one, first = MeshShape(), jax.devices()[0]
        for where in dict.fromkeys((one, shape)):
            mesh = where.make(jax.devices()[: where.size])
            given = ((x.initial_state, STATES), (x.tokens, TOKENS), (x.do, TOKENS), (x.dh_T, STATES))
            args = [jax.device_put(y, NamedSharding(mesh, axes)) for y, axes in given]
            with jax.set_mesh(mesh):
                step = jax.jit(partial(passes.training, self._rule(where)))
                program = step.lower(*args).compile(self._compiler_options())
            out = passes.named("training", jax.device_put(program(*args), first))
            errors = {name: float(_difference(out[name], y)) for name, y in expected.items()}
            expected = out if where == one else {}
            del out
            about = {"part": "rule", "mesh": str(where), "rows": rows, "length": tokens // rows}
            if failure := wrong(errors, bounds):
                yield Result(about, errors=errors, failure=failure)
                return
            timing, numbers = self._timed(partial(program, *args), program)
            alone = timing.ms if where == one else alone
            numbers["efficiency"] = alone / (where.size * timing.ms)
            yield Result(about, timing, numbers, errors)
            del args

    def _inputs(self, rows: int, length: int) -> Inputs:
        """Random arguments of so many rows, on the first device."""
        row = Row(*self.heads, (length,) * rows, width=self.width)
        x = bench_rows.inputs(row, self.dtype, self.seed)

        arrays = {name: getattr(x, name) for name in ("q", "k", "v", "g", "beta", "do")}
        return x._replace(**{name: y.reshape(rows, length, *y.shape[2:]) for name, y in arrays.items()})

    def _rule(self, shape: MeshShape) -> Callable[..., Any]:
        """The rule of (tokens, state) on the mesh that is set, over shards of tokens where it has a context axis."""
        known: dict[str, Any] = dict(implementation=self.implementation)
        if shape.context == 1:
            return lambda tokens, state: gated_delta_rule(*tokens, initial_state=state, **known)
        known |= dict(axis_name=CONTEXT, by=self.context_by)
        return jax.shard_map(
            lambda tokens, state: context.gated_delta_rule(*tokens, initial_state=state, **known),
            mesh=jax.sharding.get_abstract_mesh(),
            in_specs=(TOKENS, STATES),
            out_specs=(TOKENS, STATES),
        )

    def time_step(self, shape: MeshShape, alone: list[float]) -> Iterator[Result]:
        """Times the training step on a mesh.

        Args:
          alone: the time of one device, if that was measured; filled here.
        """
        config = model_config(self.model, dtype=self.dtype)
        rows, length = self.step_tokens // self.length * shape.data, self.length * shape.context
        placement = Placement(shape, shape.make(jax.devices()[: shape.size]))
        placement.check(config, rows, length)
        with training_step(config, rows, length, placement, self.seed, **self._compiler_options()) as step:
            timing, numbers = self._timed(step.once, step.program)
        if shape.size == 1:
            alone.append(timing.ms)
        if alone:
            numbers["efficiency"] = alone[0] / timing.ms
        about = {"part": f"step of {self.model}", "mesh": str(shape), "rows": rows, "length": length}
        yield Result(about, timing, numbers)

    def _timed(self, call: Callable[[], Any], program: Any) -> tuple[Timing, dict[str, Any]]:
        """The time of a call, its temporary memory and, if asked for, each kernel of the first GPU."""
        timing = measure.by_clock(call, self.repeats, self.calls)
        numbers: dict[str, Any] = {"temp GiB": measure.temporary_gib(program)}
        if self.kernels:
            profile = profiles.profile(partial(measure.in_a_row, call, self.calls), 1)
            found = profiles.kernels(profile, jax.devices()[0].local_hardware_id)
            numbers["by kernel"] = [x._asdict() for x in profiles.by_kernel(found, self.calls)]
        return timing, numbers

    def _compiler_options(self) -> dict[str, Any]:
        """Compiler options with which a profile is of the graphs that are timed, not of single launches."""
        return {"xla_enable_command_buffers_during_profiling": True} if self.kernels else {}

    def summary(self, results: list[Result]) -> list[str]:
        """Kernels of each line, the longest first, where they are asked for."""
        return [
            f"{r.about['mesh']}: {x['ms']:.3f} ms, {x['launches']:g} launches: {x['name']}"
            for r in results
            for x in r.numbers.get("by kernel", ())
        ]


@jax.jit
def _difference(got, want) -> jax.Array:
    """Relative rms difference."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.sqrt(jnp.mean((got - want) ** 2) / jnp.mean(want**2))
