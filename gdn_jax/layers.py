"""The Gated DeltaNet token mixer as a flax.nnx module, and its cache.

Parameters live in param_dtype (float32 by default) and are cast to dtype, the compute dtype, at every call,
as in flax's own layers; norms, gates, the convolution's sums and the recurrent state are float32 in any case.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from gdn_jax import rules
from gdn_jax.blocks import (
    Initializer,
    NoDecayParam,
    ProjectionOfGroup,
    RMSNorm,
    bias_free_linears,
    group_of,
    is_one_product,
    shared_products,
)
from gdn_jax.conv import (
    MAX_WIDTH,
    MIN_WIDTH,
    causal_conv1d_update,
    convolve_spans,
    segment_starts,
)
from gdn_jax.fused import joined
from gdn_jax.fused.norms import gated_norm
from gdn_jax.fused.short_conv import split_normalized
from gdn_jax.fused.token import (
    Heads,
    Token,
    has_kernel,
    has_kernels,
    is_whole,
    mix_token,
    token_step,
)
from gdn_jax.gates import init_A_log, init_dt_bias, log_decay, write_strength
from gdn_jax.ops import IMPLEMENTATIONS
from gdn_jax.parallel.channels_on_mesh import short_conv
from gdn_jax.shapes import MAX_HEAD_DIM, check_array, check_choice, check_floating


class GatedDeltaNetCache(NamedTuple):
    """What a GatedDeltaNet remembers of the tokens it has seen. A pytree.

    Fields:
      conv: last W - 1 projected inputs [N, conv_dim, W - 1] of [q | k | v], oldest first (width 0 without the
        short convolution), in the compute dtype.
      state: recurrent state [N, num_v_heads, head_dim, head_v_dim], float32.
    """

    conv: Float[Array, "N D W1"]
    state: Float[Array, "N HO K V"]


class GatedDeltaNet(nnx.Module):
    """The Gated DeltaNet token mixer.

        [q | k | v] = silu(conv([x Wq | x Wk | x Wv]))        q and k to unit length in each head
        g    = -exp(A_log) softplus(x Wa + dt_bias)
        beta = sigmoid(x Wb), doubled with allow_neg_eigval
        o    = gated_delta_rule(q, k, v, g, beta)
        y    = (RMSNorm(o) * silu(x Wg)) Wo                   the norm over each head

    Args:
      hidden_size: width of x and y.
      num_heads: query and key heads.
      num_v_heads: value, state, gate and output heads, a multiple of num_heads (value head i reads key head
        i // (num_v_heads // num_heads); nothing is repeated). Default num_heads.
      head_dim: K, up to 256.
      expand_v: V / K; V = head_dim * expand_v must be a whole number, up to 256.
      conv_size: W, 2 to 4.
      conv_bias: gives the convolution a bias.
      use_short_conv: False leaves the convolution out, [q | k | v] = silu(...) of the projections.
      use_gate: False leaves out Wg and the factor silu(x Wg).
      allow_neg_eigval: beta in [0, 2] instead of [0, 1].
      rule: "gated_delta"; or another of `rules.RULES`, to compare the rule with: all else stays, and so do the
        parameters (those of a gate that the rule does not read have no effect).
      norm_eps: of the RMSNorm.
      dtype, param_dtype: compute and parameter dtype. A_log and dt_bias are float32 in any case.
      implementation: of the delta rules, see `gated_delta_rule`. One token with a cache takes `gated_delta_step`, or
        where they can run the kernels of `fused.token`.
      kernel_init, out_kernel_init: initialisers of the projections, and of Wo (default: LeCun normal, and
        kernel_init).
      rngs: source of the initial weights.

    Parameters: q_proj, k_proj, v_proj, a_proj, b_proj, g_proj (Wg), o_proj without bias; conv_weight
      [conv_dim, W], conv_dim = 2 * num_heads * head_dim + num_v_heads * V, U(-1, 1) / sqrt(W), and conv_bias;
      A_log [num_v_heads], the logarithm of A ~ U(0, 16) kept above 1e-4; dt_bias [num_v_heads], the inverse
      softplus of exp(U(log 1e-3, log 1e-1)), not below 1e-4; o_norm.weight [V]. A_log, dt_bias and the norm
      are `NoDecayParam`s.

    Attributes:
      layer: a number that no other softmax attention of a program has, see `gdn_jax.attention.attend`; a model sets
        it. Other rules have no use for it.

    Raises:
      ValueError: an argument is wrong; names it, what was expected and what came.

    Source: Yang et al. 2024 (arXiv 2412.06464); fla's layer of that name, with one convolution for q, k, v.
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

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        cache: GatedDeltaNetCache | None = None,
        mask: Bool[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        cu_seqlens: Int[Array, " N1"] | None = None,
        return_cache: bool = False,
        factor: Float[Array, " D"] | None = None,
    ) -> tuple[Float[Array, "B T D"], GatedDeltaNetCache | None]:
        """Mixes the tokens of every sequence.

        Any cutting of a sequence into calls, each given the cache of the one before, gives what one call
        gives: a long call with a cache continues (prefill in pieces), one token takes the recurrent step.

        Args:
          x: inputs [B, T, hidden_size], floating. What padding holds does not matter.
          cache: of the tokens before, for N sequences.
          mask: True at tokens, False at padding, which changes no state and no other token and has output 0.
            The tokens of a row must be one run: padding on the left, the right, both sides, or everywhere.
          segment_ids: packed rows; nothing crosses a change of id. The cache feeds the first segment of a row
            and is returned for the last. May be combined with mask, where the ids of padding are not read.
          cu_seqlens: [N + 1] packed sequences in one row (B = 1), each with its own cache entry; tokens past
            cu_seqlens[-1] are padding. Exclusive with mask and segment_ids.
          return_cache: returns a cache also when none came in.
          factor: of x's channels, where `takes_factor` says so; None: ones.

        Returns:
          y [B, T, hidden_size] in the compute dtype, and the cache after the last token (None without cache
          and return_cache).

        Raises:
          ValueError: an argument is wrong, names it; also a mask with a gap, where its values are known
            (outside jit; inside, a gap leaves the recurrent state alone and is zeros to the convolution).
          NotImplementedError: the rule is another one and cannot run with these arguments, with the reason.
        """
        self._check_call(x, cache, mask, segment_ids, cu_seqlens, return_cache)
        x, segment_ids = _clear_padding(x, mask, segment_ids, cu_seqlens)
        past, state = (None, None) if cache is None else cache
        if cache is not None and mask is None and cu_seqlens is None and self._steps_by_kernel(x, cache):
            return self._step(x, cache)
        gate = None
        joins = cache is None and mask is None and cu_seqlens is None and self.takes_factor(x)
        if factor is not None and not joins:
            raise ValueError(
                "factor: expected None for a call that `takes_factor` does not allow, got an array"
            )
        if joins:
            inputs, conv, gate = self._joined_inputs(x, segment_ids, factor)
        else:
            inputs, conv = self.rule_inputs(
                x, conv_state=past, mask=mask, segment_ids=segment_ids, cu_seqlens=cu_seqlens
            )
        o, state = rules.apply(
            self.rule,
            *inputs,
            normalized=True,
            initial_state=state,
            cu_seqlens=cu_seqlens,
            segment_ids=segment_ids,
            implementation=self.implementation,
            layer=self.layer,
        )
        y = self.rule_output(o, x, gate)
        if state is None or (cache is None and not return_cache):
            return y, None
        return y, GatedDeltaNetCache(conv, state if cache is None else state.astype(cache.state.dtype))

    def rule_inputs(
        self,
        x: Float[Array, "B T D"],
        *,
        conv_state: Float[Array, "N conv_dim W1"] | None = None,
        mask: Bool[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        cu_seqlens: Int[Array, " N1"] | None = None,
    ) -> tuple[rules.RuleInputs, Float[Array, "N conv_dim W1"]]:
        """What stands before the rule: projections, convolution and gates.

        `__call__` has checked the arguments; this method does not.

        Args:
          x: inputs [B, T, hidden_size], 0 at padding.
          conv_state: `GatedDeltaNetCache.conv` of the tokens before; None before the first one.
          mask, segment_ids, cu_seqlens: as for `__call__`, but the ids of padding are those of the nearest token.

        Returns:
          q, k (of unit length where the rule wants it), v, g and beta, and the new convolution state.
        """
        qkv, a, b = self._project(x)
        g, beta = self._gates(a, b)
        if mask is not None:
            g = jnp.where(mask[..., None], g, 0)
            beta = jnp.where(mask[..., None], beta, 0)
        if conv_state is not None and x.shape[1] == 1 and cu_seqlens is None:
            y, conv_state = self._convolve_token(qkv, conv_state, mask)
            q, k, v = split_normalized(y, **self._key_heads())
        else:
            q, k, v, conv_state = self._convolve(qkv, conv_state, mask, segment_ids, cu_seqlens)
        v = v.reshape(*v.shape[:2], self.num_v_heads, self.head_v_dim)
        return rules.RuleInputs(q, k, v, g, beta), conv_state

    def _project(self, x):
        """[q | k | v] before the convolution, and the raw inputs a and b of the gates."""
        groups = (self.q_proj, self.k_proj, self.v_proj), (self.a_proj, self.b_proj)
        qkv, gates = shared_products(x, groups, self.dtype)
        return qkv, *jnp.split(gates, 2, axis=-1)

    def _steps_by_kernel(self, x, cache) -> bool:
        """Whether the kernel takes x as one token of every row, which none of is padding."""
        if x.shape[1] > 1 or self.rule != "gated_delta":
            return False
        *inputs, _ = jax.eval_shape(self._token_inputs, x, cache.conv)
        return has_kernel(*inputs, state=cache.state, implementation=self.implementation)

    def _step(self, x, cache):
        """y and the cache after one token of every row, by the kernels."""
        if self._mixes_by_kernels(x, cache):
            token = self._token(x, cache)
            o, *after = mix_token(token, self._token_heads(), allow_neg_eigval=self.allow_neg_eigval)
            gate = self._joined_gate(token.channels)
        else:
            *inputs, conv = self._token_inputs(x, cache.conv)
            o, state = token_step(*inputs, state=cache.state, allow_neg_eigval=self.allow_neg_eigval)
            after, gate = (conv, state), None
        return self.rule_output(o[:, None], x, gate), GatedDeltaNetCache(*after)

    def _mixes_by_kernels(self, x, cache) -> bool:
        """Whether kernels take the token's convolution too, and read all products where they lie."""
        if self.conv_weight is None or not is_whole(x, *cache):
            return False
        token = jax.eval_shape(self._token, x, cache)
        return has_kernels(token, self._token_heads(), self.implementation)

    def _token(self, x, cache):
        """What `mix_token` takes."""
        assert self.conv_weight is not None, "`_mixes_by_kernels` refuses such layers"
        group = self._group()
        if group is None:
            groups = (self.q_proj, self.k_proj, self.v_proj), (self.a_proj, self.b_proj)
            channels, gates = shared_products(x, groups, self.dtype)
        else:
            channels = gates = group(x)
        bias = None if self.conv_bias is None else self.conv_bias[...]
        parameters = self.conv_weight[...], bias, self.A_log[...], self.dt_bias[...]
        return Token(channels[:, 0], gates[:, 0], *parameters, *cache)

    def _token_heads(self):
        """Where the parts of `_token` lie."""
        HV, first = self.num_v_heads, 0 if self._group() is None else self.conv_dim
        return Heads(self.num_heads, first, first + HV)

    def _group(self):
        """What all projections of x are one product of, in a copy of the layer for single tokens."""
        return group_of((self.q_proj, self.k_proj, self.v_proj, self.a_proj, self.b_proj))

    def _joined_gate(self, channels):
        """All channels of a token as heads, if the last of them are the output gate; else None."""
        gate, width = self.g_proj, self.head_v_dim
        if not isinstance(gate, ProjectionOfGroup) or gate.group is not self._group():
            return None
        if gate.stop != channels.shape[-1] or gate.stop % width or gate.bias is not None:
            return None
        return joined.gate_heads(channels[:, None], self.num_v_heads, width)

    def _token_inputs(self, x, past):
        """What `token_step` takes before the states, and the new convolution state."""
        qkv, a, b = self._project(x)
        y, past = self._convolve_token(qkv, past, None)
        q, k, v = split_normalized(y[:, 0], self.num_heads, self.head_dim, normalize=False)
        v = v.reshape(-1, self.num_v_heads, self.head_v_dim)
        return q, k, v, a[:, 0], b[:, 0], self.A_log[...], self.dt_bias[...], past

    def takes_factor(self, x: jax.Array | jax.ShapeDtypeStruct) -> bool:
        """Whether a call without cache, mask and cu_seqlens takes `factor`.

        All products of x are then channels of one array, of which kernels take each its own.
        """
        gate, weight = self.g_proj, self.conv_weight
        if gate is None or weight is None or self.conv_bias is not None:
            return False
        linears = self.q_proj, self.k_proj, self.v_proj, self.a_proj, self.b_proj, gate, self.o_proj
        if not (all(type(linear) is nnx.Linear for linear in linears) and is_one_product(x, linears)):
            return False
        dtype = self.dtype or x.dtype
        channels = self.conv_dim + self._gate_channels() + gate.out_features
        y = jax.ShapeDtypeStruct((*x.shape[:2], channels), dtype)
        o = jax.ShapeDtypeStruct((*x.shape[:2], self.num_v_heads, self.head_v_dim), dtype)
        options = dict(heads=self.num_heads, width=self.head_dim, implementation=self.implementation)
        return joined.has_kernels(x, y, weight[...], o, **options)

    def _gate_channels(self) -> int:
        """Channels of a and b, filled up to whole heads."""
        width = max(self.head_dim, self.head_v_dim)
        return -(-2 * self.num_v_heads // width) * width

    def _joined_inputs(self, x, segment_ids, factor):
        """`rule_inputs` of rows without a past, and all channels as heads, of which the last are the output gate."""
        assert self.g_proj is not None and self.conv_weight is not None, "`takes_factor` refuses such layers"
        linears = self.q_proj, self.k_proj, self.v_proj, self.a_proj, self.b_proj
        kernels = [linear.kernel[...] for linear in linears]
        behind, HV = self._gate_channels(), self.num_v_heads
        fill = jnp.zeros((self.hidden_size, behind - 2 * HV), kernels[0].dtype)
        weight = jnp.concatenate([*kernels, fill, self.g_proj.kernel[...]], axis=1)
        dtype = self.dtype or jnp.promote_types(x.dtype, weight.dtype)
        weight = weight if factor is None else factor[:, None] * weight
        y = x.astype(dtype) @ weight.astype(dtype)
        options = dict(**self._key_heads(), behind=behind)
        q, k, v, conv_state, gates, y = joined.short_conv(y, self.conv_weight[...], segment_ids, **options)
        v, y = (part.reshape(*x.shape[:2], -1, self.head_v_dim) for part in (v, y))
        a, b = jnp.split(gates[..., : 2 * HV], 2, axis=-1)
        return rules.RuleInputs(q, k, v, *self._gates(a, b)), conv_state, y

    def _gates(self, a, b):
        """g and beta."""
        g = log_decay(a, self.A_log[...], self.dt_bias[...])
        return g, write_strength(b, allow_neg_eigval=self.allow_neg_eigval)

    def rule_output(
        self,
        o: Float[Array, "B T HO V"],
        x: Float[Array, "B T D"],
        gate: Float[Array, "B T G V"] | None = None,
    ) -> Float[Array, "B T D"]:
        """What stands behind the rule: norm of each head, output gate and output projection.

        Args:
          o: output of the rule [B, T, num_v_heads, head_v_dim].
          x: inputs of the layer [B, T, hidden_size], 0 at padding, which the gate reads.
          gate: all channels as heads, where x Wg is the last of them already: see `fused.joined`.

        Returns:
          y [B, T, hidden_size] in the compute dtype; 0 at padding, where x is 0 and therefore q and o are.
        """
        if self.g_proj is None:
            o = self.o_norm(o).astype(o.dtype)
            return self.o_proj(o.reshape(*o.shape[:2], self.num_v_heads * self.head_v_dim))
        weight = self.o_norm.factor(jnp.float32)
        options = dict(eps=self.o_norm.eps, joined=gate is not None, implementation=self.implementation)
        gate = self.g_proj(x).reshape(o.shape) if gate is None else gate
        if not isinstance(self.o_proj, nnx.Linear):  # a projection without a kernel of its own
            y = gated_norm(o, gate, weight, **options)
            return self.o_proj(y.reshape(*o.shape[:2], -1))
        return gated_norm(o, gate, weight, self.o_proj.kernel[...], **options)

    def _convolve(self, qkv, past, mask, segment_ids, cu_seqlens):
        """q and k as the rule wants them, v, and the new convolution state [N, conv_dim, W-1], of whole sequences."""
        heads = self._key_heads()
        if self.conv_weight is None:
            N = qkv.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
            state = jnp.zeros((N, self.conv_dim, 0), qkv.dtype)
            return *split_normalized(_silu(qkv), **heads), state
        weight = self.conv_weight[...]
        bias = None if self.conv_bias is None else self.conv_bias[...]
        if mask is None:
            options = dict(initial_state=past, cu_seqlens=cu_seqlens, segment_ids=segment_ids)
            return short_conv(qkv, weight, bias, **heads, **options, implementation=self.implementation)
        begin, end = run_of_tokens(mask)
        token = jnp.arange(mask.shape[1])
        fresh = (token == 0) | (token == begin[:, None])
        if segment_ids is not None:
            fresh = fresh | segment_starts(segment_ids)
        past = None if past is None else past[:, None]
        spans = (fresh, begin[:, None], end[:, None], mask)
        y, state = convolve_spans(qkv, weight, bias, "silu", past, *spans)
        return *split_normalized(y, **heads), state[:, 0]

    def _convolve_token(self, qkv, past, mask):
        """[q | k | v] of one token behind the convolution, and the new convolution state."""
        if self.conv_weight is None:
            return _silu(qkv), past
        bias = None if self.conv_bias is None else self.conv_bias[...]
        y, state = causal_conv1d_update(qkv[:, 0], past, self.conv_weight[...], bias)
        if mask is not None:
            y = jnp.where(mask, y, 0)
            state = jnp.where(mask[:, :, None], state, past)
        return y[:, None], state

    def _key_heads(self):
        """How q and k lie in the first channels of the convolution."""
        return dict(heads=self.num_heads, width=self.head_dim, normalize=rules.wants_unit_length(self.rule))

    def _check_call(self, x, cache, mask, segment_ids, cu_seqlens, return_cache):
        check_array("x", x, (None, None, self.hidden_size), "B T hidden_size")
        check_floating("x", x)
        B, T, _ = x.shape
        if T == 0:
            raise ValueError("x: expected at least one token, got T = 0")
        if self.rule == "softmax_attention" and (return_cache or cache is not None or mask is not None):
            name = "mask" if mask is not None else "cache" if cache is not None else "return_cache"
            raise NotImplementedError(f"{name}: softmax_attention keeps no state and takes whole rows only")
        if cu_seqlens is not None and (mask is not None or segment_ids is not None):
            other = "mask" if mask is not None else "segment_ids"
            raise ValueError(f"cu_seqlens: expected neither mask nor segment_ids beside it, got {other}")
        if segment_ids is not None:
            check_array("segment_ids", segment_ids, (B, T), "B T")
        if mask is not None:
            check_mask(mask, B, T)
        if cache is not None:
            N = B
            if cu_seqlens is not None:
                check_array("cu_seqlens", cu_seqlens, (None,), "N+1")
                N = cu_seqlens.shape[0] - 1
            check_array("cache.conv", cache.conv, (N, self.conv_dim, self.conv_size - 1), "N conv_dim W-1")
            state = (N, self.num_v_heads, self.head_dim, self.head_v_dim)
            check_array("cache.state", cache.state, state, "N HO K V")


def check_options(
    *,
    hidden_size: int,
    num_heads: int,
    num_v_heads: int | None,
    head_dim: int,
    expand_v: float,
    conv_size: int,
    norm_eps: float,
    rule: str,
    implementation: str | None,
) -> None:
    """Raises ValueError for the first option that a `GatedDeltaNet` cannot have."""
    check_positive(hidden_size=hidden_size, num_heads=num_heads, head_dim=head_dim)
    if num_v_heads is not None and (num_v_heads < 1 or num_v_heads % num_heads):
        raise ValueError(f"num_v_heads: expected a multiple of num_heads = {num_heads}, got {num_v_heads}")
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim: expected a width up to {MAX_HEAD_DIM}, got {head_dim}")
    V = value_width(head_dim, expand_v)
    if V > MAX_HEAD_DIM:
        raise ValueError(f"expand_v: expected head_dim * expand_v up to {MAX_HEAD_DIM}, got {V}")
    if not MIN_WIDTH <= conv_size <= MAX_WIDTH:
        raise ValueError(f"conv_size: expected {MIN_WIDTH} to {MAX_WIDTH}, got {conv_size}")
    if not norm_eps > 0:
        raise ValueError(f"norm_eps: expected a positive number, got {norm_eps}")
    check_choice("rule", rule, tuple(rules.RULES))
    check_choice("implementation", implementation, (*IMPLEMENTATIONS, None))


def check_mask(mask: Bool[Array, "B T"], B: int, T: int) -> None:
    """Raises ValueError unless mask is bool [B, T] with one run of tokens in each row, where its values are known."""
    check_array("mask", mask, (B, T), "B T")
    if mask.dtype != jnp.bool_:
        raise ValueError(f"mask: expected dtype bool, got {mask.dtype}")
    if not isinstance(mask, jax.core.Tracer):
        rises = np.diff(np.asarray(mask).astype(np.int8), axis=1, prepend=0) > 0
        if (rises.sum(axis=1) > 1).any():
            row = int(np.argmax(rises.sum(axis=1) > 1))
            raise ValueError(f"mask: expected one run of tokens in each row, got a gap in row {row}")


def check_positive(**sizes: int) -> None:
    """Raises ValueError for the first size that is not a positive integer."""
    for name, value in sizes.items():
        if not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name}: expected a positive integer, got {value}")


def value_width(head_dim: int, expand_v: float) -> int:
    """V = head_dim * expand_v.

    Raises:
      ValueError: the product is not a positive whole number.
    """
    width = head_dim * expand_v
    if not math.isfinite(width) or round(width) < 1 or not math.isclose(width, round(width), rel_tol=1e-9):
        raise ValueError(f"expand_v: expected head_dim * expand_v to be whole and positive, got {width}")
    return round(width)


def _silu(x):
    return jax.nn.silu(x.astype(jnp.promote_types(x.dtype, jnp.float32))).astype(x.dtype)


def _clear_padding(x, mask, segment_ids, cu_seqlens):
    """x with zeros at padding, and segment_ids in which padding has the id of the nearest token of its row."""
    T = x.shape[1]
    if cu_seqlens is not None:
        x = jnp.where((jnp.arange(T) < cu_seqlens[-1])[:, None], x, 0)
    if mask is None:
        return x, segment_ids
    if segment_ids is not None:
        begin, end = run_of_tokens(mask)
        nearest = jnp.clip(jnp.arange(T), begin[:, None], jnp.maximum(end - 1, begin)[:, None])
        segment_ids = jnp.take_along_axis(segment_ids, nearest, axis=1)
    return jnp.where(mask[..., None], x, 0), segment_ids


def run_of_tokens(mask):
    """First True and one past the last True of each row [B]; 0, 0 where there is none."""
    T = mask.shape[1]
    any_token = mask.any(axis=1)
    begin = jnp.argmax(mask, axis=1)
    end = jnp.where(any_token, T - jnp.argmax(mask[:, ::-1], axis=1), 0)
    return begin, end
