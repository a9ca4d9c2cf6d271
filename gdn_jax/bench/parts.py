"""`gdn bench --what parts`: times the parts of a model around the rule, and the products of its projections.

Which they are, and how many bytes they have to move, is in `model_parts`. The inputs are random. The time of a part
is what its kernels take on the device, from a profile. Backward is a call of the function that `jax.vjp` returns: the
kernels of the gradient alone. Of the SwiGLU and of the loss only their own kernels count, not the products around
them; but the SwiGLU's kernels multiply too, of many rows, which takes several times as long as their bytes.

The floor of a part is what its bytes take at the speed of a copy, which is timed in the same run.

A product is timed by the clock over calls that follow one another without a pause, because a GPU that is always busy
may run at a lower clock than one that rests between calls. All is compiled as `gdn train` compiles it.

Without a GPU all times are by the clock and those of whole calls, in plain JAX, the products inside them too.
"""

import dataclasses
import json
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from gdn_jax import supported_implementations
from gdn_jax.bench import device_time
from gdn_jax.bench.device_time import Timing
from gdn_jax.bench.model_parts import NARROW, WIDE, Part, Product, parts, products
from gdn_jax.bench.step import model_config
from gdn_jax.commands.errors import fail, one_line
from gdn_jax.commands.files import check_writable, write_text
from gdn_jax.commands.parsing import parse
from gdn_jax.commands.versions import versions
from gdn_jax.training.peak import BANDWIDTH, of_device
from gdn_jax.training.steps import compiler_flags

PASSES = {
    "": "td,dn->tn",
    ", cotangent of the input": "tn,dn->td",
    ", gradient of the weights": "td,tn->dn",
}
"""The products of a projection of T tokens from D to N channels."""


@dataclasses.dataclass(frozen=True)
class PartsBenchOptions:
    """Options of `gdn bench --what parts`."""

    what: Literal["parts"] = "parts"
    """The parts around the rule, and products."""
    model: Literal["tiny", "0.4b", "1.3b"] = "0.4b"
    """The model whose sizes they have, as of gdn bench --what step."""
    tokens: int = 65536
    """Tokens of a call."""
    length: int = 8192
    """Tokens of a row."""
    only: tuple[str, ...] = ()
    """Only the parts and products whose name contains one of these, as in "SwiGLU softmax"."""
    calls: int = 64
    """Calls that follow one another in one measurement by the clock."""
    repeats: int = 9
    """Measurements."""
    json: Path | None = None
    """File for all numbers, rewritten after every line."""


class Result(NamedTuple):
    """One pass of a part, or one product."""

    name: str
    what: str
    work: int
    """Bytes of a part's floor, operations of a product."""
    timing: Timing


def measure_copy(options: PartsBenchOptions, width: int) -> float:
    """Bytes that a copy of an array [tokens, width] reads and writes in a second."""
    x = _normal(0, jax.ShapeDtypeStruct((options.tokens, width), WIDE))
    return 2 * x.nbytes / _time(partial(_jit(jnp.copy), x), options).median_ms * 1e3


def measure(part: Part, options: PartsBenchOptions) -> list[Result]:
    """Times the passes of a part.

    Raises:
      RunError: no kernel that counts has run.
    """
    arguments, found = [_normal(i, x) for i, x in enumerate(part.arguments)], []
    if part.forward_bytes is not None:
        timing = _time(partial(_jit(part.call), *arguments), options, part.kernels)
        found.append(Result(part.name, "forward", part.forward_bytes, timing))
    if part.backward_bytes is not None:
        vjp = _jit(lambda *x: jax.vjp(part.call, *x)[1])(*arguments)
        del arguments
        shapes, treedef = jax.tree.flatten(jax.eval_shape(part.call, *part.arguments))
        cotangents = treedef.unflatten(_normal(100 + i, x) for i, x in enumerate(shapes))
        timing = _time(partial(_jit(lambda vjp, x: vjp(x)), vjp, cotangents), options, part.kernels)
        found.append(Result(part.name, "backward", part.backward_bytes, timing))
    return found


def measure_product(product: Product, options: PartsBenchOptions) -> list[Result]:
    """Times a projection and the two products of its gradient."""
    T, D, N = product.tokens, product.inputs, product.outputs
    sizes, found = dict(t=T, d=D, n=N), []
    for suffix, subscripts in PASSES.items():
        shapes = (tuple(sizes[c] for c in names) for names in subscripts.split("->")[0].split(","))
        x, y = (_normal(i, jax.ShapeDtypeStruct(shape, NARROW)) for i, shape in enumerate(shapes))
        call = _jit(partial(jnp.einsum, subscripts, preferred_element_type=product.dtype))
        timing = _by_clock(partial(call, x, y), options)
        found.append(Result(product.name + suffix, f"{T} x {D} x {N}", 2 * T * D * N, timing))
    return found


def _jit(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(function, compiler_options=compiler_flags(deterministic=True))


@partial(jax.jit, static_argnums=1)
def _normal(seed, like: jax.ShapeDtypeStruct) -> jax.Array:
    key = jax.random.key(seed, impl="rbg")  # compiles in a tenth of the default's time
    return jax.random.normal(key, like.shape).astype(like.dtype)


def _time(call: Callable[[], Any], options: PartsBenchOptions, names: str = "") -> Timing:
    """Time of a call: on a GPU that of its kernels whose names begin so, elsewhere by the clock."""
    if jax.default_backend() != "gpu":
        return _by_clock(call, options)
    for _ in range(device_time.WARM_UP):
        jax.block_until_ready(call())
    profile = device_time.profile(lambda: jax.block_until_ready(call()), options.repeats)
    found = [kernel for kernel in device_time.kernels(profile) if re.match(names, kernel.name)]
    if not found or len(found) % options.repeats:
        expected = f"sizes for which every call runs the same kernels {names}".rstrip()
        fail("model", expected, f"{options.model}, {len(found)} kernels in {options.repeats} calls")
    each = np.reshape([k.end_ns - k.start_ns for k in found], (options.repeats, -1)) / 1e6
    kernels = [k.name for k in found[: each.shape[1]]]
    return Timing.of(each.sum(1).tolist(), tuple(zip(kernels, np.median(each, 0).tolist(), strict=True)))


def _by_clock(call: Callable[[], Any], options: PartsBenchOptions) -> Timing:
    times = []
    jax.block_until_ready(call())
    for _ in range(1 + options.repeats):  # the first warms up
        started = time.perf_counter()
        for _ in range(options.calls - 1):
            call()
        jax.block_until_ready(call())
        times.append((time.perf_counter() - started) / options.calls * 1e3)
    return Timing.of(times[1:])


def main(argv: list[str] | None = None) -> int:
    """Prints a line for each pass and product, and a table of both."""
    options = parse(PartsBenchOptions, argv, "gdn bench --what parts", PartsBenchOptions(), __doc__)
    _check(options)
    config = model_config(options.model, (), dtype="bfloat16")
    tokens, length, only = options.tokens, options.length, options.only or ("",)
    asked_parts = [x for x in parts(config, tokens // length, length) if any(y in x.name for y in only)]
    asked_products = [x for x in products(config, tokens) if any(y in x.name for y in only)]
    if not asked_parts and not asked_products:
        fail("only", "parts of names such as residual sum and RMSNorm", " ".join(only))
    console = Console()
    if not console.is_terminal:
        console.width = 200
    console.print(", ".join(f"{name} {value}" for name, value in versions().items()), highlight=False)
    speed = measure_copy(options, 2 * config.mlp_size)
    published = of_device(BANDWIDTH)
    share = "" if published is None else f", {100 * speed / published:.1f} % of the published"
    console.print(f"copy: {speed / 1e12:.3g} TB/s{share}", highlight=False)
    results: dict[str, list[Result]] = {"parts": [], "products": []}

    def add(kind: str, name: str, measured: Callable[[], list[Result]]) -> None:
        try:
            found = measured()
        except jax.errors.JaxRuntimeError as error:  # out of memory, among others: the other parts may fit
            console.print(f"{name}: {one_line(error)}", highlight=False)
            return
        results[kind] += found
        for r in found:
            spread = f"{r.timing.fastest_ms:.3f} to {r.timing.slowest_ms:.3f}"
            console.print(f"{r.name}, {r.what}: {r.timing.median_ms:.3f} ms ({spread})", highlight=False)
        if options.json is not None:
            lines = {
                kind: [r._asdict() | {"timing": r.timing._asdict()} for r in rs]
                for kind, rs in results.items()
            }
            content = {
                "versions": versions(),
                "options": dataclasses.asdict(options),
                "copy_bytes_per_s": speed,
            }
            write_text(options.json, json.dumps(content | lines, indent=1, default=str))

    for part in asked_parts:
        add("parts", part.name, partial(measure, part, options))
    for product in asked_products:
        add("products", product.name, partial(measure_product, product, options))
    console.print(_parts_table(results["parts"], speed))
    console.print(_products_table(results["products"]))
    return 0 if any(results.values()) else 1


def _check(options: PartsBenchOptions) -> None:
    """Raises RunError for the first option that cannot be used."""
    for name in ("tokens", "calls", "repeats"):
        if getattr(options, name) < 1:
            fail(name, "at least 1", getattr(options, name))
    if options.length < 1 or options.tokens % options.length:
        fail("length", f"a divisor of --tokens {options.tokens}", options.length)
    any_call = jnp.zeros((1, 1, 1, 16), jnp.bfloat16)
    no_kernels = supported_implementations(any_call, any_call, any_call)["mosaic_gpu"]
    if jax.default_backend() == "gpu" and no_kernels:
        fail("what", f"no parts on a GPU without the kernels ({no_kernels})", options.what)
    if options.json is not None:
        check_writable("json", options.json)


def _parts_table(results: list[Result], speed: float) -> Table:
    table = Table("part")
    for what in ("forward", "backward"):
        table.add_column(f"{what}, ms", justify="right")
        table.add_column("of the traffic floor", justify="right")
    for name in dict.fromkeys(r.name for r in results):
        cells = {
            r.what: (f"{r.timing.median_ms:.3f}", _of_floor(r, speed)) for r in results if r.name == name
        }
        table.add_row(name, *cells.get("forward", ("", "")), *cells.get("backward", ("", "")))
    return table


def _of_floor(r: Result, speed: float) -> str:
    return f"{r.timing.median_ms / 1e3 * speed / r.work:.2f}"


def _products_table(results: list[Result]) -> Table:
    table = Table("product", "tokens x inputs x outputs")
    for name in ("ms", "TFLOP/s"):
        table.add_column(name, justify="right")
    for r in results:
        ms = r.timing.median_ms
        table.add_row(r.name, r.what, f"{ms:.3f}", f"{r.work / ms / 1e9:.3g}")
    return table
