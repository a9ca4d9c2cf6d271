"""How a model multiplies activations by weights: objects that flax's layers take as their `dot_general`.

`PLAIN` multiplies in the dtype of its operands. A `Float8` rounds both operands to 8 bits first, those of the
backward pass too, and a GPU that has such products makes them from 8 bits:

    x8 = E4M3(x sx), w8 = E4M3(w sw)                 y = (x8 w8) / (sx sw)
    dy8 = E5M2(dy sdy)                               dx = (dy8 w8^T) / (sdy sw),  dw = (x8^T dy8) / (sx sdy)

A scale is a power of two, and that of the operand's own largest number at this call ("current scaling"). Multiplying
by it and dividing by it rounds nothing. Of activations and cotangents of many tokens some are looked at for it, see
`SAMPLE`. x8 and w8 are what is kept for the backward pass, in half the bytes of x.

A number far larger than the sample saturates: it becomes the largest one of the dtype. Such numbers are counted where
they are rounded, in registers of the kernel that rounds them, and `counting` adds them up for a training step. That
is cheaper than to avoid them: the exact scale of a call would read each array once more, and a scale by the largest
number of the step before would be state of every product, which a run would have to keep in its checkpoints.

On a GPU of compute capability 9.0 one kernel makes both forms of an operand that its products read: by rows, and by
columns for the weight's gradient, which is a sum over tokens.
"""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from gdn_jax.parallel.mesh import HEAD, axes_set, tokens_of
from gdn_jax.partitioning import expected_shards, vary_alike
from gdn_jax.shapes import accumulation_dtype

SAMPLE = 2048
"""Tokens that are looked at, at least, for the largest number of activations or cotangents: all of fewer than twice
as many, else one in so many as leaves that, at most one in 16. To look at all would read the array once more."""

COLUMNS = 64
"""A kernel makes operands of a multiple of so many columns (`pallas_kernels.layer.eight_bits`)."""

ROOM = 3
"""Powers of two that are left between the largest number of a sample and that of the dtype. What is larger still
becomes the largest number of the dtype. Room costs no digits but those of the smallest numbers."""

PLAIN = lax.dot_general
"""Products in the dtype of the operands."""


@dataclasses.dataclass(frozen=True)
class Float8:
    """Products of operands in 8 bits.

    Numerics: a number in E4M3 is rounded by at most 2^-4 of itself, one in E5M2 by 2^-3; numbers below 2^-15 of the
    largest one (E4M3, of 2^-6 to 448) or 2^-30 (E5M2) lose more. Sums are in float32, but those of the forward on a
    GPU of compute capability 9.0, which may have some bits less. The result is rounded once to x's dtype. Where a
    sample of tokens makes the scale, numbers more than 2^ROOM times its largest one saturate to the largest of the
    dtype, which `counting` counts, and those that lose digits begin ROOM powers of two higher. A NaN or an infinity
    is NaN, and so is all that a sum with it makes.
    """

    operands: DTypeLike = jnp.float8_e4m3fn
    """The dtype of activations and weights."""
    cotangents: DTypeLike = jnp.float8_e5m2
    """The dtype of the results' cotangents."""
    gradient_sums: lax.Precision = lax.Precision.HIGHEST
    """Precision of the gradients' sums. The default leaves them to the tensor cores of a GPU, which keep some bits
    less, and a weight's gradient is a sum over all tokens."""

    def __call__(
        self,
        x: Array,
        w: Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: Any = None,
    ) -> Array:
        """x @ w [.., F], as `lax.dot_general` is called for it.

        Args:
          x: activations [.., D], any floating dtype of at least 16 bits.
          w: weight [D, F] of the same dtype.
          dimension_numbers: those of x @ w.
          precision, preferred_element_type, out_sharding: None, as there is no choice.

        Raises:
          NotImplementedError: another product is asked for.
        """
        if dimension_numbers != of_matrix(x) or w.ndim != 2:
            raise NotImplementedError(f"dimension_numbers: expected those of x @ w, got {dimension_numbers}")
        options = dict(
            precision=precision, preferred_element_type=preferred_element_type, out_sharding=out_sharding
        )
        for name, value in options.items():
            if value is not None:
                raise NotImplementedError(f"{name}: expected None, got {value}")
        return _of_tokens(self, x, w)


PRODUCTS: dict[str, Any] = {
    "default": PLAIN,
    "float8": Float8(),
    "float8_e4m3": Float8(cotangents=jnp.float8_e4m3fn),
}
"""Products by the name that `ModelConfig.matmul` has for them."""


def of_matrix(x: Any) -> Any:
    """The dimension numbers of x @ w for x [.., D] and w [D, F]."""
    return ((x.ndim - 1,), (0,)), ((), ())


def times(product: Any, x: "Float[Array, '*S D'] | Prepared", w: Float[Array, "D F"]) -> Float[Array, "*S F"]:
    """x @ w by a product; of a `Prepared` x by a `Float8`."""
    if isinstance(x, Prepared):
        kernel = takes(x.value, w)
        return _float8(product, kernel, x.value, x.operand if kernel else None, w, counter())
    return product(x, w, of_matrix(x))


def _of_tokens(policy: "Float8", x: Array, w: Array) -> Array:
    """x @ w, on a mesh of `parallel.mesh` by every device for its own tokens.

    Rows of tokens are flattened, a sample of them is taken, and an operand is made by columns: of rows that are split
    XLA gathers all for each of these. On a mesh that splits heads it does, unless the layer splits them first.
    """
    sizes = axes_set()
    if sizes is None or sizes[HEAD] > 1:
        return _float8(policy, takes(x, w), x, None, w, counter())

    def local(x, w, counter):
        x, w, counter = vary_alike((x, w, counter))
        return _float8(policy, takes(x, w), x, None, w, counter)

    tokens = tokens_of(sizes, x.shape)
    specs = tokens, PartitionSpec(), PartitionSpec()
    return jax.shard_map(local, in_specs=specs, out_specs=tokens)(x, w, counter())


def transposed_product(
    x: Float[Array, "*S D"], weight: Float[Array, "F D"], dtype: DTypeLike
) -> Float[Array, "*S F"]:
    """x @ weight.T with sums in float32 (float64 when x is), rounded to dtype.

    A single row is written as products and sums, of which XLA makes one kernel. From a product whose result is wider
    than its operands it would make a float32 copy of the weight for every token.
    """
    if math.prod(x.shape[:-1]) > 1:
        return jnp.einsum("...d,fd->...f", x, weight, preferred_element_type=dtype)
    wide = accumulation_dtype(x)
    y = jnp.sum(x.reshape(-1).astype(wide) * weight.astype(wide), axis=-1)
    return y.reshape(*x.shape[:-1], -1).astype(dtype)


_COUNTER: contextvars.ContextVar[Array | None] = contextvars.ContextVar("_COUNTER", default=None)


@contextlib.contextmanager
def counting(zero: Float[Array, ""] | None) -> Iterator[None]:
    """Counts the numbers that products in 8 bits saturate while a loss and its derivative are computed.

    The derivative of what is computed inside by `zero` is the count, of both passes: a pass backwards can hand out
    numbers as cotangents alone, and JAX adds these over layers, loops, shards and what is computed again.

    Args:
      zero: float32, whose value no result depends on; None counts nothing. Counts to 2^24 are exact.
    """
    token = _COUNTER.set(zero)
    try:
        yield
    finally:
        _COUNTER.reset(token)


def counter() -> Float[Array, ""] | None:
    """The argument of the `counting` that runs: an operation that saturates numbers takes it as an argument, and
    returns their count as its cotangent."""
    return _COUNTER.get()


class Scaled(NamedTuple):
    """An array in 8 bits: values / scale are its numbers."""

    values: Float[Array, "..."]
    scale: Float[Array, ""]
    """A power of two, float32."""


def rounded(x: Float[Array, "..."], dtype: DTypeLike) -> Scaled:
    """An array in 8 bits, with the largest power of two as its scale under which no number is too large.

    An array of zeros has scale 1. One with a NaN or an infinity is NaN as a whole, so that it is seen.
    """
    scale = _scale(x, dtype, 0)
    return Scaled((x.astype(accumulation_dtype(x)) * scale).astype(dtype), scale)


def _scale(x: Float[Array, "..."], dtype: DTypeLike, room: int) -> Float[Array, ""]:
    """The largest power of two under which no number is too large for the dtype, less some powers of two."""
    largest = jnp.max(jnp.abs(x), initial=0).astype(jnp.float32)
    _, exponent = jnp.frexp(jnp.float32(jnp.finfo(dtype).max) / largest)
    # The inverse of two scales is a number. Beyond it an operand of 10^21 or more is NaN, and is seen.
    scale = jnp.ldexp(
        jnp.float32(1), jnp.clip(exponent - 1 - room, -63, 126)
    )  # exp2 would not be a power of two
    scale = jnp.where(largest > 0, scale, 1)
    return jnp.where(jnp.isfinite(largest), scale, jnp.nan)


def sample(x: Float[Array, "M *D"]) -> Float[Array, "N *D"]:
    """The tokens that a scale is made of."""
    return x[:: _every(len(x))]


def scale_of_sample(x: Float[Array, "*S D"], M: int, dtype: DTypeLike) -> Float[Array, ""]:
    """The scale of M tokens in a dtype, by their `sample`."""
    return _scale(x, dtype, ROOM if _every(M) > 1 else 0)


def _every(M: int) -> int:
    return max(1, min(16, M // SAMPLE))


class Operand(NamedTuple):
    """Activations or cotangents in 8 bits."""

    rows: Float[Array, "M D"]
    columns: Float[Array, "D M"]
    """The same transposed, with the tokens in an order that is that of every operand of one product."""
    saturated: Float[Array, ""]
    """How many of the numbers were larger than the scale has room for, float32."""
    scale: Float[Array, ""]

    @property
    def by_columns(self) -> Scaled:
        """The form that the weight's gradient reads."""
        return Scaled(self.columns, self.scale)


class Prepared(NamedTuple):
    """Activations, and the operand that a kernel has made of them where it made them. A part of a block that is given
    this returns an `Addend`, if it can."""

    value: Float[Array, "*S D"]
    """Their cotangent is that of these."""
    operand: Operand


class Addend(NamedTuple):
    """An array that is added to the residual stream, and what comes beside it."""

    value: Float[Array, "*S D"]
    cotangent: Operand | None = None
    """Zeros that nothing reads and XLA does not make, of a product in 8 bits. Their cotangent is the operand that the
    backward pass makes of the cotangent of `value`: the norm after the sum gives it here, already in 8 bits, and then
    none for `value`."""
    words: Any = None
    """The words that the barriers of kernels of one row change, which the next such kernel takes: so XLA knows their
    order."""

    @classmethod
    def of(cls, value: Float[Array, "*S D"], policy: Float8) -> "Addend":
        """An Addend whose cotangent is that of a policy."""
        D = value.shape[-1]
        rows = jnp.zeros((value.size // D, D), policy.cotangents)
        return cls(value, Operand(rows, rows.T, jnp.float32(0), jnp.float32(0)))


def words_after(y: Any) -> Any:
    """The words of the kernels before the next one, by what is added to the stream; new ones where there are none."""
    from pallas_kernels.device.grid_barrier import new_words

    return new_words() if (words := words_of(y)) is None else words


def words_of(y: Any) -> Any:
    """The words that come with what is added to the stream; None: there are none."""
    return y.words if isinstance(y, Addend) else None


def with_words(value: Float[Array, "*P D"], words: Any) -> "Float[Array, '*P D'] | Addend":
    """An array that is added to the stream next, with words for the next kernel; None: there are none."""
    return value if words is None else Addend(value, words=words)


def array_of(x: Any) -> Any:
    """The array itself of a `Prepared` or an `Addend`; else x."""
    return x.value if isinstance(x, Prepared | Addend) else x


def cotangent_operand(policy: Float8, cotangent: Addend) -> Operand:
    """The operand of the cotangent of an `Addend`, from the cotangents of its two parts, by a kernel.

    Each may be a `SymbolicZero`: readers that do not know of `Addend.cotangent` give that of `value`.
    """
    dy, of_rows, _ = cotangent
    assert of_rows is not None
    rows, _, saturated, scale = of_rows
    if isinstance(rows, SymbolicZero):
        return operand(_tokens(dy), policy.cotangents, True)
    if isinstance(dy, SymbolicZero):
        return of_rows
    both = _tokens(dy).astype(jnp.float32) + rows.astype(jnp.float32) / scale
    made = operand(both.astype(dy.dtype), policy.cotangents, True)
    return made._replace(saturated=made.saturated + saturated)


def operand(x: Float[Array, "M D"], dtype: DTypeLike, kernel: bool) -> Operand:
    """Rows of tokens in 8 bits, with a scale by a sample of them.

    Args:
      kernel: whether a kernel makes it, see `takes`.
    """
    scale = scale_of_sample(sample(x), len(x), dtype)
    if kernel:
        from pallas_kernels.layer.eight_bits import eight_bits

        return Operand(*eight_bits(x, scale, dtype), scale)
    wide, most = x.astype(accumulation_dtype(x)) * scale, float(jnp.finfo(dtype).max)
    rows = jnp.where(jnp.isfinite(x), jnp.clip(wide, -most, most), jnp.nan).astype(dtype)
    saturated = jnp.sum(~(jnp.abs(wide) <= most)).astype(jnp.float32)
    return Operand(rows, rows.T, saturated, scale)


def takes(x: Array, w: Array) -> bool:
    """Whether a kernel makes the operands of x @ w and of its gradients on this device."""
    from pallas_kernels.device import launch
    from pallas_kernels.layer.eight_bits import NEEDS, check_supported

    if launch.device_reason(NEEDS) is not None or (expected_shards((x, w)) or 1) > 1:
        return False  # on a mesh XLA splits what it can see
    rows = math.prod(x.shape[:-1])
    return all(check_supported(jax.ShapeDtypeStruct((rows, n), x.dtype)) is None for n in w.shape)


def _product(
    x: Scaled, y: Scaled, dims: Any, dtype: DTypeLike, precision: lax.Precision | None = None
) -> Array:
    """The product of two scaled arrays over pairs of their axes, rounded once to a dtype."""
    # Before it is divided by the scales a result may be larger than any number of float16.
    wide = jnp.promote_types(dtype, jnp.bfloat16)
    options: Any = dict(precision=precision, preferred_element_type=wide)
    z = lax.dot_general(x.values, y.values, (dims, ((), ())), **options)
    # One factor, which XLA makes a factor of the product itself (docs/log/training.md).
    return (z * (1 / x.scale * (1 / y.scale)).astype(wide)).astype(dtype)


def forward_product(x: Operand, w: Scaled, dtype: DTypeLike) -> Float[Array, "M F"]:
    """x @ w of activations [M, D] and weights [D, F], in a dtype."""
    return _product(Scaled(x.rows, x.scale), w, ((1,), (0,)), dtype)


def backward_products(
    policy: Float8, x: Scaled, w: Scaled, dy: Operand, dtype: DTypeLike
) -> tuple[Float[Array, "M D"], Float[Array, "D F"]]:
    """dx and dw of `forward_product`, from its activations by columns."""
    dx = _product(Scaled(dy.rows, dy.scale), w, ((1,), (1,)), dtype, policy.gradient_sums)
    return dx, _product(x, dy.by_columns, ((1,), (1,)), dtype, policy.gradient_sums)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _float8(
    policy: Float8, kernel: bool, x: Array, made: Operand | None, w: Array, counter: Array | None
) -> Array:
    return _forward(policy, kernel, x, made, w, counter)[0]


def _forward(policy, kernel, x, made, w, counter):
    if kernel:
        w = by_rows(w)
    x8 = operand(_tokens(x), policy.operands, kernel) if made is None else made
    w8 = rounded(w, policy.operands)
    y = forward_product(x8, w8, x.dtype)
    return y.reshape(*x.shape[:-1], -1), (x8.by_columns, w8, None if counter is None else x8.saturated)


def _backward(policy, kernel, saved, dy):
    x8, w8, saturated = saved
    dy8 = operand(_tokens(dy), policy.cotangents, kernel)
    dx, dw = backward_products(policy, x8, w8, dy8, dy.dtype)
    count = None if saturated is None else saturated + dy8.saturated
    return dx.reshape(*dy.shape[:-1], -1), None, by_rows(dw) if kernel else dw, count


def by_rows(w: Array) -> Array:
    """A weight or its gradient, which XLA has to hold by rows.

    One of the products reads it by columns. XLA would hold it by columns from there on: the weight in float32 before
    it is rounded, and all that the optimiser keeps for it, which it would transpose in every step.
    """
    return with_layout_constraint(w, Layout((0, 1)))


def _tokens(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


_float8.defvjp(_forward, _backward)
