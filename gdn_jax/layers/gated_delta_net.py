"""The Gated DeltaNet token mixer as a flax.nnx module.

A call goes one of two ways. Whole rows without a past may be one operation by kernels, `parts.mixer`.
`layers.recurrent` does all else, `rule_inputs`, the rule and `rule_output`, of which any part may still be a kernel.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from gdn_jax import rules
from gdn_jax.gates import log_decay, write_strength
from gdn_jax.layers import blocks
from gdn_jax.layers.blocks import RMSNorm, normalise_first
from gdn_jax.layers.mixer import MixerConfig, Start, decay_at_start, strength_at_start
from gdn_jax.layers.options import check_sizes
from gdn_jax.layers.recurrent import ALONE, LayerOptions, RecurrentCache, RecurrentMixer, Rows, at_tokens
from gdn_jax.parallel.token_shards import splits_tokens
from gdn_jax.parts import mixer
from gdn_jax.parts.norms import gated_norm
from gdn_jax.parts.products import Addend
from gdn_jax.parts.short_conv import KeyHeads
from gdn_jax.rules.gated_delta import GATED_DELTA
from gdn_jax.rules.softmax_attention import SOFTMAX_ATTENTION

GatedDeltaNetCache = RecurrentCache
"""Cache of a `GatedDeltaNet`; all recurrent layers have the same kind."""


class GatedDeltaNet(RecurrentMixer):
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
      write_start: initial write strength, between 0 and 1: b_proj gets a learned bias c that starts at
        logit(write_start), so that beta starts there, or at twice that with allow_neg_eigval. None: no bias, and beta
        starts at 1/2, or at 1. Each write erases too: half of a memory is left after about K ln 2 / beta tokens, 22
        for K = 16 (`gdn_jax.inspect.analysis.memory_horizon`). With narrow keys, little decay and longer rows models
        learn recall sooner from 0.06: docs/models.md says when to set it.
      rule: "gated_delta"; another name of `rules.RULES`, or a `rules.Rule` of your own, as a baseline. Everything
        else stays the same, also the parameters; a gate that the rule does not read has no effect.
      norm_eps: epsilon of the RMSNorm.
      dtype, param_dtype: compute and parameter dtype. A_log and dt_bias are always float32.
      implementation: of the delta rules, see `gated_delta_rule`. With "chunked" or "recurrent" the other parts run in
        plain JAX too, else by kernels where possible; with "mosaic_gpu" a part without a kernel warns.
      kernel_init, out_kernel_init: initialisers of the projections, and of Wo (default: LeCun normal, and
        kernel_init).
      rngs: source of the initial weights.

    Parameters: q_proj, k_proj, v_proj, a_proj, b_proj, g_proj (Wg), o_proj without bias, but for c; conv_weight
      [conv_dim, W], conv_dim = 2 * num_heads * head_dim + num_v_heads * V, U(-1, 1) / sqrt(W), and conv_bias;
      A_log [num_v_heads], the logarithm of A ~ U(0, 16) kept above 1e-4; dt_bias [num_v_heads], the inverse
      softplus of exp(U(log 1e-3, log 1e-1)), not below 1e-4; o_norm.weight [V]. A_log, dt_bias and the norm
      are `NoDecayParam`s.

    Attributes:
      rule: the `rules.Rule`; another one, or its name, may be assigned.
      layer: index of the layer in its model, which sets it. It must be unique in a program: cuDNN's softmax attention
        needs it, see `gdn_jax.parts.attention.attend`. Other rules ignore it.

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
        use_gate: bool = True,
        allow_neg_eigval: bool = False,
        rule: str | rules.Rule = "gated_delta",
        **common: Unpack[LayerOptions],
    ):
        self.use_gate = use_gate
        super().__init__(hidden_size, num_heads, num_v_heads, head_dim, expand_v, allow_neg_eigval, **common)
        self.rule = rule
        self.layer = 0

    def _make_gates(self, linear: Callable[[int, int], nnx.Linear]) -> None:
        self.a_proj = linear(self.hidden_size, self.num_v_heads)
        self.b_proj = linear(self.hidden_size, self.num_v_heads)
        self.g_proj = linear(self.hidden_size, self.num_v_heads * self.head_v_dim) if self.use_gate else None

    def from_stream(
        self,
        norm: RMSNorm,
        x: Float[Array, "B T D"],
        y: Float[Array, "P T D"] | Addend | None,
        **options: Any,
    ) -> tuple[Float[Array, "B T D"], tuple[Float[Array, "B T D"] | Addend, GatedDeltaNetCache | None]]:
        """See `blocks.from_stream`: as one operation the projections take over the norm's scale."""
        is_plain = all(options.get(name) is None for name in ("cache", "mask", "cu_seqlens"))
        found = self._as_one(x) if is_plain else None
        if found is None:
            return normalise_first(self, norm, x, y, **options)
        (sizes, weights), ids, return_cache = found, options.get("segment_ids"), options.get("return_cache")
        self._check_call(x, None, None, ids, None, return_cache)
        x, normalized, (inputs,) = norm.add_folded(x, y, weights.inputs, product=sizes.product)
        out, conv, state = mixer.mix(sizes, normalized, weights._replace(inputs=inputs), ids)
        return x, (out, _cache_of(conv, state, return_cache))

    def rule_inputs(
        self, x: Float[Array, "B T D"], rows: Rows = ALONE
    ) -> tuple[rules.RuleInputs, Float[Array, "N conv_dim W1"]]:
        """See `RecurrentMixer.rule_inputs`: q, k, v, g and beta."""
        qkv, a, b = self.project(x)
        g, beta, _, _ = at_tokens(rows.mask, *self.gates(a, b, None))
        q, k, v, conv_state = self._convolve_qkv(self._key_heads(), qkv, rows)
        return rules.RuleInputs(q, k, v, g, beta), conv_state

    def apply_rule(
        self, inputs: rules.RuleInputs, rows: Rows = ALONE
    ) -> tuple[Float[Array, "B T HO V"], Float[Array, "N HO K V"] | None]:
        """See `RecurrentMixer.apply_rule`."""
        return self._rule()(*inputs, **rows.packing(rows.state))

    def rule_output(self, o: Float[Array, "B T HO V"], x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """See `RecurrentMixer.rule_output`."""
        if self.g_proj is None:
            o = self.o_norm(o).astype(o.dtype)
            return self.o_proj(o.reshape(*o.shape[:2], self.num_v_heads * self.head_v_dim))
        return self.gated_output(gated_norm, o, self.g_proj(x).reshape(o.shape))

    def project(
        self, x: Float[Array, "B T D"]
    ) -> tuple[Float[Array, "B T conv_dim"], Float[Array, "B T HO"], Float[Array, "B T HO"]]:
        """[q | k | v] before the convolution, and the raw inputs a and b of the gates."""
        groups = (self.q_proj, self.k_proj, self.v_proj), (self.a_proj, self.b_proj)
        qkv, gates = blocks.shared_products(x, groups, self.dtype)
        a, b = jnp.split(gates, 2, axis=-1)
        return qkv, a, b

    def raw_gates(self, x: Float[Array, "B T D"]) -> tuple[Array, Array, Array | None]:
        """See `RecurrentMixer.raw_gates`."""
        return self.a_proj(x), self.b_proj(x), None

    def gates(
        self, a: Array, b: Array, w: Array | None
    ) -> tuple[Array, Array | None, Array | None, Array | None]:
        """See `RecurrentMixer.gates`: g and beta."""
        del w
        beta = write_strength(b, allow_neg_eigval=self.allow_neg_eigval)
        return log_decay(a, self.A_log[...], self.dt_bias[...]), beta, None, None

    @property
    def rule(self) -> rules.Rule:
        """The rule, as an object also where a name was assigned.

        Raises:
          ValueError: what is assigned is neither a rule nor the name of one.
        """
        return self._chosen_rule

    @rule.setter
    def rule(self, rule: str | rules.Rule):
        self._chosen_rule = rules.find(rule)

    @property
    def can_be_served(self) -> bool:
        """See `RecurrentMixer.can_be_served`."""
        return self.rule == GATED_DELTA and self.use_short_conv

    def strength_projections(self) -> tuple[blocks.Projection, ...]:
        """See `RecurrentMixer.strength_projections`."""
        return (self.b_proj,)

    @property
    def attends(self) -> bool:
        """See `RecurrentMixer.attends`."""
        return self.rule == SOFTMAX_ATTENTION

    def _key_heads(self) -> KeyHeads:
        return KeyHeads(self.num_heads, self.head_dim, self.rule.unit_length)

    def _rule(self):
        return partial(self.rule, normalized=True, implementation=self.implementation, layer=self.layer)

    def _as_one_operation(self, x, segment_ids, return_cache):
        if (found := self._as_one(x)) is None:
            return None
        sizes, weights = found
        y, conv, state = mixer.mix(sizes, x, weights, segment_ids)
        return y, _cache_of(conv, state, return_cache)

    def _as_one(self, x) -> tuple[mixer.Mixer, mixer.Weights] | None:
        """The layer as `parts.mixer` takes it for whole rows x without a past; None where it does not."""
        if self.g_proj is None or self.conv_weight is None or self.conv_bias is not None:
            return None
        if splits_tokens():  # its convolution reads whole rows, which XLA would gather
            return None
        linears = self.q_proj, self.k_proj, self.v_proj, self.a_proj, self.b_proj, self.g_proj, self.o_proj
        if not (all(type(linear) is nnx.Linear for linear in linears) and blocks.is_one_product(x, linears)):
            return None
        *before, gate, output = (linear.kernel[...] for linear in linears)
        dtype = self.dtype or jnp.promote_types(x.dtype, gate.dtype)
        heads = self._key_heads(), self.num_v_heads, self.head_v_dim
        rule, product = self._rule(), self.q_proj.dot_general
        sizes = mixer.Mixer(*heads, self.o_norm.eps, self.allow_neg_eigval, dtype, rule, product)
        filters, bias = self.conv_weight[...], self.b_proj.bias
        if not mixer.takes(sizes, x, filters, self.implementation):
            return None
        parameters = filters, self.A_log[...], self.dt_bias[...], None if bias is None else bias[...]
        inputs, norm = mixer.side_by_side(sizes, before, gate), self.o_norm.scale(jnp.float32)
        return sizes, mixer.Weights(inputs, *parameters, norm, output)

    def _check_call(self, x, cache, mask, segment_ids, cu_seqlens, return_cache):
        super()._check_call(x, cache, mask, segment_ids, cu_seqlens, return_cache)
        if self.attends and (return_cache or cache is not None or mask is not None):
            name = "mask" if mask is not None else "cache" if cache is not None else "return_cache"
            raise NotImplementedError(f"{name}: softmax_attention keeps no state and takes whole rows only")


def _cache_of(conv: Array, state: Array | None, wanted: bool | None) -> GatedDeltaNetCache | None:
    """The cache after a row; None where nobody asks, and of a rule without a state."""
    return None if state is None or not wanted else GatedDeltaNetCache(conv, state)


@dataclasses.dataclass(frozen=True)
class GatedDeltaNetMixer(MixerConfig):
    """`GatedDeltaNet`; `ModelConfig.rule` is its rule."""

    name: ClassVar = "gated_delta_net"
    layer: ClassVar = GatedDeltaNet

    def check(self, config: Any) -> None:
        """See `MixerConfig.check`."""
        check_sizes(**config.options_of(check_sizes))
        rules.find(config.rule)

    def start(self, config: Any, time_step: float) -> Start | None:
        """See `MixerConfig.start`."""
        rule = rules.find(config.rule)
        decays = "g" in rule.gates
        if rule.erases is None or not (decays or rule.erases):
            return None
        g = decay_at_start(time_step) if decays else 0.0
        return Start(g, strength_at_start(config) if rule.erases else 0.0)

    def splits_tokens(self, config: Any) -> bool:
        """See `MixerConfig.splits_tokens`: the delta rules do."""
        return rules.find(config.rule).splits_tokens


MIXERS: dict[str, MixerConfig] = {"gated_delta_net": GatedDeltaNetMixer(style=GATED_DELTA.style)}
