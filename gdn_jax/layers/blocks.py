"""The parts of a model's block: the protocol of a token mixer, RMSNorm, SwiGLU, and what weight decay spares.

Parameters live in param_dtype (float32 by default) and are cast to dtype, the compute dtype, at every call, as in
flax's own layers; the norm is float32 in any case.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from gdn_jax.parallel.head_shards import projections_on_mesh, splits_heads, swiglu_on_mesh
from gdn_jax.parts import eight_bits
from gdn_jax.parts.block_weights import DEQUANTISING
from gdn_jax.parts.kernels import FEW_ROWS, usable
from gdn_jax.parts.norms import add_norm
from gdn_jax.parts.products import PLAIN, Addend, Prepared, array_of, times
from gdn_jax.shapes import accumulation_dtype

Initializer = Callable[..., jax.Array]


@runtime_checkable
class TokenMixer(Protocol):
    """Mixes the tokens of a block: `gdn_jax.layers.GatedDeltaNet` is one.

    A cache is any pytree that the mixer itself makes and reads; only the model's caller carries it from one call to
    the next. A mixer refuses what it cannot take, for example a mask, with NotImplementedError. Like every part of a
    block it may have a method `from_stream`, see there.
    """

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        cache: Any = None,
        mask: Bool[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        return_cache: bool = False,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """y, and the cache after the last token (None without cache and return_cache)."""
        ...

    def init_cache(self, batch: int) -> Any:
        """The cache before the first token, for `batch` sequences."""
        ...


def from_stream(part: Callable[..., Any]) -> Callable[..., tuple[Float[Array, "*S D"], Any]]:
    """How a part of a block is called with a norm: `from_stream(part)(norm, x, y, **options)`.

    A part that can do more with the stream and the norm than normalise first has a method of this name with the same
    results.

    Args:
      part: a mixer, an MLP, or a function in the place of one.

    Returns:
      A function of the norm before the part; the residual stream x; what is added to the stream first, for one token
      also in parts [P, .., D], see `whole`, or None for nothing; and options of the part. It returns x + y in x's
      dtype, and what the part returns.
    """
    return getattr(part, "from_stream", None) or partial(normalise_first, part)


def normalise_first(
    part: Callable[..., Any],
    norm: "RMSNorm",
    x: Float[Array, "*S D"],
    y: Float[Array, "*P D"] | Addend | None,
    **options: Any,
) -> tuple[Float[Array, "*S D"], Any]:
    """`from_stream` for any part."""
    x, normalized = norm.add(x, y)
    return x, part(normalized, **options)


def whole(y: Float[Array, "*P D"] | Addend, x: Float[Array, "*S D"]) -> Float[Array, "*S D"]:
    """Returns what is added to a stream x: y itself, the array of an `Addend`, or the sum of its parts [P, .., D]."""
    added = array_of(y)
    return added if added.shape == x.shape else jnp.sum(added.reshape(-1, *x.shape), axis=0)


def NoDecayParam(value: Any) -> nnx.Param:
    """A parameter without weight decay: A_log, dt_bias and the weights of norms.

    The mark is metadata of an ordinary `nnx.Param`, weight_decay=False, not a type of its own: `nnx.bridge.ToLinen`
    makes a collection of every type, and an optimiser over the collection `params` would never see this one.

    Args:
      value: the array.
    """
    return nnx.Param(value, weight_decay=False)


def weight_decay_mask(params: Any) -> Any:
    """Which parameters to decay, in the form `optax.adamw(..., mask=weight_decay_mask)` takes.

    Args:
      params: a pytree of parameters: `nnx.state(model, nnx.Param)`, the plain arrays of it (`nnx.as_pure`), or the
        collection `params` of a Linen module (`nnx.bridge.ToLinen`).

    Returns:
      The same tree with a bool for every array: False for a `NoDecayParam` and for everything of fewer than
      two dimensions (A_log, dt_bias, norms, biases), True for projections, embeddings, convolutions.
    """

    def decays(x):
        metadata = x.get_metadata() if isinstance(x, nnx.Variable) else getattr(x, "metadata", {})
        return jax.tree.map(lambda a: metadata.get("weight_decay", True) and jnp.ndim(a) >= 2, x)

    return jax.tree.map(decays, params, is_leaf=lambda x: isinstance(x, nnx.Variable | nnx.bridge.NNXMeta))


class RMSNorm(nnx.Module):
    """x * rsqrt(mean(x^2) + eps) * weight along the last axis, in float32.

    flax's own RMSNorm rounds x and the weight to the compute dtype before it takes the mean; this one rounds
    once, at the end.

    Args:
      features: width of the last axis.
      eps: added to the mean square.
      dtype: dtype of the result; the input's when None.
      param_dtype: dtype of the weight [features], which starts at 1 and is a `NoDecayParam`.
      zero_centred: multiply by 1 + weight, which starts at 0.
      implementation: as for `parts.norms.add_norm`.
    """

    def __init__(
        self,
        features: int,
        *,
        eps: float = 1e-5,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        zero_centred: bool = False,
        implementation: str | None = None,
    ):
        self.implementation = implementation
        self.weight = NoDecayParam((jnp.zeros if zero_centred else jnp.ones)(features, param_dtype))
        self.zero_centred = zero_centred
        self.eps = eps
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*S D"]) -> Float[Array, "*S D"]:
        """The normalised x [..., features]."""
        return self.add(x, None)[1]

    def add(
        self, x: Float[Array, "*S D"], y: Float[Array, "*P D"] | Addend | None
    ) -> tuple[Float[Array, "*S D"], Float[Array, "*S D"]]:
        """x + y in x's dtype, x itself where y is None, and the sum normalised."""
        return self._add(x, y, self.scale(accumulation_dtype(x)))

    def add_folded(
        self,
        x: Float[Array, "*S D"],
        y: Float[Array, "*P D"] | Addend | None,
        *projections: Float[Array, "D F"],
        product: Any = PLAIN,
    ) -> tuple[Float[Array, "*S D"], Float[Array, "*S D"] | Prepared, list[Float[Array, "D F"]]]:
        """`add` where projections alone read the norm: their rows are multiplied by `scale` instead of it.

        Args:
          product: by which they do; of a `Float8` the norm is `Prepared` where a kernel makes it so.
        """
        scale, dtype = self.scale(jnp.float32), self.dtype or x.dtype
        folded = [scale[:, None] * weight for weight in projections]
        if not eight_bits.takes(product, x, folded, dtype, self.implementation):
            return *self._add(x, y, None), folded
        y = y if y is None or isinstance(y, Addend) else whole(y, x)
        return *eight_bits.add_norm(product, x, y, eps=self.eps, dtype=dtype), folded

    def _add(self, x, y, scale):
        options: Any = dict(eps=self.eps, dtype=self.dtype, implementation=self.implementation)
        return add_norm(x, array_of(y), scale, **options)

    def scale(self, dtype: DTypeLike) -> Float[Array, " D"]:
        """The factors of the channels: the weight, or 1 + weight."""
        weight = self.weight[...].astype(dtype)
        return 1 + weight if self.zero_centred else weight


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)), three projections without bias.

    Args:
      hidden_size: width of the input and the output.
      intermediate_size: width in between.
      dtype, param_dtype: compute and parameter dtype.
      kernel_init, out_kernel_init: initialisers of gate and up, and of down.
      implementation: as for `parts.swiglu.swiglu`.
      rngs: source of the initial weights.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Initializer | None = None,
        out_kernel_init: Initializer | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        self.implementation = implementation
        linear, out = bias_free_linears(dtype, param_dtype, kernel_init, out_kernel_init, rngs)
        self.gate_proj = linear(hidden_size, intermediate_size)
        self.up_proj = linear(hidden_size, intermediate_size)
        self.down_proj = out(intermediate_size, hidden_size)

    def __call__(self, x: Float[Array, "*S D"]) -> Float[Array, "*S D"]:
        """[..., hidden_size] to [..., hidden_size] in the compute dtype."""
        return array_of(self._product(x, *self._branches()))

    def from_stream(
        self, norm: RMSNorm, x: Float[Array, "*S D"], y: Float[Array, "*P D"] | Addend | None
    ) -> tuple[Float[Array, "*S D"], Float[Array, "*S D"] | Addend]:
        """See `from_stream`: for more than a few rows the projections take over the norm's scale."""
        if not (is_one_product(x, (self.gate_proj, self.up_proj)) and usable(self.implementation)):
            return normalise_first(self, norm, x, y)
        product = self.gate_proj.dot_general
        x, normalized, branches = norm.add_folded(x, y, *self._branches(), product=product)
        return x, self._product(normalized, *branches)

    def _branches(self):
        return self.gate_proj.kernel[...], self.up_proj.kernel[...]

    def _product(self, x, gate, up):
        if not isinstance(x, Prepared):
            x = x.astype(self.gate_proj.dtype or jnp.promote_types(x.dtype, self.gate_proj.kernel[...].dtype))
        down, product = self.down_proj.kernel[...], self.gate_proj.dot_general
        return swiglu_on_mesh(x, gate, up, down, product=product, implementation=self.implementation)


@runtime_checkable
class Projection(Protocol):
    """A projection of a layer: an `nnx.Linear`, or what stands in its place in a copy for inference."""

    bias: Any
    out_features: int

    def __call__(self, x: jax.Array, /) -> jax.Array:
        """The projection of an array's last axis."""
        ...


def set_product(part: nnx.Module, product: Any) -> None:
    """Makes the projections of a module multiply by a product of `gdn_jax.parts.products`, in place.

    Those that keep their weights in 8 bits have a product of their own.
    """
    for _, inner in nnx.iter_modules(part):
        if isinstance(inner, nnx.Linear) and inner.dot_general is not DEQUANTISING:
            inner.dot_general = product


def add_bias(linear: nnx.Linear, bias: Float[Array, " F"]) -> None:
    """Gives a projection that has none a bias, in place.

    Its constructor would take a random key for it, and so change the weights that are drawn after it.
    """
    linear.use_bias, linear.bias = True, nnx.data(nnx.Param(bias))


def products(x: Float[Array, "*S D"], linears: Sequence[Projection]) -> tuple[Float[Array, "*S F"], ...]:
    """The results of several projections of one input, of which a mesh that splits heads has parts."""
    own = [linear for linear in linears if type(linear) is nnx.Linear]
    if not splits_heads() or len(own) < len(linears):
        return tuple(linear(x) for linear in linears)

    def project(x, weights):
        results = []
        for linear, (kernel, bias) in zip(own, weights, strict=True):
            dtype = linear.dtype or jnp.promote_types(x.dtype, kernel.dtype)
            y = times(linear.dot_general, x.astype(dtype), kernel.astype(dtype))
            results.append(y if bias is None else y + bias.astype(dtype))
        return tuple(results)

    weights = [(y.kernel[...], None if y.bias is None else y.bias[...]) for y in own]
    return projections_on_mesh(project, x, weights)


def shared_products(
    x: Float[Array, "*S D"], groups: Sequence[Sequence[Projection]], dtype: DTypeLike | None
) -> list[Float[Array, "*S F"]]:
    """For each group of projections their results side by side, from one product of their common input.

    They are products of their own where they share one already, for a few rows, and on a mesh that splits heads,
    whose devices have their parts of the results.

    Args:
      x: their input.
      groups: the projections.
      dtype: their compute dtype.
    """
    linears = [linear for group in groups for linear in group]
    if not is_one_product(x, linears):
        ys = iter(products(x, linears))
        return [jnp.concatenate([next(ys) for _ in group], axis=-1) for group in groups]
    own = [[linear for linear in group if isinstance(linear, nnx.Linear)] for group in groups]
    kernels = [jnp.concatenate([linear.kernel[...] for linear in group], axis=1) for group in own]
    dtype = dtype or jnp.promote_types(x.dtype, kernels[0].dtype)
    ys = [
        times(group[0].dot_general, x.astype(dtype), kernel.astype(dtype))
        for group, kernel in zip(own, kernels, strict=True)
    ]
    return [_with_biases(y, group) for y, group in zip(ys, own, strict=True)]


def _with_biases(y: Float[Array, "*S F"], linears: Sequence[nnx.Linear]) -> Float[Array, "*S F"]:
    """The results of projections side by side, with the biases of those that have one."""
    if all(linear.bias is None for linear in linears):
        return y
    ends = np.cumsum([linear.out_features for linear in linears])[:-1]
    parts = zip(jnp.split(y, ends, axis=-1), linears, strict=True)
    return jnp.concatenate([with_bias(*part) for part in parts], axis=-1)


def with_bias(y: Float[Array, "*S F"], linear: Projection) -> Float[Array, "*S F"]:
    """A projection's product with its bias, if it has one."""
    return y if linear.bias is None else y + linear.bias[...].astype(y.dtype)


def is_one_product(x: jax.Array | jax.ShapeDtypeStruct, linears: Sequence[Projection]) -> bool:
    """Whether `shared_products` makes one product of each group of these."""
    own = all(isinstance(linear, nnx.Linear) for linear in linears)
    return own and not splits_heads() and math.prod(x.shape[:-1]) > FEW_ROWS


def bias_free_linears(dtype, param_dtype, kernel_init, out_kernel_init, rngs):
    """Makers of the bias-free projections of a layer: the inner ones and the last one."""
    kernel_init = kernel_init or nnx.initializers.lecun_normal()

    def maker(init):
        def make(n, m):
            return nnx.Linear(
                n, m, use_bias=False, dtype=dtype, param_dtype=param_dtype, kernel_init=init, rngs=rngs
            )

        return make

    return maker(kernel_init), maker(out_kernel_init or kernel_init)
