"""Shared parts of the layers with per-channel decay, with the gates of Kimi Delta Attention.

[q | k | v] = silu(conv([x Wq | x Wk | x Wv]))        q and k to unit length in each head
f    = x Wf1 Wf2, or x Wf
g    = -exp(A_log) softplus(f + dt_bias)                      gate "softplus"
g    = lower_bound sigmoid(exp(A_log) (f + dt_bias))          gate "lower_bound"
g    = lower_bound (1 - exp(exp(A_log) softplus(f + dt_bias) / lower_bound))        gate "exponential"
o    = delta_rule(q, k, v, g, ...)                            strengths as the layer's own file says
y    = (RMSNorm(o) * sigmoid(x Wg1 Wg2, or x Wg)) Wo          the norm over each head
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from gdn_jax.gates import MAX_RATE, channel_log_decay, init_A_log, init_dt_bias
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
from gdn_jax.parallel.token_shards import DELTA_RULE
from gdn_jax.parts.channel_gates import channel_gates
from gdn_jax.parts.norms import gated_norm
from gdn_jax.parts.short_conv import KeyHeads
from gdn_jax.rule.ops import delta_step
from gdn_jax.shapes import ArgumentError, check_choice

GATES = {"softplus": None, "lower_bound": "sigmoid", "exponential": "exponential"}
"""Gates of the decay, and the way in which each reaches its lower bound, see `channel_log_decay`; None: no bound."""
HEAD_DIM = "head_dim"
"""The rank of a low-rank projection in released models: the width of a head."""
LEAST_RATE = 1.0
"""Decay rates A of the gate "softplus" are drawn from U(LEAST_RATE, 16)."""


class ChannelInputs(NamedTuple):
    """The arrays that a layer passes to its rule. For `delta_rule` either beta or erase and write are None.

    Fields:
      q, k: queries and keys [B, T, H, K], of unit length.
      v: values [B, T, HV, V].
      g: log decay of each key channel [B, T, HV, K], <= 0.
      beta: strength of both erasing and writing [B, T, HV].
      erase, write: separate strengths, for each head [B, T, HV] or channel [B, T, HV, K] and [B, T, HV, V].
      erase_key: unit keys [B, T, H, K] at which a token erases before it writes, with the strength `erase`; None in
        layers of `delta_rule`.
    """

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    v: Float[Array, "B T HV V"]
    g: Float[Array, "B T HV K"]
    beta: Float[Array, "B T HV"] | None = None
    erase: Float[Array, "B T HV *K"] | None = None
    write: Float[Array, "B T HV *V"] | None = None
    erase_key: Float[Array, "B T H K"] | None = None


def check_gates(
    *, gate: str, lower_bound: float, gate_rank: int | str | None, output_gate_rank: int | str | None
) -> None:
    """Raises ValueError for the first option of the gates that no layer can have."""
    check_choice("gate", gate, tuple(GATES))
    if not -float("inf") < lower_bound < 0:
        raise ArgumentError("lower_bound", "a number below 0", lower_bound)
    for name, rank in (("gate_rank", gate_rank), ("output_gate_rank", output_gate_rank)):
        if isinstance(rank, str):
            check_choice(name, rank, (HEAD_DIM, None))
        elif rank is not None:
            check_positive(**{name: rank})


class FirstFactors(NamedTuple):
    """Results of the projections of x that a layer makes in one product."""

    f: Float[Array, "B T R"]
    """The result of the first factor to the decay."""
    logits: list[Float[Array, "B T _"]]
    """The results of the projections to the strengths."""
    g: Float[Array, "B T R2"]
    """The result of the first factor to the output gate."""

    @classmethod
    def of(cls, results: list[Array]) -> "FirstFactors":
        """Takes the results in the order of the fields."""
        f, *logits, g = results
        return cls(f, logits, g)


class ChannelDecayMixer(RecurrentMixer):
    """A token mixer with per-channel decay, with the gates of `channel_log_decay`.

    Subclasses define their strengths by `_make_strengths`, `strength_projections`, `_logits` and `strengths`.

    Args: as for `GatedDeltaNet`, without rule and use_gate, and
      gate: gate of the decay, "softplus", "lower_bound" or "exponential", see `channel_log_decay`. The gate
        "exponential" runs in plain JAX, and of all layers only `EraseThenDelta` can be served with it.
      lower_bound: the strongest log decay of a token with a bounded gate, below 0.
      gate_rank: rank of the decay's projection; "head_dim": the width of a head; None: full rank, one matrix.
      output_gate_rank: the same for the output gate.
      output_gate_bias: gives the output gate's last projection a bias.
      use_A_log: False leaves A_log out, as if it were 0.
      allow_neg_eigval: erase strength in [0, 2] instead of [0, 1].

    Parameters: q_proj, k_proj, v_proj, o_proj; f_a_proj [hidden_size, rank] and f_b_proj, or f_proj; g_a_proj and
      g_b_proj, or g_proj; the projections of the strengths; conv_weight [conv_dim, W], the filters of q, k and v in
      this order, conv_dim = 2 * num_heads * head_dim + num_v_heads * V, U(-1, 1) / sqrt(W), and conv_bias;
      A_log [num_v_heads], log of U(1, 16), 0 with a lower bound; dt_bias [num_v_heads, K], the inverse softplus of
      exp(U(log 1e-3, log 1e-1)), not below 1e-4; o_norm.weight [V]. A_log, dt_bias and the norm are `NoDecayParam`s.

    Raises:
      ValueError: an argument is wrong; names it, what was expected and what came.
    """

    by_channels = True
    activation: ClassVar[str] = "sigmoid"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_v_heads: int | None = None,
        head_dim: int = 128,
        *,
        gate: str = "softplus",
        lower_bound: float = -5.0,
        gate_rank: int | str | None = HEAD_DIM,
        output_gate_rank: int | str | None = HEAD_DIM,
        output_gate_bias: bool = False,
        use_A_log: bool = True,
        expand_v: float = 1.0,
        allow_neg_eigval: bool = False,
        **common: Unpack[LayerOptions],
    ):
        self.gate_rank, self.output_gate_rank, self.use_A_log = gate_rank, output_gate_rank, use_A_log
        check_gates(
            gate=gate, lower_bound=lower_bound, gate_rank=gate_rank, output_gate_rank=output_gate_rank
        )
        self.bound = GATES[gate] or "sigmoid"
        self.lower_bound = None if GATES[gate] is None else lower_bound
        super().__init__(hidden_size, num_heads, num_v_heads, head_dim, expand_v, allow_neg_eigval, **common)
        if output_gate_bias:
            last = self.factors("g")[-1]
            blocks.add_bias(last, jnp.zeros(last.out_features, self.param_dtype))

    def _make_gates(self, linear: Callable[[int, int], nnx.Linear]) -> None:
        decays, values = self.num_v_heads * self.head_dim, self.num_v_heads * self.head_v_dim
        for name, rank, outputs in (("f", self.gate_rank, decays), ("g", self.output_gate_rank, values)):
            if rank is None:
                setattr(self, f"{name}_proj", linear(self.hidden_size, outputs))
            else:
                width = self.head_dim if isinstance(rank, str) else rank
                setattr(self, f"{name}_a_proj", linear(self.hidden_size, width))
                setattr(self, f"{name}_b_proj", linear(width, outputs))
        self._make_strengths(linear)

    def _make_decay(self, rngs: nnx.Rngs) -> None:
        heads, rates = self.num_v_heads, None
        if self.use_A_log:
            bounded = self.lower_bound is not None
            rates = jnp.zeros(heads) if bounded else init_A_log(rngs.params(), heads, LEAST_RATE)
        self.A_log = None if rates is None else blocks.NoDecayParam(rates)
        self.dt_bias = blocks.NoDecayParam(init_dt_bias(rngs.params(), heads, self.head_dim))

    def _make_strengths(self, linear: Callable[[int, int], nnx.Linear]) -> None:
        """Sets the projections of the strengths; linear(inputs, outputs) makes one."""
        raise NotImplementedError

    def strengths(self, b: Array, w: Array | None) -> tuple[Array | None, Array | None, Array | None]:
        """beta, erase and write from the results of `strength_projections`, in float32."""
        raise NotImplementedError

    @property
    def can_be_served(self) -> bool:
        """See `RecurrentMixer.can_be_served`."""
        return self.use_short_conv and self.bound == "sigmoid"

    def factors(self, name: str) -> list[Any]:
        """The projections to the decay, "f", or to the output gate, "g", one after the other."""
        names = (f"{name}_proj", f"{name}_a_proj", f"{name}_b_proj")
        return [getattr(self, name) for name in names if hasattr(self, name)]

    def in_common(self, x: Float[Array, "B T D"]) -> dict[str, Any]:
        """See `RecurrentMixer.in_common`: the first factors to the decay and to the output gate, and the logits.

        Their gradient of x is one product, too, in the place of two and a sum. Where one of both has a single factor,
        as wide as keys or values, they stay products of their own.
        """
        f, g = self.factors("f"), self.factors("g")
        linears = (f[0], *self.strength_projections(), g[0])
        if len(f) == 1 or len(g) == 1 or not blocks.is_one_product(x, linears):
            return {}
        # XLA would make one product of these and of [q | k | v], and then copy all of them to where they are read.
        x = jax.lax.optimization_barrier(x)
        return {"first": FirstFactors.of(self._side_by_side(x, linears))}

    def _side_by_side(self, x: Float[Array, "B T D"], linears: Sequence[Any]) -> list[Array]:
        """Results of projections of x, from one product."""
        [joined] = blocks.shared_products(x, [linears], self.dtype)
        ends = list(itertools.accumulate(linear.out_features for linear in linears))
        return jnp.split(joined, ends[:-1], axis=-1)

    def raw_gates(
        self, x: Float[Array, "B T D"], first: FirstFactors | None = None
    ) -> tuple[Array, Array, Array | None]:
        """See `RecurrentMixer.raw_gates`: f [B, T, HV, K] and the logits of the strengths. first: of `in_common`."""
        linear, *rest = self.factors("f")
        if first is None:
            f, *logits = self._side_by_side(x, (linear, *self.strength_projections()))
        else:
            f, logits = first.f, first.logits
        for linear in rest:
            f = linear(f)
        f = f.reshape(*f.shape[:2], self.num_v_heads, self.head_dim)
        return f, *self._logits(*logits)

    def _logits(self, *logits: Array) -> tuple[Array, Array | None]:
        """Logits of what is erased and of what is written, or of both and None, by heads."""
        raise NotImplementedError

    def gates(
        self, a: Array, b: Array, w: Array | None
    ) -> tuple[Array, Array | None, Array | None, Array | None]:
        """See `RecurrentMixer.gates`."""
        A_log = None if self.A_log is None else self.A_log[...]
        arrays = a, A_log, self.dt_bias[...], self.lower_bound
        if self.bound == "sigmoid":
            g = channel_gates(*arrays, implementation=self.implementation)
        else:
            g = channel_log_decay(*arrays, bound=self.bound)
        return g, *self.strengths(b, w)

    def rule_inputs(
        self, x: Float[Array, "B T D"], rows: Rows = ALONE, first: FirstFactors | None = None
    ) -> tuple[ChannelInputs, Float[Array, "N conv_dim W1"]]:
        """See `RecurrentMixer.rule_inputs`."""
        qkv, gates = self.project_qkv(x), at_tokens(rows.mask, *self.gates(*self.raw_gates(x, first)))
        heads = KeyHeads(self.num_heads, self.head_dim)
        q, k, v, conv_state = self._convolve_qkv(heads, qkv, rows)
        return ChannelInputs(q, k, v, *gates), conv_state

    def apply_rule(
        self, inputs: ChannelInputs, rows: Rows = ALONE
    ) -> tuple[Float[Array, "B T HO V"], Float[Array, "N HO K V"]]:
        """See `RecurrentMixer.apply_rule`."""
        if rows.is_a_token(inputs.q):
            assert rows.state is not None
            q, k, v, g, beta, erase, write, _ = jax.tree.map(lambda y: y[:, 0], inputs)
            o, state = delta_step(q, k, v, g, beta, rows.state, erase=erase, write=write)
            return o[:, None], state
        q, k, v, g, beta, erase, write, _ = inputs
        options = dict(erase=erase, write=write) | rows.packing(rows.state)
        return DELTA_RULE.here()(q, k, v, g, beta, **options, implementation=self.implementation)

    def rule_output(
        self, o: Float[Array, "B T HO V"], x: Float[Array, "B T D"], first: FirstFactors | None = None
    ) -> Float[Array, "B T D"]:
        """See `RecurrentMixer.rule_output`."""
        gate, linears = x, self.factors("g")
        if first is not None:
            gate, linears = first.g, linears[1:]
        for linear in linears:
            gate = linear(gate)
        return self.gated_output(partial(gated_norm, activation=self.activation), o, gate.reshape(o.shape))


@dataclasses.dataclass(frozen=True)
class ChannelMixer(MixerConfig):
    """A layer of `layers.channel_decay`.

    Fields:
      gate, lower_bound, gate_rank, output_gate_rank, output_gate_bias, use_A_log: as for `ChannelDecayMixer`.
    """

    by_tokens: ClassVar = True
    gate: str = "softplus"
    lower_bound: float = -5.0
    gate_rank: int | str | None = HEAD_DIM
    output_gate_rank: int | str | None = HEAD_DIM
    output_gate_bias: bool = False
    use_A_log: bool = True

    def __post_init__(self):
        ranks = dict(gate_rank=self.gate_rank, output_gate_rank=self.output_gate_rank)
        check_gates(gate=self.gate, lower_bound=self.lower_bound, **ranks)

    def costs(self, config: Any, L: int) -> MixerCosts:
        """See `MixerConfig.costs`: a decay of each key channel is kept; products with decays are not counted."""
        return recurrent_costs(config, L, gates=config.head_dim)

    def start(self, config: Any, time_step: float) -> Start | None:
        """See `MixerConfig.start`."""
        rates = {"lower_bound": -self.lower_bound, "exponential": 1.0}
        rate = rates.get(self.gate, (LEAST_RATE + MAX_RATE) / 2 if self.use_A_log else 1.0)
        return Start(decay_at_start(time_step, rate), strength_at_start(config))
