"""Tokens as the rule takes them: gates from raw a and b, unit queries and keys, heads that are shared not repeated.

All of it in float32, or float64 where an argument is: no gate and no norm is rounded between its input and its last
use, whatever the dtypes of the inputs and of the pool.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax import gates, reference
from gdn_jax.shapes import STATE_LAYOUTS, Dims, accumulation_dtype, split_heads


class Options(NamedTuple):
    """Static options of a call."""

    dims: Dims
    scale: float
    use_qk_l2norm: bool
    allow_neg_eigval: bool
    state_layout: str
    null_slot: int | None
    batch_invariant: bool
    implementation: str
    """"mosaic_gpu" or "xla"."""

    def of_heads(self, raw: "Raw") -> "Options":
        """The same for a call with some of the heads, those of raw."""
        Hq, Hk, HV = (x.shape[-2] for x in raw[:3])
        return self._replace(dims=self.dims._replace(Hq=Hq, Hk=Hk, HV=HV, HO=max(Hq, HV)))

    @property
    def head_counts(self) -> tuple[int, int, int, int]:
        return (self.dims.Hq, self.dims.Hk, self.dims.HV, self.dims.HO)

    def split(self, x: Array) -> Array:
        """The head axis, which is the first after that of requests, as axes that broadcast: see `split_heads`."""
        return split_heads(x, 1, self.head_counts)

    def join(self, x: Array, widths: int) -> Array:
        """`split` of an array with all HO heads undone; widths: axes behind the heads."""
        return x.reshape(x.shape[0], self.dims.HO, *x.shape[x.ndim - widths :])

    def swap(self, h: Array) -> Array:
        """Between [.., K, V] and the caller's layout; its own inverse."""
        return h if self.state_layout == STATE_LAYOUTS[0] else jnp.swapaxes(h, -1, -2)


class Raw(NamedTuple):
    """Tokens as the caller gave them, [..., heads, width] and [..., HO], and the parameters of the gates [HO]."""

    q: Array
    k: Array
    v: Array
    a: Array
    b: Array
    A_log: Array
    dt_bias: Array


class Tokens(NamedTuple):
    """Tokens as `reference.recurrent_step` takes them, without its state; their heads are not split yet."""

    q: Float[Array, "*B Hq K"]
    k: Float[Array, "*B Hk K"]
    v: Float[Array, "*B HV V"]
    g: Float[Array, "*B HO"]
    beta: Float[Array, "*B HO"]


def prepare(raw: Raw, pool: Any, options: Options) -> Tokens:
    """Gates, norms and dtypes; pool counts for the dtype alone."""
    dtype = accumulation_dtype(*raw, pool)
    q, k, v = (x.astype(dtype) for x in raw[:3])
    if options.use_qk_l2norm:
        q, k = gates.l2norm(q), gates.l2norm(k)
    g = gates.log_decay(raw.a.astype(dtype), raw.A_log, raw.dt_bias)
    beta = gates.write_strength(raw.b.astype(dtype), allow_neg_eigval=options.allow_neg_eigval)
    return Tokens(q, k, v, g, beta)


def step(h: Float[Array, "B HO K V"], x: Tokens, options: Options) -> tuple[Array, Array]:
    """One token of every request: the new states [B, HO, K, V] and the outputs [B, HO, V]."""
    h, o = reference.recurrent_step(options.split(h), *map(options.split, x), scale=options.scale)
    return options.join(h, 2), options.join(o, 1)


def by_row(f: Callable, options: Options, *rows: Any) -> Any:
    """f over requests, the leading axis of its arguments and results: all at once, or one after the other.

    One after the other, every request meets the same compiled code, whatever else is in the batch and however many
    there are: its bits do not depend on its neighbours. A lone request gets a neighbour, because a loop of one
    iteration would be compiled as no loop at all.
    """
    if not options.batch_invariant:
        return f(*rows)
    B = options.dims.B
    if B == 1:
        rows = jax.tree.map(lambda x: jnp.concatenate([x, x]), rows)

    def one(row):
        return jax.tree.map(lambda y: y[0], alone(f)(*jax.tree.map(lambda x: x[None], row)))

    return jax.tree.map(lambda y: y[:B], jax.lax.map(one, rows))


def alone(f: Callable) -> Callable:
    """f, compiled without regard to where its arguments come from and where its results go."""

    def g(*args):
        return jax.lax.optimization_barrier(f(*jax.lax.optimization_barrier(args)))

    return g
