"""Gated DeltaProduct: several steps of the delta rule for every token."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from gdn_jax.gates import init_A_log, init_dt_bias, l2norm, log_decay, write_strength
from gdn_jax.layers import blocks
from gdn_jax.layers.blocks import RMSNorm
from gdn_jax.layers.options import check_positive, check_sizes, value_width
from gdn_jax.layers.recurrent import RecurrentMixer, at_tokens
from gdn_jax.parallel.token_shards import gated_delta_product_on_mesh
from gdn_jax.parts.norms import gated_norm
from gdn_jax.rule.ops import gated_delta_step


class ProductInputs(NamedTuple):
    """The arrays that a `GatedDeltaProduct` feeds `gated_delta_product`.

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

    With n = 1 it is a `GatedDeltaNet`. A token's transition is a product of n Householder matrices, so with strengths
    to 2 it can be a product of n reflections.

    Args:
      hidden_size: width of x and y.
      num_heads, num_v_heads, head_dim: as for `GatedDeltaNet`.
      num_householder: n, the steps of a token.
      expand_v: V / K; V = head_dim * expand_v must be a whole number, up to 256.
      conv_size, conv_bias, use_short_conv: as for `GatedDeltaNet`.
      allow_neg_eigval: beta in [0, 2] instead of [0, 1].
      write_start, norm_eps: as for `GatedDeltaNet`.
      dtype, param_dtype: compute and parameter dtype. A_log and dt_bias are float32 in any case.
      implementation: of the rule, see `gated_delta_rule`, which runs the n T steps of a row.
      kernel_init, out_kernel_init: initialisers of the projections, and of Wo (default: LeCun normal, and
        kernel_init).
      rngs: source of the initial weights.

    Parameters: q_proj, k_proj [hidden_size, n * num_heads * K], v_proj [hidden_size, n * num_v_heads * V], a_proj,
      b_proj [hidden_size, n * num_v_heads], g_proj (Wg), o_proj without bias, but for c; all of the first step come
      before those of the second. conv_weight [conv_dim, W], conv_bias, A_log, dt_bias and o_norm as in
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
        conv_size: int = 4,
        conv_bias: bool = False,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = True,
        write_start: float | None = None,
        norm_eps: float = 1e-5,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        implementation: str | None = None,
        kernel_init: blocks.Initializer | None = None,
        out_kernel_init: blocks.Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        check_sizes(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_v_heads=num_v_heads,
            head_dim=head_dim,
            expand_v=expand_v,
            conv_size=conv_size,
            norm_eps=norm_eps,
            write_start=write_start,
            implementation=implementation,
        )
        check_positive(num_householder=num_householder)
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, head_dim
        self.num_v_heads = num_heads if num_v_heads is None else num_v_heads
        self.head_v_dim = value_width(head_dim, expand_v)
        self.num_householder = n = num_householder
        self.allow_neg_eigval = allow_neg_eigval
        self.dtype, self.param_dtype, self.implementation = dtype, param_dtype, implementation

        keys, values = num_heads * head_dim, self.num_v_heads * self.head_v_dim
        linear, out = blocks.bias_free_linears(dtype, param_dtype, kernel_init, out_kernel_init, rngs)
        self.q_proj = linear(hidden_size, keys)
        self.k_proj = linear(hidden_size, n * keys)
        self.v_proj = linear(hidden_size, n * values)
        self.a_proj = linear(hidden_size, self.num_v_heads)
        self.b_proj = linear(hidden_size, n * self.num_v_heads)
        self._add_write_start(write_start)
        self.g_proj = linear(hidden_size, values)
        self.o_proj = out(values, hidden_size)
        self._make_convolution((1 + n) * keys + n * values, conv_size, conv_bias, use_short_conv, rngs)
        self.A_log = blocks.NoDecayParam(init_A_log(rngs.params(), self.num_v_heads))
        self.dt_bias = blocks.NoDecayParam(init_dt_bias(rngs.params(), self.num_v_heads))
        self.o_norm = RMSNorm(self.head_v_dim, eps=norm_eps, dtype=jnp.float32, param_dtype=param_dtype)

    def strength_projections(self) -> tuple[blocks.Projection, ...]:
        """See `RecurrentMixer.strength_projections`."""
        return (self.b_proj,)

    def rule_inputs(
        self,
        x: Float[Array, "B T D"],
        *,
        conv_state: Float[Array, "N conv_dim W1"] | None = None,
        mask: Bool[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        cu_seqlens: Int[Array, " N1"] | None = None,
    ) -> tuple[ProductInputs, Float[Array, "N conv_dim W1"]]:
        """See `RecurrentMixer.rule_inputs`."""
        groups = (self.q_proj, self.k_proj, self.v_proj), (self.a_proj, self.b_proj)
        qkv, gates = blocks.shared_products(x, groups, self.dtype)
        rows, n, H, HV, K = x.shape[:2], self.num_householder, self.num_heads, self.num_v_heads, self.head_dim
        a, b = jnp.split(gates, [HV], axis=-1)
        g = log_decay(a, self.A_log[...], self.dt_bias[...])
        beta = write_strength(b.reshape(*rows, n, HV), allow_neg_eigval=self.allow_neg_eigval)
        g, beta = at_tokens(mask, g, beta)
        y, conv_state = self._convolve(qkv, conv_state, mask, segment_ids, cu_seqlens)
        keys, v = jnp.split(y, [(1 + n) * H * K], axis=-1)
        keys = l2norm(keys.reshape(*rows, 1 + n, H, K))
        v = v.reshape(*rows, n, HV, self.head_v_dim)
        return ProductInputs(keys[:, :, 0], keys[:, :, 1:], v, g, beta), conv_state

    def apply_rule(
        self,
        inputs: ProductInputs,
        *,
        initial_state: Float[Array, "N HO K V"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        cu_seqlens: Int[Array, " N1"] | None = None,
    ) -> tuple[Float[Array, "B T HO V"], Float[Array, "N HO K V"]]:
        """See `RecurrentMixer.apply_rule`. One token takes n steps of `gated_delta_step`."""
        if not self._is_a_token(inputs.q, initial_state, cu_seqlens):
            packing: Any = dict(segment_ids=segment_ids, cu_seqlens=cu_seqlens)
            return gated_delta_product_on_mesh(
                *inputs, initial_state=initial_state, **packing, implementation=self.implementation
            )
        q, k, v, g, beta = (y[:, 0] for y in inputs)
        assert initial_state is not None
        o, state = gated_delta_step(q, k[:, 0], v[:, 0], g, beta[:, 0], initial_state)
        for i in range(1, self.num_householder):
            o, state = gated_delta_step(q, k[:, i], v[:, i], None, beta[:, i], state)
        return o[:, None], state

    def rule_output(self, o: Float[Array, "B T HO V"], x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """See `RecurrentMixer.rule_output`."""
        return self._gated_output(gated_norm, o, self.g_proj(x).reshape(o.shape))
