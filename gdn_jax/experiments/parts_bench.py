"""`gdn bench --what parts`: times the parts of a model around the rule, and the products of its projections.

A part is a public call of `gdn_jax.fused` or of the loss, on random inputs of a model's sizes in bfloat16, with a
residual stream in float32. Its time is what its kernels take on the device, from a profile. Backward is a call of
the function that `jax.vjp` returns: the kernels of the gradient alone. Of the SwiGLU and of the loss only their own
kernel counts, not the products around it. The loss makes the gradient of its logits in the forward pass.

The floor of a part is what its bytes take at the speed of a copy, which is timed in the same run: every array that
the call has to read or write, once. Filters and weights of norms are left out.

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
from gdn_jax.checks import device_time
from gdn_jax.checks.device_time import Timing
from gdn_jax.commands.errors import fail, one_line
from gdn_jax.commands.files import check_writable, write_text
from gdn_jax.commands.parsing import parse
from gdn_jax.commands.versions import versions
from gdn_jax.experiments.peak import BANDWIDTH, of_device
from gdn_jax.experiments.step_bench import model_config
from gdn_jax.experiments.steps import compiler_flags
from gdn_jax.fused.embedding import embed
from gdn_jax.fused.norms import add_norm, gated_norm
from gdn_jax.fused.short_conv import short_conv
from gdn_jax.fused.swiglu import swiglu
from gdn_jax.losses import default_tile, linear_softmax_cross_entropy
from gdn_jax.models import ModelConfig

NARROW, WIDE = jnp.bfloat16, jnp.float32

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


class Part(NamedTuple):
    """A public call, by the shapes of its differentiated arguments, and its bytes; None for a pass that is not timed.

    kernels: what the names of those that count begin with; "" for all.
    """

    name: str
    call: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    forward_bytes: int | None
    backward_bytes: int | None
    kernels: str = ""


class Product(NamedTuple):
    """A projection [tokens, inputs] @ [inputs, outputs] of bfloat16, with products of some dtype."""

    name: str
    tokens: int
    inputs: int
    outputs: int
    dtype: Any = NARROW


class Result(NamedTuple):
    """One pass of a part, or one product."""

    name: str
    what: str
    work: int
    """Bytes of a part's floor, operations of a product."""
    timing: Timing


def parts(config: ModelConfig, rows: int, length: int) -> list[Part]:
    """The parts of a model on so many rows of one length."""
    N, D, V, F = rows * length, config.hidden_size, config.vocab_size, config.mlp_size
    HK, HV = config.num_heads, config.num_v_heads or config.num_heads
    K, KV = config.head_dim, round(config.head_dim * config.expand_v)
    C, tile = 2 * HK * K + HV * KV, min(N, default_tile(V))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, V, (rows, length)).astype(np.int32)
    targets = rng.integers(0, V, tile).astype(np.int32)

    def array(*shape: int, dtype=NARROW) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def stream(dtype=NARROW) -> jax.ShapeDtypeStruct:
        return array(rows, length, D, dtype=dtype)

    def loss(x, weight):
        return linear_softmax_cross_entropy(x, weight, jnp.asarray(targets)).loss

    heads = array(rows, length, HV, KV)
    return [
        Part(
            "convolution of q, k, v with SiLU and unit length",
            lambda x, weight: short_conv(x, weight, heads=HK, width=K)[:3],
            (array(rows, length, C), array(C, config.conv_size, dtype=WIDE)),
            2 * N * C * 2,  # x; q, k and v
            3 * N * C * 2,  # x and the cotangents of q, k and v; that of x
        ),
        Part(
            "residual sum and RMSNorm",
            # Without a weight, as before every projection whose kernel is multiplied by it.
            lambda x, y: add_norm(x, y, None, dtype=NARROW),
            (stream(WIDE), stream()),
            N * D * (4 + 2 + 4 + 2),  # x and y; their sum and its norm
            N * D * (2 + 4 + 2 + 4 + 2)
            + N * 4,  # norm, cotangents of both results, those of x and y; factors
        ),
        Part(
            "RMSNorm of each head with its gate",
            gated_norm,
            (heads, heads, array(KV, dtype=WIDE)),
            3 * N * HV * KV * 2,
            5 * N * HV * KV * 2,
        ),
        Part(
            "product of the SwiGLU",
            swiglu,
            (stream(), array(D, F), array(D, F), array(F, D)),
            3 * N * F * 2,  # both branches; their product
            5 * N * F * 2,  # and the cotangent of their product; their own
            "swiglu",
        ),
        Part(
            f"softmax of a tile of {tile} x {V} logits, and their cotangent",
            jax.value_and_grad(loss, (0, 1)),
            (array(tile, D), array(V, D)),
            tile * V * (4 + 2),
            None,
            "cross_entropy",
        ),
        Part(
            f"gradient of the embedding, vocabulary {V}",
            lambda embedding: embed(embedding, jnp.asarray(tokens)),
            (array(V, D, dtype=WIDE),),
            None,
            (N + V) * D * 4,
        ),
    ]


def products(config: ModelConfig, tokens: int) -> list[Product]:
    """The projections of a model."""
    D, F, V = config.hidden_size, config.mlp_size, config.vocab_size
    HK, HV = config.num_heads, config.num_v_heads or config.num_heads
    keys, values = HK * config.head_dim, HV * round(config.head_dim * config.expand_v)
    tile = min(tokens, default_tile(V))
    return [
        Product("to q, k and v", tokens, D, 2 * keys + values),
        Product("to the gates of the rule", tokens, D, 2 * HV),
        Product("to the gate of the heads", tokens, D, values),
        Product("from the heads", tokens, values, D),
        Product("to both branches of the SwiGLU", tokens, D, 2 * F),
        Product("from the SwiGLU", tokens, F, D),
        Product("logits of a tile, float32", tile, D, V, WIDE),
    ]


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
