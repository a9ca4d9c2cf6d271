"""The Gated DeltaNet token mixer as a flax.nnx module.

Parameters live in param_dtype (float32 by default) and are cast to dtype, the compute dtype, at every call,
as in flax's own layers; norms, gates, the convolution's sums and the recurrent state are float32 in any case.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from gdn_jax import rules
from gdn_jax.blocks import is_one_product, with_bias
from gdn_jax.conv import convolve_spans, segment_starts
from gdn_jax.fused import joined
from gdn_jax.fused.norms import gated_norm
from gdn_jax.fused.short_conv import split_normalized
from gdn_jax.gates import log_decay, write_strength
from gdn_jax.layers import token
from gdn_jax.layers.padding import check_mask, clear_padding, run_of_tokens
from gdn_jax.layers.parameters import GatedDeltaNetCache, GatedDeltaNetParameters
from gdn_jax.parallel.head_shards import short_conv_on_mesh
from gdn_jax.shapes import check_array, check_floating


class GatedDeltaNet(GatedDeltaNetParameters):
    """The Gated DeltaNet token mixer.

        [q | k | v] = silu(conv([x Wq | x Wk | x Wv]))        q and k to unit length in each head
        g    = -exp(A_log) softplus(x Wa + dt_bias)
        beta = sigmoid(x Wb + c), doubled with allow_neg_eigval
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
      write_start: where sigmoid(x Wb + c) starts on every token, between 0 and 1, so that beta starts there, or at
        twice as much with allow_neg_eigval: b_proj has a bias c that is learned and starts at logit(write_start).
        None: there is no bias, and beta starts at 1/2, or at 1. A write erases too, so this is how long a state
        remembers before anything is learned: with unit keys of all directions half of what was stored is left after
        about K ln 2 / beta tokens, 22 for K = 16 and beta = 1/2; see `gdn_jax.analysis.memory_horizon`.
      rule: "gated_delta"; or another of `rules.RULES`, to compare the rule with: all else stays, and so do the
        parameters (those of a gate that the rule does not read have no effect).
      norm_eps: of the RMSNorm.
      dtype, param_dtype: compute and parameter dtype. A_log and dt_bias are float32 in any case.
      implementation: of the delta rules, see `gated_delta_rule`. One token with a cache takes `gated_delta_step`, or
        where they can run the kernels of `fused.token`.
      kernel_init, out_kernel_init: initialisers of the projections, and of Wo (default: LeCun normal, and
        kernel_init).
      rngs: source of the initial weights.

    Parameters: q_proj, k_proj, v_proj, a_proj, b_proj, g_proj (Wg), o_proj without bias, but for c; conv_weight
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
        x, segment_ids = clear_padding(x, mask, segment_ids, cu_seqlens)
        past, state = (None, None) if cache is None else cache
        if cache is not None and mask is None and cu_seqlens is None and token.takes_kernels(self, x, cache):
            o, gate, cache = token.step(self, x, cache)
            return self.rule_output(o, x, gate), cache
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
        qkv, a, b = self.project(x)
        g, beta = self._gates(a, b)
        if mask is not None:
            g = jnp.where(mask[..., None], g, 0)
            beta = jnp.where(mask[..., None], beta, 0)
        if conv_state is not None and x.shape[1] == 1 and cu_seqlens is None:
            y, conv_state = token.convolve(self, qkv, conv_state, mask)
            q, k, v = split_normalized(y, **self.key_heads())
        else:
            q, k, v, conv_state = self._convolve(qkv, conv_state, mask, segment_ids, cu_seqlens)
        v = v.reshape(*v.shape[:2], self.num_v_heads, self.head_v_dim)
        return rules.RuleInputs(q, k, v, g, beta), conv_state

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
        options = self.key_heads() | {"behind": behind}
        q, k, v, conv_state, gates, y = joined.short_conv(y, self.conv_weight[...], segment_ids, **options)
        v, y = (part.reshape(*x.shape[:2], -1, self.head_v_dim) for part in (v, y))
        a, b = jnp.split(gates[..., : 2 * HV], 2, axis=-1)
        b = with_bias(b, self.b_proj)
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
        heads = self.key_heads()
        if self.conv_weight is None:
            N = qkv.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
            state = jnp.zeros((N, self.conv_dim, 0), qkv.dtype)
            return *split_normalized(token.silu(qkv), **heads), state
        if mask is None:
            options = dict(initial_state=past, cu_seqlens=cu_seqlens, segment_ids=segment_ids)
            return short_conv_on_mesh(
                qkv, *self.filters(), **heads, **options, implementation=self.implementation
            )
        begin, end = run_of_tokens(mask)
        position = jnp.arange(mask.shape[1])
        fresh = (position == 0) | (position == begin[:, None])
        if segment_ids is not None:
            fresh = fresh | segment_starts(segment_ids)
        past = None if past is None else past[:, None]
        spans = (fresh, begin[:, None], end[:, None], mask)
        y, state = convolve_spans(qkv, *self.filters(), "silu", past, *spans)
        return *split_normalized(y, **heads), state[:, 0]

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
