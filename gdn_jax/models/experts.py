"""Mixture of experts with a shared expert, in the place of a SwiGLU."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from gdn_jax.layers.block_weights import BlockSwiGLU, BlockWeight
from gdn_jax.layers.blocks import Initializer, NoDecayParam, SwiGLU
from gdn_jax.models.config import ExpertsConfig
from gdn_jax.parts.block_weights import dequantised
from gdn_jax.parts.experts import mixture
from gdn_jax.parts.routing import choose
from gdn_jax.parts.swiglu import gated
from gdn_jax.shapes import Choice


class Experts(nnx.Module):
    """sum_e p_e expert_e(x) + sigmoid(x w) shared(x), over the experts e of a token; without shared_gate + shared(x).

    Experts and the shared expert are SwiGLUs. p = softmax(x Wr), or as `SigmoidRouting` says. A token keeps the
    `per_token` largest, divided by their sum with `normalise`. Every token gets its experts, however many tokens
    choose the same one.

    Args:
      hidden_size: width of x and the result.
      config: sizes.
      dtype, param_dtype: compute and parameter dtype.
      implementation: of the experts, see `parts.experts.mixture`.
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
        y = self.mix(rows, *self.route(rows))
        return y.astype(dtype).reshape(x.shape)

    def mix(
        self, rows: Float[Array, "N D"], weights: Float[Array, "N k"], chosen: Int[Array, "N k"]
    ) -> Float[Array, "N D"]:
        """The sum of each token's experts and the shared one.

        Args:
          rows: tokens, in the compute dtype.
          weights, chosen: of `route`.
        """
        experts = self.gate_up[...], self.down[...]
        y = mixture(rows, weights, chosen, *experts, implementation=self.implementation)
        own, gate = self.shared(rows).astype(y.dtype), self.gate(rows)
        return y + (own if gate is None else gate[:, None] * own)

    def gate(self, rows: Float[Array, "N D"]) -> Float[Array, " N"] | None:
        """The factor of the shared expert's result; None for 1."""
        if self.shared_gate is None:
            return None
        return jax.nn.sigmoid(_dot(rows, self.shared_gate[...].astype(rows.dtype)))

    def route(self, rows: Float[Array, "N D"]) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
        """Weights and numbers of the experts of each token, the heaviest first, for rows in the compute dtype."""
        if self.config.routing is None:
            return self.chosen(self.scores(rows))
        return self.chosen(self.scores(rows.astype(jnp.float32), "highest"))

    def chosen(self, scores: Float[Array, "N E"]) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
        """`route` from scores."""
        bias = None if self.router_bias is None else self.router_bias[...]
        return choose(scores, bias, self.choice(), implementation=self.implementation)

    def choice(self) -> Choice:
        """How experts are chosen."""
        c, routing = self.config, self.config.routing
        if routing is None:
            return Choice(c.per_token, 1, 1, c.normalise, 1.0, "softmax")
        return Choice(c.per_token, routing.groups, routing.kept_groups, c.normalise, routing.factor)

    def scores(self, rows: Float[Array, "N D"], precision: str | None = None) -> Float[Array, "N E"]:
        """Products of rows and the router, in float32."""
        return _dot(rows, self.router[...].astype(rows.dtype), precision)


class BlockExperts(Experts):
    """A mixture of experts that keep their weights in 8 bits. Of few rows the chosen ones alone are read.

    Args:
      experts: the mixture, whose parts this one takes over.

    Parameters: those of `Experts`, but gate_up_blocks and down_blocks, each a `BlockWeight`, for gate_up and down.
    """

    def __init__(self, experts: Experts):
        own = dict(vars(experts))
        gate_up, down = own.pop("gate_up"), own.pop("down")
        vars(self).update(own)
        self.param_dtype = gate_up.dtype
        self.gate_up_blocks, self.down_blocks = BlockWeight(gate_up[...]), BlockWeight(down[...])
        self.shared = BlockSwiGLU(experts.shared)

    @property
    def gate_up(self) -> Any:  # pyrefly: ignore[bad-override]
        """The dequantised branches of all experts [E, inputs, 2 * inner]."""
        return self.gate_up_blocks.whole(self.param_dtype)

    @property
    def down(self) -> Any:  # pyrefly: ignore[bad-override]
        """The dequantised projections down of all experts [E, inner, outputs]."""
        return self.down_blocks.whole(self.param_dtype)

    def mix(
        self, rows: Float[Array, "N D"], weights: Float[Array, "N k"], chosen: Int[Array, "N k"]
    ) -> Float[Array, "N D"]:
        """See `Experts.mix`."""
        if (
            3 * chosen.size > self.config.num_experts
        ):  # else the experts of the rows are read, written, read again
            return super().mix(rows, weights, chosen)

        def of_chosen(blocks: BlockWeight) -> Float[Array, "N k F D"]:
            return dequantised(blocks.codes[...][chosen], blocks.scales[...][chosen], rows.dtype)

        wide = jnp.promote_types(rows.dtype, jnp.float32)
        gate_up = _sums(rows[:, None], of_chosen(self.gate_up_blocks), wide)
        inner = gated(*jnp.split(gate_up, 2, axis=-1)).astype(rows.dtype)
        each = _sums(inner, of_chosen(self.down_blocks), wide)
        y = jnp.sum(weights[..., None] * each, axis=1)
        own, gate = self.shared(rows).astype(y.dtype), self.gate(rows)
        return y + (own if gate is None else gate[:, None] * own)


def _sums(x: Float[Array, "N K D"], weight: Float[Array, "N k F D"], dtype: Any) -> Float[Array, "N k F"]:
    """Products of each row with its weights, as products and sums, of which XLA makes one kernel."""
    return jnp.sum(x[:, :, None].astype(dtype) * weight.astype(dtype), axis=-1).astype(x.dtype)


def _dot(x, weight, precision=None):
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.dot(x, weight, precision=precision, preferred_element_type=wide)
