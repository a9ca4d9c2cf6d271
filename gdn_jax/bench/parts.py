"""Times the parts of a model around the rule, and the products of its projections.

The parts and their bytes are in `model_parts`. The inputs are random. The time of a part is that of its kernels on
the device, from a profile. Backward is a call of the function that `jax.vjp` returns: the kernels of the gradient
alone. Of the SwiGLU and of the loss only their own kernels count, not the products around them; but the SwiGLU's
kernels multiply too, of many rows, which takes several times as long as their bytes.

The floor of a part is the time of its bytes at the speed of a copy, which is timed in the same run.

A product is timed by the clock over calls that follow one another without a pause, because a GPU that is always busy
may run at a lower clock than one that rests between calls. All is compiled as `gdn train` compiles it.

Where the kernels do not run, all times are by the clock and those of whole calls, in plain JAX, the products inside
them too.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from gdn_jax.bench import measure
from gdn_jax.bench.benchmark import Benchmark, Case, Result
from gdn_jax.bench.measure import Timing
from gdn_jax.bench.model_parts import NARROW, WIDE, Part, Product, parts, products
from gdn_jax.bench.sizes import model_config
from gdn_jax.commands.errors import fail
from gdn_jax.commands.fields import Positive
from gdn_jax.training.kernels import device_reason
from gdn_jax.training.peak import BANDWIDTH, of_device
from gdn_jax.training.steps import compiler_flags

PASSES = {
    "forward": "td,dn->tn",
    "input": "tn,dn->td",
    "weights": "td,tn->dn",
}
"""The products of a projection of T tokens from D to N channels: itself, and the gradients of its two operands."""


@dataclasses.dataclass(frozen=True)
class PartsBenchmark(Benchmark):
    """The parts around the rule, and products."""

    on_cpu: ClassVar[dict[str, Any]] = {"model": "tiny", "tokens": 4096, "length": 1024, "calls": 8}

    model: Literal["tiny", "0.4b", "1.3b"] = "0.4b"
    """The model whose sizes they have, as of gdn bench step."""
    tokens: Annotated[int, Positive] = 65536
    """Tokens of a call."""
    length: Annotated[int, Positive] = 8192
    """Tokens of a row."""
    only: tuple[str, ...] = ()
    """Only the parts and products whose name contains one of these, as in "SwiGLU" "logits"."""
    calls: Annotated[int, Positive] = 64
    """Calls that follow one another in one measurement by the clock."""

    def asked(self) -> tuple[list[Part], list[Product]]:
        """The parts and products that are timed."""
        config = model_config(self.model, dtype="bfloat16")

        def named(name: str) -> bool:
            return any(part in name for part in self.only or ("",))

        some_parts = parts(config, self.tokens // self.length, self.length)
        some_products = products(config, self.tokens)
        return [x for x in some_parts if named(x.name)], [x for x in some_products if named(x.name)]

    def check(self) -> None:
        """See `Benchmark.check`."""
        super().check()
        if self.tokens % self.length:
            fail("length", f"a divisor of --tokens {self.tokens}", self.length)
        if not any(self.asked()):
            fail("only", "parts of names such as residual sum and RMSNorm", " ".join(self.only))

    def cases(self, note: Callable[[str], None]) -> Iterator[Case]:
        """A case for the copy, and one for each part and product."""
        x = _normal(
            self.seed, jax.ShapeDtypeStruct((self.tokens, 2 * model_config(self.model).mlp_size), WIDE)
        )
        copy = self.timing(partial(_jit(jnp.copy), x))
        speed = 2 * x.nbytes / copy.ms * 1e3
        del x
        published = of_device(BANDWIDTH)
        numbers = {
            "TB/s": speed / 1e12,
            "of published": speed / published if published else None,
        }
        yield Case({"part": "copy"}, lambda: [Result({"part": "copy", "pass": ""}, copy, numbers)])
        some_parts, some_products = self.asked()
        for part in some_parts:
            yield Case({"part": part.name}, partial(self.time_part, part, speed))
        for product in some_products:
            yield Case({"part": product.name}, partial(self.time_product, product))

    def timing(self, call: Callable[[], Any], kernels: str = "") -> Timing:
        """Times a call by its kernels, of such names; as a whole and by the clock where there are none."""
        if device_reason():
            return measure.by_clock(call, self.repeats, self.calls)
        return measure.by_device(call, self.repeats, kernels)

    def time_part(self, part: Part, speed: float) -> Iterator[Result]:
        """Times the passes of a part; speed: bytes that a copy moves in a second."""

        def result(what: str, size: int, call: Callable[[], Any]) -> Result:
            timing = self.timing(call, part.kernels)
            numbers = {"GB": size / 1e9, "x floor": timing.ms / 1e3 * speed / size}
            return Result({"part": part.name, "pass": what}, timing, numbers)

        arguments = [_normal(self.seed + i, x) for i, x in enumerate(part.arguments)]
        if part.forward_bytes is not None:
            yield result("forward", part.forward_bytes, partial(_jit(part.call), *arguments))
        if part.backward_bytes is not None:
            vjp = _jit(lambda *x: jax.vjp(part.call, *x)[1])(*arguments)
            del arguments
            shapes, treedef = jax.tree.flatten(jax.eval_shape(part.call, *part.arguments))
            cotangents = treedef.unflatten(_normal(self.seed + 100 + i, x) for i, x in enumerate(shapes))
            yield result(
                "backward", part.backward_bytes, partial(_jit(lambda vjp, x: vjp(x)), vjp, cotangents)
            )

    def time_product(self, product: Product) -> Iterator[Result]:
        """Times a projection and the two products of its gradient."""
        sizes = dict(t=product.tokens, d=product.inputs, n=product.outputs)
        flops = 2 * product.tokens * product.inputs * product.outputs
        for what, subscripts in PASSES.items():
            shapes = (tuple(sizes[c] for c in names) for names in subscripts.split("->")[0].split(","))
            x, y = (
                _normal(self.seed + i, jax.ShapeDtypeStruct(shape, NARROW)) for i, shape in enumerate(shapes)
            )
            call = _jit(partial(jnp.einsum, subscripts, preferred_element_type=product.dtype))
            timing = measure.by_clock(partial(call, x, y), self.repeats, self.calls)
            numbers = {"TFLOP/s": flops / timing.ms / 1e9}
            about = {"part": product.name, "pass": what, "sizes": "x".join(map(str, sizes.values()))}
            yield Result(about, timing, numbers)


def _jit(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(function, compiler_options=compiler_flags(deterministic=True))


@partial(jax.jit, static_argnums=1)
def _normal(seed, like: jax.ShapeDtypeStruct) -> jax.Array:
    key = jax.random.key(seed, impl="rbg")  # compiles in a tenth of the default's time
    return jax.random.normal(key, like.shape).astype(like.dtype)
