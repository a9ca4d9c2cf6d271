"""How the parts around a rule run by kernels: when they do, with which derivative, and on which shards of arrays."""

import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType

from gdn_jax.partitioning import expected_shards, on_shards

FEW_ROWS = 256
"""Up to here a GPU multiplies by weights in less time than it takes to write them side by side. Worked out for an
H200, not measured: to write and read a weight again moves 4 bytes at 4.2 TB/s, and a row takes 2 of 700 T operations
a second."""

BY_KERNELS = (None, "mosaic_gpu")
"""Names of implementations of the rule with which the parts around it run by kernels, where they can."""

_trusted: ContextVar[bool | None] = ContextVar("trusted", default=None)


@contextmanager
def trusted(*, whole: bool = True) -> Iterator[None]:
    """Runs the kernels of every call inside the context as on a GPU that has all that they need, for tests.

    What a kernel refuses for its shapes and dtypes it still refuses. `run` splits no call over devices, because
    Pallas' interpreter cannot be split.

    Args:
      whole: what `is_whole` says of all arrays.
    """
    token = _trusted.set(whole)
    try:
        yield
    finally:
        _trusted.reset(token)


class _Small:
    """A kernel that needs nothing but what all kernels around the rule need; the norm's is one."""

    @property
    def NEEDS(self) -> Any:
        """See `pallas_kernels.device.needs`."""
        from pallas_kernels.device.needs import Needs

        return Needs.NOTHING


SMALL = _Small()


def device_reason(kernel: Any = None) -> str | None:
    """Why JAX's default device does not run a kernel, from its module; None if it does.

    Args:
      kernel: None: any of those around the rule but the ones by wgmma: with bulk copies, and with much shared memory.
    """
    if _trusted.get() is not None:
        return None
    from pallas_kernels.device import launch
    from pallas_kernels.device.needs import Needs

    return launch.device_reason(Needs.TMA | Needs.LARGE if kernel is None else kernel.NEEDS)


def usable(
    implementation: str | None, kernel: Any = None, *, part: str | None = None, reason: str | None = None
) -> bool:
    """Whether kernels run on this device, for a caller that lets them and whose arguments they take.

    Args:
      implementation: the delta rule's; a name that is not in `BY_KERNELS` uses no kernel.
      kernel: module of the kernel that is meant, see `device_reason`.
      part: what runs in plain JAX beside the rule's kernels, which are there for every shape, where "mosaic_gpu" is
        named and the part has none: a warning says so. None: there is no warning.
      reason: why the kernels cannot take the arguments; None if they can.
    """
    if implementation in BY_KERNELS and reason is None and device_reason(kernel) is None:
        return True
    if implementation == "mosaic_gpu" and part is not None:
        why = device_reason(kernel) or reason
        text = f"{part} runs in plain JAX beside the kernels of 'mosaic_gpu': {why}"
        warnings.warn(text, stacklevel=3)  # Python shows it once for each place and text
    return False


def is_whole(*arrays: jax.Array) -> bool:
    """Whether these arrays lie on one device, as a kernel of several kinds of heads side by side needs them.

    Of such an array no device could have its own. Inside jax.shard_map these kernels run where JAX does not keep in
    the types of arrays over which mesh axes they vary.
    """
    if (trusted := _trusted.get()) is not None:
        return trusted
    types = [jax.typeof(x) for x in arrays]
    is_typed = any(
        x.manual_axis_type.varying or AxisType.Explicit in x.sharding.mesh.axis_types for x in types
    )
    return not is_typed and expected_shards(arrays) is None


@jax.tree_util.register_static
class _Dtypes(NamedTuple):
    """The dtypes of an operation's arguments, kept beside the arrays for its derivative."""

    of_arguments: tuple[Any, ...]


def fused_op(
    forward: Callable[..., tuple[Any, Any]],
    backward: Callable[..., Sequence[Any]],
    *,
    alone: Callable[..., Any] | None = None,
    symbolic_zeros: bool = False,
) -> Callable[..., Any]:
    """Makes op(static, *arguments), an operation that can be differentiated once, in reverse, as its kernels can.

    Args:
      forward: from (static, *arguments) to the results, and what their derivative reads.
      backward: from (static, what it reads, cotangents) to the gradient of each argument, of any floating dtype; None
        for an argument without one.
      alone: from (static, *arguments) to the results, where nobody asks for the derivative; None: as forward makes
        them.
      symbolic_zeros: whether backward knows `SymbolicZero` as a cotangent of zeros.

    Returns:
      The operation. `static` is hashable; arguments are arrays, None, or tuples of them.
    """

    @partial(jax.custom_vjp, nondiff_argnums=(0,))
    def op(static, *arguments):
        return forward(static, *arguments)[0] if alone is None else alone(static, *arguments)

    def op_fwd(static, *arguments):
        if symbolic_zeros:
            arguments = jax.tree.map(lambda primal: primal.value, arguments)
        results, kept = forward(static, *arguments)
        return results, (kept, _Dtypes(jax.tree.map(lambda x: x.dtype, arguments)))

    def op_bwd(static, saved, cotangents):
        kept, dtypes = saved
        gradients = backward(static, kept, cotangents)
        pairs = zip(gradients, dtypes.of_arguments, strict=True)
        return tuple(None if dx is None else jax.tree.map(lambda y, t: y.astype(t), dx, t) for dx, t in pairs)

    op.defvjp(op_fwd, op_bwd, symbolic_zeros=symbolic_zeros)
    return op


def token_op[**P, R](kernel: Callable[P, R]) -> Callable[P, R]:
    """Makes an operation of single tokens of a function that calls a kernel: it has no derivative.

    Args:
      kernel: from pytrees of arrays, and of anything that is static, to the results.

    Returns:
      The operation. To differentiate it raises NotImplementedError.
    """

    @wraps(kernel)
    def op(*args: P.args, **options: P.kwargs) -> R:
        leaves, tree = jax.tree.flatten((args, options))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]

        def run(_, *arrays):
            whole = dict(enumerate(leaves)) | dict(zip(places, arrays, strict=True))
            args, options = tree.unflatten(whole.values())
            return kernel(*args, **options)

        return fused_op(_refuse, _refuse, alone=run)(None, *(leaves[i] for i in places))

    return op


def _refuse(*_):
    raise NotImplementedError(
        "kernels of single tokens have no derivative: differentiate model(...) itself, not its copy for single tokens"
    )


def token_axes(x: jax.Array | jax.ShapeDtypeStruct, unit: int) -> tuple[str, dict[str, int]]:
    """Names of the dimensions of [B, T, ..], and into how many parts rows "b" and tokens "t" can be split.

    Args:
      x: the array. One without rows and tokens is never split.
      unit: a shard must have a multiple of so many tokens for its kernel.
    """
    if x.ndim < 3 or x.shape[1] % unit:
        return " ".join("." * x.ndim), {}
    return " ".join(("b", "t", *"." * (x.ndim - 2))), {"b": x.shape[0], "t": x.shape[1] // unit}


def inner_axes(x: jax.Array | jax.ShapeDtypeStruct, block: int, most: int) -> tuple[str, dict[str, int]]:
    """`token_axes` of [B, T, H, ..], whose heads "h" can be split too, for a kernel of whole blocks of numbers.

    Args:
      x: the array.
      block: a shard must have a multiple of so many numbers.
      most: parts of H at most. There are fewer where shards of so many parts and of few tokens would be no blocks.
    """

    def unit(parts: int) -> int:
        """The fewest tokens of a part of H that are whole blocks."""
        return block // math.gcd(math.prod(x.shape[2:]) // parts, block)

    if x.ndim < 3:
        return token_axes(x, 1)
    T, H = x.shape[1:3]
    parts = next((n for n in range(min(most, H), 0, -1) if not (H % n or T % unit(n))), 1)
    names, sizes = token_axes(x, unit(parts))
    return ("b t h" + names[5:], sizes | {"h": parts}) if sizes else (names, sizes)


def run(
    kernel: Callable[..., Any],
    static: Hashable,
    args: Sequence[Any],
    operands: Sequence[Any],
    results: Any,
    sizes: Mapping[str, int],
) -> Any:
    """kernel(static, *args), on the shards of the arguments; see `partitioning.on_shards`."""
    if _trusted.get() is not None or expected_shards(args) is None:
        return kernel(static, *args)
    return on_shards(kernel, static, args, operands, lambda _: results, sizes)
