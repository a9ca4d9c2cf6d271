"""Mixture of experts with a shared expert, in the place of a SwiGLU."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from gdn_jax.blocks import Initializer, NoDecayParam, SwiGLU
from gdn_jax.fused.experts import FEW, mixture
from gdn_jax.fused.kernels import kernels_run
from gdn_jax.models.config import ExpertsConfig


class Experts(nnx.Module):
    """sum_e p_e expert_e(x) + sigmoid(x w) shared(x), over the experts e of a token; without shared_gate + shared(x).

    Experts and the shared expert are SwiGLUs. p = softmax(x Wr), or as `SigmoidRouting` says. A token keeps the
    `per_token` largest, divided by their sum with `normalise`. Every token gets its experts, however many tokens
    choose the same one.

    Args:
      hidden_size: width of x and the result.
      config: sizes.
      dtype, param_dtype: compute and parameter dtype.
      implementation: of the experts, see `fused.experts.mixture`.
      kernel_init, out_kernel_init: initialisers of the inner projections, and of those that write the result.
      rngs: source of the initial weights.

    Parameters: router [hidden_size, E] (Wr), gate_up [E, hidden_size, 2 * expert_size], down [E, expert_size,
      hidden_size]; shared, a SwiGLU; shared_gate [hidden_size] (w) or None; router_bias [E],
      float32, with sigmoid routing.

    Numerics: the router is float32, and so are the sums over the experts of a token.
    """

    def __init__(
        self,
        hidden_size: int,
        config: ExpertsConfig,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        implementation: str | None = None,
        kernel_init: Initializer | None = None,
        out_kernel_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.dtype, self.implementation = dtype, implementation
        init = kernel_init or nnx.initializers.lecun_normal()
        out_init = out_kernel_init or init

        def stack(init, *shape):
            """The weights of all experts, each drawn as a projection of its own."""
            keys = jax.random.split(rngs.params(), config.num_experts)
            return nnx.Param(jax.vmap(lambda key: init(key, shape, param_dtype))(keys))

        sigmoids = config.routing is not None  # then the router is float32, and has a bias
        self.router_bias = NoDecayParam(jnp.zeros(config.num_experts)) if sigmoids else None
        self.router = nnx.Param(
            init(rngs.params(), (hidden_size, config.num_experts), jnp.float32 if sigmoids else param_dtype)
        )
        self.gate_up = stack(init, hidden_size, 2 * config.expert_size)
        self.down = stack(out_init, config.expert_size, hidden_size)
        self.shared = SwiGLU(
            hidden_size,
            config.shared_size,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            out_kernel_init=out_kernel_init,
            rngs=rngs,
        )
        gate = init(rngs.params(), (hidden_size, 1), param_dtype)[:, 0] if config.shared_gate else None
        self.shared_gate = None if gate is None else nnx.Param(gate)

    def __call__(self, x: Float[Array, "*S D"]) -> Float[Array, "*S D"]:
        """[..., hidden_size] to [..., hidden_size] in the compute dtype."""
        dtype = self.dtype or x.dtype
        rows = x.reshape(-1, x.shape[-1]).astype(dtype)
        weights, chosen = self.route(rows)
        y = mixture(
            rows, weights, chosen, self.gate_up[...], self.down[...], implementation=self.implementation
        )
        shared = self.shared(rows).astype(y.dtype)
        if self.shared_gate is not None:
            shared = jax.nn.sigmoid(_dot(rows, self.shared_gate[...].astype(dtype)))[:, None] * shared
        y = y + shared
        return y.astype(dtype).reshape(x.shape)

    def route(self, rows: Float[Array, "N D"]) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
        """Weights and numbers of the experts of each token, the heaviest first, for rows in the compute dtype."""
        if self.config.routing is not None:
            return self._route_by_sigmoids(rows, self.config.routing)
        probabilities = jax.nn.softmax(_dot(rows, self.router[...].astype(rows.dtype)), axis=-1)
        weights, chosen = largest(probabilities, self.config.per_token, self._counts(rows))
        if self.config.normalise:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return weights, chosen

    def _route_by_sigmoids(self, rows, routing):
        assert self.router_bias is not None
        scores = jnp.dot(rows.astype(jnp.float32), self.router[...].astype(jnp.float32), precision="highest")
        scores = jax.nn.sigmoid(scores)
        biased, counts = scores + self.router_bias[...], self._counts(rows)
        if routing.kept_groups < routing.groups:
            biased = biased.reshape(len(rows), routing.groups, -1)
            of_groups = jnp.sum(largest(biased, 2, counts)[0], axis=-1)
            _, kept = largest(of_groups, routing.kept_groups, counts)
            stays = jnp.any(kept[..., None] == jnp.arange(routing.groups), axis=1)
            biased = jnp.where(stays[..., None], biased, -jnp.inf).reshape(scores.shape)
        _, chosen = largest(biased, self.config.per_token, counts)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if self.config.normalise:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return weights * routing.factor, chosen

    def _counts(self, rows) -> bool:
        """Whether the largest scores of rows are found by counting: on a GPU, where a sort is many kernels."""
        return rows.shape[0] <= FEW and kernels_run(self.implementation)


def largest(x: Float[Array, "*S n"], k: int, counts: bool) -> tuple[Float[Array, "*S _"], Int[Array, "*S _"]]:
    """`jax.lax.top_k`: the k largest numbers of each row and their places, the first of equal ones first.

    NaN is larger than every number (with the sign bit set: smaller), and 0 than -0: each place is named once at most.

    Args:
      x: rows.
      k: how many, up to n.
      counts: whether the place of a number is found by counting the larger ones, n^2 comparisons without a sort.
    """
    if not counts:
        values, chosen = jax.lax.top_k(x, k)
        return values, chosen
    places = jnp.arange(x.shape[-1], dtype=jnp.int32)
    order = _ordered(x)
    other, own = order[..., None, :], order[..., None]
    before = (other > own) | ((other == own) & (places < places[:, None]))
    rank = jnp.sum(before, axis=-1, dtype=jnp.int32)
    is_one = rank[..., None, :] == jnp.arange(k, dtype=jnp.int32)[:, None]  # [.., k, n]
    chosen = jnp.sum(jnp.where(is_one, places, 0), axis=-1, dtype=jnp.int32)
    return jnp.sum(jnp.where(is_one, x[..., None, :], 0), axis=-1), chosen


def _ordered(x: Float[Array, "*S"]) -> Int[Array, "*S"]:
    """Integers in the order in which a sort has floating numbers, NaN among them."""
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"int{8 * x.dtype.itemsize}"))
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


def _dot(x, weight):
    return jnp.dot(x, weight, preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))
