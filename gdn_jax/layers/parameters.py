"""What a GatedDeltaNet is made with: its options, which it checks, its parameters, and the cache of its past."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from gdn_jax import rules
from gdn_jax.blocks import Initializer, NoDecayParam, RMSNorm, bias_free_linears, shared_products
from gdn_jax.conv import MAX_WIDTH, MIN_WIDTH
from gdn_jax.gates import init_A_log, init_dt_bias, logit
from gdn_jax.ops import IMPLEMENTATIONS
from gdn_jax.shapes import MAX_HEAD_DIM, ArgumentError, check_choice


class GatedDeltaNetCache(NamedTuple):
    """What a GatedDeltaNet remembers of the tokens it has seen. A pytree.

    Fields:
      conv: last W - 1 projected inputs [N, conv_dim, W - 1] of [q | k | v], oldest first (width 0 without the
        short convolution), in the compute dtype.
      state: recurrent state [N, num_v_heads, head_dim, head_v_dim], float32.
    """

    conv: Float[Array, "N D W1"]
    state: Float[Array, "N HO K V"]


class GatedDeltaNetParameters(nnx.Module):
    """Options, sizes and parameters of a `GatedDeltaNet`, which says what each of them is.

    The layer's other files are functions of these: a token at a time in `token`, whole rows in `gated_delta_net`.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_v_heads: int | None = None,
        head_dim: int = 128,
        expand_v: float = 2.0,
        conv_size: int = 4,
        conv_bias: bool = False,
        use_short_conv: bool = True,
        use_gate: bool = True,
        allow_neg_eigval: bool = False,
        write_start: float | None = None,
        rule: str = "gated_delta",
        norm_eps: float = 1e-5,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        implementation: str | None = None,
        kernel_init: Initializer | None = None,
        out_kernel_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        check_options(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_v_heads=num_v_heads,
            head_dim=head_dim,
            expand_v=expand_v,
            conv_size=conv_size,
            norm_eps=norm_eps,
            write_start=write_start,
            rule=rule,
            implementation=implementation,
        )
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.num_v_heads = num_v_heads
        self.head_dim = head_dim
        self.head_v_dim = value_width(head_dim, expand_v)
        self.use_short_conv = use_short_conv
        self.use_gate = use_gate
        self.allow_neg_eigval = allow_neg_eigval
        self.rule = rule
        self.layer = 0
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.implementation = implementation

        key_dim = num_heads * head_dim
        value_dim = num_v_heads * self.head_v_dim
        self.conv_dim = 2 * key_dim + value_dim
        linear, out = bias_free_linears(dtype, param_dtype, kernel_init, out_kernel_init, rngs)
        self.q_proj = linear(hidden_size, key_dim)
        self.k_proj = linear(hidden_size, key_dim)
        self.v_proj = linear(hidden_size, value_dim)
        self.a_proj = linear(hidden_size, num_v_heads)
        self.b_proj = linear(hidden_size, num_v_heads)
        if write_start is not None:
            # Not by the constructor, which would take a random key for it and so change the weights after it.
            bias = jnp.full(num_v_heads, logit(write_start), param_dtype)
            self.b_proj.use_bias, self.b_proj.bias = True, nnx.data(nnx.Param(bias))
        self.g_proj = linear(hidden_size, value_dim) if use_gate else None
        self.o_proj = out(value_dim, hidden_size)

        self.conv_size = conv_size if use_short_conv else 1
        weight = bias = None
        if use_short_conv:
            bound, shape = conv_size**-0.5, (self.conv_dim, conv_size)
            weight = jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound).astype(param_dtype)
            bias = jnp.zeros(self.conv_dim, param_dtype) if conv_bias else None
        self.conv_weight = None if weight is None else nnx.Param(weight)
        self.conv_bias = None if bias is None else nnx.Param(bias)

        self.A_log = NoDecayParam(init_A_log(rngs.params(), num_v_heads))
        self.dt_bias = NoDecayParam(init_dt_bias(rngs.params(), num_v_heads))
        self.o_norm = RMSNorm(self.head_v_dim, eps=norm_eps, dtype=jnp.float32, param_dtype=param_dtype)

    def init_cache(self, batch: int, dtype: DTypeLike | None = None) -> GatedDeltaNetCache:
        """The cache before the first token: zeros, for `batch` sequences.

        Args:
          batch: sequences, B or len(cu_seqlens) - 1.
          dtype: of the convolution's part; default the compute dtype (param_dtype where that is None).
        """
        dtype = dtype or self.dtype or self.param_dtype
        return GatedDeltaNetCache(
            jnp.zeros((batch, self.conv_dim, self.conv_size - 1), dtype),
            jnp.zeros((batch, self.num_v_heads, self.head_dim, self.head_v_dim), jnp.float32),
        )

    def project(
        self, x: Float[Array, "B T D"]
    ) -> tuple[Float[Array, "B T conv_dim"], Float[Array, "B T HO"], Float[Array, "B T HO"]]:
        """[q | k | v] before the convolution, and the raw inputs a and b of the gates."""
        groups = (self.q_proj, self.k_proj, self.v_proj), (self.a_proj, self.b_proj)
        qkv, gates = shared_products(x, groups, self.dtype)
        a, b = jnp.split(gates, 2, axis=-1)
        return qkv, a, b

    def filters(self) -> tuple[Float[Array, "conv_dim W"], Float[Array, " conv_dim"] | None]:
        """Weight [conv_dim, W] and bias of the convolution, in a layer that has one."""
        assert self.conv_weight is not None
        return self.conv_weight[...], None if self.conv_bias is None else self.conv_bias[...]

    def key_heads(self) -> dict[str, Any]:
        """How q and k lie in the first channels of the convolution."""
        return dict(heads=self.num_heads, width=self.head_dim, normalize=rules.wants_unit_length(self.rule))


def check_options(
    *,
    hidden_size: int,
    num_heads: int,
    num_v_heads: int | None,
    head_dim: int,
    expand_v: float,
    conv_size: int,
    norm_eps: float,
    write_start: float | None,
    rule: str,
    implementation: str | None,
) -> None:
    """Raises ValueError for the first option that a `GatedDeltaNet` cannot have."""
    check_positive(hidden_size=hidden_size, num_heads=num_heads, head_dim=head_dim)
    if num_v_heads is not None and (num_v_heads < 1 or num_v_heads % num_heads):
        raise ArgumentError("num_v_heads", f"a multiple of num_heads = {num_heads}", num_v_heads)
    if head_dim > MAX_HEAD_DIM:
        raise ArgumentError("head_dim", f"a width up to {MAX_HEAD_DIM}", head_dim)
    V = value_width(head_dim, expand_v)
    if V > MAX_HEAD_DIM:
        raise ArgumentError("expand_v", f"head_dim * expand_v up to {MAX_HEAD_DIM}", V)
    if not MIN_WIDTH <= conv_size <= MAX_WIDTH:
        raise ArgumentError("conv_size", f"{MIN_WIDTH} to {MAX_WIDTH}", conv_size)
    if not norm_eps > 0:
        raise ArgumentError("norm_eps", "a positive number", norm_eps)
    if write_start is not None and not 0 < write_start < 1:
        raise ArgumentError("write_start", "None or a number between 0 and 1", write_start)
    check_choice("rule", rule, tuple(rules.RULES))
    check_choice("implementation", implementation, (*IMPLEMENTATIONS, None))


def check_positive(**sizes: int) -> None:
    """Raises ValueError for the first size that is not a positive integer."""
    for name, value in sizes.items():
        if not isinstance(value, int | np.integer) or value < 1:
            raise ArgumentError(name, "a positive integer", value)


def value_width(head_dim: int, expand_v: float) -> int:
    """V = head_dim * expand_v.

    Raises:
      ValueError: the product is not a positive whole number.
    """
    width = head_dim * expand_v
    if not math.isfinite(width) or round(width) < 1 or not math.isclose(width, round(width), rel_tol=1e-9):
        raise ArgumentError("expand_v", "head_dim * expand_v to be whole and positive", width)
    return round(width)
