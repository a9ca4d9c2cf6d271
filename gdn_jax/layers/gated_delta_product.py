"""Gated DeltaProduct: several steps of the delta rule for every token."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from gdn_jax.gates import l2norm, log_decay, write_strength
from gdn_jax.layers import blocks
from gdn_jax.layers.mixer import (
    MixerConfig,
    MixerCosts,
    Start,
    decay_at_start,
    recurrent_costs,
    strength_at_start,
)
from gdn_jax.layers.options import check_positive
from gdn_jax.layers.recurrent import ALONE, LayerOptions, RecurrentMixer, Rows, at_tokens
from gdn_jax.parallel.token_shards import gated_delta_product_on_mesh
from gdn_jax.parts.norms import gated_norm
from gdn_jax.rule.ops import gated_delta_step
from gdn_jax.styles import INDIGO, Style


class ProductInputs(NamedTuple):
    """The arrays that a `GatedDeltaProduct` passes to `gated_delta_product`.

    Fields:
      q: queries [B, T, H, K], of unit length.
      k, v: keys [B, T, n, H, K], of unit length, and values [B, T, n, HV, V] of every step.
      g: log decay of every token [B, T, HV], <= 0.
      beta: write strength of every step [B, T, n, HV].
    """

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T n H K"]
    v: Float[Array, "B T n HV V"]
    g: Float[Array, "B T HV"]
    beta: Float[Array, "B T n HV"]


class GatedDeltaProduct(RecurrentMixer):
    """The Gated DeltaProduct token mixer: n steps with keys, values and strengths of their own for every token.

        [q | k_1 .. k_n | v_1 .. v_n] = silu(conv(x W))       q and all k to unit length in each head
        g      = -exp(A_log) softplus(x Wa + dt_bias)
        beta_i = sigmoid(x Wb_i + c), doubled with allow_neg_eigval
        o      = gated_delta_product(q, k, v, g, beta)
        y      = (RMSNorm(o) * silu(x Wg)) Wo                 the norm over each head

    With n = 1 it is a `GatedDeltaNet`. The transition of a token is a product of n Householder matrices; with beta up
    to 2 it can be a product of n reflections.

    Args: as for `GatedDeltaNet`, without rule and use_gate, and
      num_householder: n, the number of steps for each token.
      allow_neg_eigval: beta in [0, 2], which is the default here, instead of [0, 1].

    Parameters: q_proj, k_proj [hidden_size, n * num_heads * K], v_proj [hidden_size, n * num_v_heads * V], a_proj,
      b_proj [hidden_size, n * num_v_heads], g_proj (Wg), o_proj, all without bias except c; the columns of
      step 1 come before the columns of step 2. conv_weight [conv_dim, W], conv_bias, A_log, dt_bias and o_norm as in
      `GatedDeltaNet`.

    Raises:
      ValueError: an argument is wrong; names it, what was expected and what came.

    Source: Siems et al., "DeltaProduct" (arXiv 2502.10297); fla's layer of that name, with one convolution for q, k
      and v.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_v_heads: int | None = None,
        head_dim: int = 128,
        *,
        num_householder: int = 2,
        expand_v: float = 2.0,
        allow_neg_eigval: bool = True,
        **common: Unpack[LayerOptions],
    ):
        check_positive(num_householder=num_householder)
        self.num_householder = num_householder
        super().__init__(hidden_size, num_heads, num_v_heads, head_dim, expand_v, allow_neg_eigval, **common)

    @property
    def steps(self) -> int:
        """See `RecurrentMixer.steps`."""
        return self.num_householder

    def _make_gates(self, linear: Callable[[int, int], nnx.Linear]) -> None:
        self.a_proj = linear(self.hidden_size, self.num_v_heads)
        self.b_proj = linear(self.hidden_size, self.num_householder * self.num_v_heads)
        self.g_proj = linear(self.hidden_size, self.num_v_heads * self.head_v_dim)

    def strength_projections(self) -> tuple[blocks.Projection, ...]:
        """See `RecurrentMixer.strength_projections`."""
        return (self.b_proj,)

    def rule_inputs(
        self, x: Float[Array, "B T D"], rows: Rows = ALONE
    ) -> tuple[ProductInputs, Float[Array, "N conv_dim W1"]]:
        """See `RecurrentMixer.rule_inputs`."""
        groups = (self.q_proj, self.k_proj, self.v_proj), (self.a_proj, self.b_proj)
        qkv, gates = blocks.shared_products(x, groups, self.dtype)
        shape, n, H, HV, K = (
            x.shape[:2],
            self.num_householder,
            self.num_heads,
            self.num_v_heads,
            self.head_dim,
        )
        a, b = jnp.split(gates, [HV], axis=-1)
        g = log_decay(a, self.A_log[...], self.dt_bias[...])
        beta = write_strength(b.reshape(*shape, n, HV), allow_neg_eigval=self.allow_neg_eigval)
        g, beta = at_tokens(rows.mask, g, beta)
        y, conv_state = self._convolve(qkv, rows)
        keys, v = jnp.split(y, [(1 + n) * H * K], axis=-1)
        keys = l2norm(keys.reshape(*shape, 1 + n, H, K))
        v = v.reshape(*shape, n, HV, self.head_v_dim)
        return ProductInputs(keys[:, :, 0], keys[:, :, 1:], v, g, beta), conv_state

    def apply_rule(
        self, inputs: ProductInputs, rows: Rows = ALONE
    ) -> tuple[Float[Array, "B T HO V"], Float[Array, "N HO K V"]]:
        """See `RecurrentMixer.apply_rule`. One token takes n steps of `gated_delta_step`."""
        if not rows.is_a_token(inputs.q):
            options: Any = rows.packing(rows.state) | dict(implementation=self.implementation)
            return gated_delta_product_on_mesh(*inputs, **options)
        q, k, v, g, beta = (y[:, 0] for y in inputs)
        assert rows.state is not None
        o, state = gated_delta_step(q, k[:, 0], v[:, 0], g, beta[:, 0], rows.state)
        for i in range(1, self.num_householder):
            o, state = gated_delta_step(q, k[:, i], v[:, i], None, beta[:, i], state)
        return o[:, None], state

    def rule_output(self, o: Float[Array, "B T HO V"], x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """See `RecurrentMixer.rule_output`."""
        return self.gated_output(gated_norm, o, self.g_proj(x).reshape(o.shape))


@dataclasses.dataclass(frozen=True)
class DeltaProduct(MixerConfig):
    """`GatedDeltaProduct`.

    Fields:
      num_householder: steps of a token.
    """

    name: ClassVar = "gated_delta_product"
    layer: ClassVar = GatedDeltaProduct
    reflects: ClassVar = True
    by_tokens: ClassVar = True
    num_householder: int = 2

    def __post_init__(self):
        check_positive(num_householder=self.num_householder)

    def costs(self, config: Any, L: int) -> MixerCosts:
        """See `MixerConfig.costs`: a row has as many tokens as steps."""
        return recurrent_costs(config, L, steps=self.num_householder)

    def start(self, config: Any, time_step: float) -> Start | None:
        """See `MixerConfig.start`: a token erases with every step, as much as one step of this strength."""
        left = (1 - strength_at_start(config) / config.head_dim) ** self.num_householder
        return Start(decay_at_start(time_step), config.head_dim * (1 - left))


def _steps(num_householder: int, line: str) -> DeltaProduct:
    """All have one colour, and a marker and a line for each number of steps."""
    style = Style(INDIGO, f"{num_householder}", "full", line, f"DeltaProduct, {num_householder} steps")
    return DeltaProduct(num_householder, style=style)


MIXERS: dict[str, MixerConfig] = {
    "gated_delta_product": _steps(2, "--"),
    "gated_delta_product_3": _steps(3, "-."),
    "gated_delta_product_4": _steps(4, ":"),
}
