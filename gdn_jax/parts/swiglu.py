"""A SwiGLU: two projections of one input, the product of one with the SiLU of the other, and the projection down."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from gdn_jax.partitioning import expected_shards, on_explicit_shards
from gdn_jax.parts import products
from gdn_jax.parts.kernels import FEW_ROWS, fused_op, run, token_axes, usable
from gdn_jax.parts.products import (
    COLUMNS,
    PLAIN,
    Addend,
    Float8,
    Operand,
    Prepared,
    array_of,
    backward_products,
    by_rows,
    cotangent_operand,
    counter,
    forward_product,
    operand,
    rounded,
    sample,
    scale_of_sample,
    times,
)
from gdn_jax.shapes import accumulation_dtype

MANY_ROWS = 4096
"""From here on the branches and their product are made by one kernel, and so are their cotangents. It multiplies 512
columns and 128 rows of the branches at once on each multiprocessor, so that fewer rows would leave some of them
without work at the end. Worked out for an H200, not measured."""

BRANCHES_NAME = "swiglu_branches"
"""`checkpoint_name` of all that the kernels keep for the backward pass beside x and the weights: the branches and
their product."""


def swiglu(
    x: Float[Array, "*S D"] | Prepared,
    gate_kernel: Float[Array, "D F"],
    up_kernel: Float[Array, "D F"],
    down_kernel: Float[Array, "F E"],
    *,
    product: Any = PLAIN,
    implementation: str | None = None,
) -> Float[Array, "*S E"] | Addend:
    """(silu(x @ gate_kernel) * (x @ up_kernel)) @ down_kernel.

    With the kernels both branches are one product, in the backward pass too, whose cotangent of x is then one product
    instead of two and their sum. What is kept for it are the branches and the product of the two. The result can then
    be differentiated once, in reverse.

    There are kernels of two kinds; both take bfloat16 and float16. Of `MANY_ROWS` rows or more, where D and E are
    multiples of 64 and rows of tokens are of 8, one kernel multiplies x by both projections and writes the branches
    and their product, and one multiplies dy by the projection down and writes the cotangents of the branches; where
    that fills the GPU better, one more makes the gradients of the weights. Else,
    of more than `FEW_ROWS` rows and where F is a multiple of 16, XLA multiplies, and a kernel makes the product of
    the branches or their cotangents.

    Args:
      x: input [.., D], any floating dtype.
      gate_kernel, up_kernel: projections [D, F], any floating dtype, used in x's.
      down_kernel: projection [F, E], likewise.
      product: how they are multiplied, of `gdn_jax.parts.products`. Only in the dtype of x do kernels multiply, too.
      implementation: None takes a kernel where there is one (a GPU of compute capability 9.0), "chunked" and
        "recurrent" do not. "mosaic_gpu" is None with a warning where more than `FEW_ROWS` rows have none.

    Returns:
      [.., E] in x's dtype, of a `Prepared` x as an `Addend` where kernels take all of it. Numerics: the branches are
      rounded to x's dtype; their product is in float32 (float64 when x is), rounded once. The cotangent of that
      product is rounded too where XLA multiplies.
    """
    from pallas_kernels.layer import swiglu as kernel
    from pallas_kernels.layer import swiglu_product

    given, x = x, array_of(x)
    gate_kernel, up_kernel, down_kernel = (w.astype(x.dtype) for w in (gate_kernel, up_kernel, down_kernel))
    F, E = down_kernel.shape
    is_plain = product is PLAIN
    in_products = (
        is_plain and usable(implementation, swiglu_product) and _check_supported(True, x, F, E) is None
    )
    reason = None if in_products else _check_supported(False, x, F, E)
    many = math.prod(x.shape[:-1]) > FEW_ROWS
    if many and usable(implementation, kernel, part="the SwiGLU", reason=reason):
        if not is_plain:
            return _multiplied_by(product, given, gate_kernel, up_kernel, down_kernel)
        group = _group(in_products)
        weight = side_by_side(gate_kernel, up_kernel, group)
        down_kernel = jnp.pad(down_kernel, ((0, -len(down_kernel) % group), (0, 0)))
        names, sizes = _axes(in_products, x, len(down_kernel))
        operands = names, ". .", ". ."
        f = partial(_swiglu, in_products)
        return on_explicit_shards(f, (x, weight, down_kernel), operands, names, sizes)
    gate, up = (checkpoint_name(times(product, x, w), BRANCHES_NAME) for w in (gate_kernel, up_kernel))
    return times(product, gated(gate, up), down_kernel)


def _multiplied_by(product: Any, given, gate_kernel, up_kernel, down_kernel) -> Float[Array, "*S E"] | Addend:
    """The SwiGLU by kernels, whose projections are multiplied by a product of `gdn_jax.parts.products`."""
    x = array_of(given)
    more = -gate_kernel.shape[1] % COLUMNS  # whole tiles of 8-bit operands
    gate_kernel, up_kernel = (jnp.pad(w, ((0, 0), (0, more))) for w in (gate_kernel, up_kernel))
    down_kernel = jnp.pad(down_kernel, ((0, more), (0, 0)))
    if isinstance(product, Float8) and products.takes(x, gate_kernel) and products.takes(x, down_kernel.T):
        made = given.operand if isinstance(given, Prepared) else None
        weight = side_by_side(gate_kernel, up_kernel, COLUMNS)
        addend = _eight_bits(product, x, made, weight, down_kernel, counter())
        return addend.value if made is None else addend
    branches = times(product, x, side_by_side(gate_kernel, up_kernel, _group(False)))
    return times(product, _gated_by_kernel(branches), down_kernel)


def _eight_bits_forward(policy, x, made, weight, down_kernel, counter):
    from pallas_kernels.layer import swiglu_eight_bits as kernels

    tokens, dtype = x.reshape(-1, x.shape[-1]), policy.operands
    x8 = operand(tokens, dtype, True) if made is None else made
    weight8, down8 = (rounded(by_rows(w), dtype) for w in (weight, down_kernel))
    branches = checkpoint_name(forward_product(x8, weight8, x.dtype), BRANCHES_NAME)
    scale = scale_of_sample(gated(*_branches(sample(branches))), len(tokens), dtype)
    h8 = Operand(*kernels.swiglu(branches, scale, dtype), scale)
    y = forward_product(h8, down8, x.dtype)
    saturated = None if counter is None else x8.saturated + h8.saturated
    kept = x8.by_columns, weight8, branches, h8.by_columns, down8, saturated
    return Addend.of(y.reshape(*x.shape[:-1], -1), policy), kept


def _eight_bits_backward(policy, kept, cotangent):
    from pallas_kernels.layer import swiglu_eight_bits as kernels

    x8, weight8, branches, h8, down8, saturated = kept
    dtype, like = policy.cotangents, cotangent.value
    dy8 = cotangent_operand(policy, cotangent)
    dh, ddown = backward_products(policy, h8, down8, dy8, like.dtype)
    some, back = jax.vjp(gated, *_branches(sample(branches)))
    scale = scale_of_sample(jnp.stack(back(sample(dh).astype(some.dtype))), len(branches), dtype)
    dbranches8 = Operand(*kernels.swiglu_backward(branches, dh, scale, dtype), scale)
    dx, dweight = backward_products(policy, x8, weight8, dbranches8, like.dtype)
    count = None if saturated is None else saturated + dy8.saturated + dbranches8.saturated
    return dx.reshape(*like.shape[:-1], -1), None, dweight, ddown, count


_eight_bits = fused_op(_eight_bits_forward, _eight_bits_backward, symbolic_zeros=True)
"""The SwiGLU in 8 bits of x, its operand or None, branches' weights `side_by_side` in groups of COLUMNS, the
projection down, and a `counter`."""


def _branches(x: Float[Array, "N F2"]) -> tuple[Float[Array, "N F"], Float[Array, "N F"]]:
    """Both branches out of groups of COLUMNS."""
    groups = x.reshape(len(x), -1, 2, COLUMNS)
    return groups[:, :, 0].reshape(len(x), -1), groups[:, :, 1].reshape(len(x), -1)


def _gated_by_kernel(branches: Float[Array, "*S F2"]) -> Float[Array, "*S F"]:
    """The product of branches that lie `side_by_side`."""
    names, sizes = _axes(False, branches, branches.shape[-1] // 2)
    return on_explicit_shards(_gated, (branches,), (names,), names, sizes)


def gated(gate: Float[Array, "*S F"], up: Float[Array, "*S F"]) -> Float[Array, "*S F"]:
    """silu(gate) * up in float32 (float64 when gate is), rounded once to gate's dtype."""
    wide = accumulation_dtype(gate)
    return (jax.nn.silu(gate.astype(wide)) * up.astype(wide)).astype(gate.dtype)


def side_by_side(gate: Float[Array, "*S F"], up: Float[Array, "*S F"], group: int) -> Float[Array, "*S F2"]:
    """Both in one array as the kernels read them: `group` numbers of gate, as many of up, and so on.

    Where these are no whole groups, zeros are added to both.
    """
    padding = ((0, 0),) * (gate.ndim - 1) + ((0, -gate.shape[-1] % group),)
    groups = (jnp.pad(x, padding).reshape(*x.shape[:-1], -1, 1, group) for x in (gate, up))
    return jnp.concatenate([*groups], axis=-2).reshape(*gate.shape[:-1], -1)


def _group(in_products: bool) -> int:
    """Numbers of a branch that lie together."""
    from pallas_kernels.layer import swiglu, swiglu_product

    return swiglu_product.GROUP if in_products else swiglu.GROUP


def _check_supported(in_products: bool, x, F: int, E: int) -> str | None:
    """Why no kernel makes the product of the branches; None if one does.

    Args:
      in_products: whether kernels multiply, too.
    """
    from pallas_kernels.layer import swiglu, swiglu_cotangents, swiglu_product

    if not in_products:
        if F % swiglu.GROUP:
            return f"gate_kernel has {F} columns; the kernel takes a multiple of {swiglu.GROUP}"
        return swiglu.check_supported(jax.ShapeDtypeStruct((*x.shape[:-1], F), x.dtype))
    rows = math.prod(x.shape[:-1])
    if rows < MANY_ROWS:
        return f"x has {rows} rows; the kernel takes {MANY_ROWS} or more"
    if x.shape[-2] % 8:
        return f"x has {x.shape[-2]} tokens in a row; the kernel takes a multiple of 8"
    columns = F + -F % swiglu_product.GROUP
    dy = jax.ShapeDtypeStruct((*x.shape[:-1], E), x.dtype)
    return swiglu_product.check_supported(x, columns) or swiglu_cotangents.check_supported(dy, columns)


def _axes(in_products: bool, x, F: int) -> tuple[str, dict[str, int]]:
    from pallas_kernels.layer.swiglu import BLOCK

    return token_axes(x, 8 if in_products else BLOCK // math.gcd(F, BLOCK))


def _forward(in_products, x, weight, down_kernel):
    names, sizes = _axes(in_products, x, len(down_kernel))
    if in_products:
        both = run(_branches_and_product, None, (x, weight), (names, ". ."), (names, names), sizes)
        branches, h = (checkpoint_name(y, BRANCHES_NAME) for y in both)
    else:
        branches = checkpoint_name(x @ weight, BRANCHES_NAME)
        h = checkpoint_name(run(_product, None, (branches,), (names,), names, sizes), BRANCHES_NAME)
    return h @ down_kernel, (x, branches, h, weight, down_kernel)


def _branches_and_product(_, x, weight):
    from pallas_kernels.layer.swiglu_product import swiglu_product

    both = swiglu_product(x.reshape(-1, x.shape[-1]), weight)
    return tuple(y.reshape(*x.shape[:-1], -1) for y in both)


def _product(_, branches):
    from pallas_kernels.layer import swiglu

    return swiglu.swiglu(branches.reshape(-1)).reshape(*branches.shape[:-1], -1)


def _backward(in_products, saved, dy):
    x, branches, h, weight, down_kernel = saved
    names, sizes = _axes(in_products, x, len(down_kernel))
    if in_products:
        args, operands = (branches, dy, down_kernel), (names, names, ". .")
        dbranches = run(_cotangents, None, args, operands, names, sizes)
    else:
        dh = jnp.einsum("...e,fe->...f", dy, down_kernel)
        dbranches = run(_derivatives, None, (branches, dh), (names,) * 2, names, sizes)
    dx = jnp.einsum("...f,df->...d", dbranches, weight)
    return dx, _weight_gradient(in_products, x, dbranches), _weight_gradient(in_products, h, dy)


def _weight_gradient(by_kernel: bool, x, dy):
    """Sum over all rows of the products of inputs [.., D] and cotangents of outputs [.., E], in their dtype.

    Args:
      by_kernel: whether kernels can run; one takes it where it fills the GPU better than XLA's product.
    """
    from pallas_kernels.layer import weight_gradient as kernel

    (*rows, D), E = x.shape, dy.shape[-1]
    parts = kernel.num_parts(math.prod(rows) // (expected_shards((x, dy)) or 1), D, E)
    if not by_kernel or parts is None or kernel.check_supported(x.reshape(-1, D), E) is not None:
        return jnp.einsum("...d,...e->de", x, dy)
    names, sizes = token_axes(x, 8)
    summed = ". . " + " ".join(f"+{name}" for name in sizes)
    return run(_gradient_by_kernel, parts, (x, dy), (names, names), summed, sizes).astype(x.dtype)


def _gradient_by_kernel(parts: int, x, dy):
    from pallas_kernels.layer import weight_gradient as kernel

    return kernel.weight_gradient(x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1]), parts=parts)


def _cotangents(_, branches, dy, down_kernel):
    from pallas_kernels.layer.swiglu_cotangents import swiglu_cotangents

    dy, ab = (y.reshape(-1, y.shape[-1]) for y in (dy, branches))
    return swiglu_cotangents(dy, down_kernel, ab).reshape(branches.shape)


def _derivatives(_, branches, dh):
    """Cotangents of the branches, from that of their product."""
    from pallas_kernels.layer import swiglu

    return swiglu.swiglu_backward(branches.reshape(-1), dh.reshape(-1)).reshape(branches.shape)


_swiglu = fused_op(_forward, _backward)


def _gated_forward(_, branches):
    names, sizes = _axes(False, branches, branches.shape[-1] // 2)
    branches = checkpoint_name(branches, BRANCHES_NAME)
    return run(_product, None, (branches,), (names,), names, sizes), (branches,)


def _gated_backward(_, saved, dh):
    (branches,) = saved
    names, sizes = _axes(False, branches, branches.shape[-1] // 2)
    return (run(_derivatives, None, (branches, dh), (names,) * 2, names, sizes),)


_gated = partial(fused_op(_gated_forward, _gated_backward), None)
