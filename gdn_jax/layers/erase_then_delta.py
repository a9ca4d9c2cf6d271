"""Erase-then-Delta Attention (EDA): a token erases at a second key before it writes."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from gdn_jax.gates import l2norm, write_strength
from gdn_jax.layers import blocks
from gdn_jax.layers.channel_decay import ChannelDecayMixer, ChannelInputs, ChannelMixer, FirstFactors
from gdn_jax.layers.mixer import MixerConfig, MixerCosts, Start
from gdn_jax.layers.options import check_positive, value_width
from gdn_jax.layers.recurrent import ALONE, Rows
from gdn_jax.parallel.token_shards import erase_then_delta_on_mesh
from gdn_jax.rule.erase_then_delta import erase_then_delta_step
from gdn_jax.styles import PLUM, Style

RANK = 16
"""Rank of the erase key's projection for each key head, as in the paper."""


class EraseThenDelta(ChannelDecayMixer):
    """The Erase-then-Delta Attention token mixer.

        S <- Diag(exp(g)) S;   S <- S - gamma e (e^T S);   S <- S + beta k (v - k^T S)^T;   o = S^T q / sqrt(K)
        e     = x We1 We2, to unit length in each head
        gamma = sigmoid(x Ww + c)
        beta  = sigmoid(x Wb + c), doubled with allow_neg_eigval

    `layers.channel_decay` has the equations of q, k, v, g and y. On whole rows a token costs as much as two tokens of
    `KimiDeltaAttention`.

    Args: as for `ChannelDecayMixer`, with the gate "exponential" by default, and
      erase_rank: rank of the erase key's projection, for each key head.

    Parameters: as in `ChannelDecayMixer`, and b_proj and w_proj [hidden_size, num_v_heads], with biases c if there is
      a write_start, e_a_proj [hidden_size, erase_rank * num_heads] and e_b_proj.

    Raises:
      ValueError: as `ChannelDecayMixer`.

    Source: Qwen Team, "Erase-then-Delta Attention" (arXiv 2606.26560). The paper does not say whether the second
      factor of a head reads the first factors of all heads; here it does.
    """

    b_proj: blocks.Projection
    w_proj: blocks.Projection

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_v_heads: int | None = None,
        head_dim: int = 128,
        *,
        gate: str = "exponential",
        erase_rank: int = RANK,
        **options: Any,
    ):
        check_positive(erase_rank=erase_rank)
        self.erase_rank = erase_rank
        super().__init__(hidden_size, num_heads, num_v_heads, head_dim, gate=gate, **options)

    def _make_strengths(self, linear: Callable[[int, int], nnx.Linear]) -> None:
        self.b_proj = linear(self.hidden_size, self.num_v_heads)
        self.w_proj = linear(self.hidden_size, self.num_v_heads)
        width = self.erase_rank * self.num_heads
        self.e_a_proj = linear(self.hidden_size, width)
        self.e_b_proj = linear(width, self.num_heads * self.head_dim)

    def strength_projections(self) -> tuple[blocks.Projection, ...]:
        """See `RecurrentMixer.strength_projections`: first the write's, then the erasure's."""
        return self.b_proj, self.w_proj

    def _logits(self, *logits: Array) -> tuple[Array, Array | None]:
        b, w = logits
        return b, w

    def strengths(self, b: Array, w: Array | None) -> tuple[Array | None, Array | None, Array | None]:
        """See `ChannelDecayMixer.strengths`: beta, and what is erased at the erase key."""
        assert w is not None
        return write_strength(b, allow_neg_eigval=self.allow_neg_eigval), write_strength(w), None

    @property
    def can_be_served(self) -> bool:
        """See `RecurrentMixer.can_be_served`: with every gate."""
        return self.use_short_conv

    def rule_inputs(
        self, x: Float[Array, "B T D"], rows: Rows = ALONE, first: FirstFactors | None = None
    ) -> tuple[ChannelInputs, Float[Array, "N conv_dim W1"]]:
        """See `RecurrentMixer.rule_inputs`."""
        found, conv = super().rule_inputs(x, rows, first)
        return found._replace(erase_key=l2norm(self.erase_keys(x))), conv

    def erase_keys(self, x: Float[Array, "B T D"]) -> Float[Array, "B T H K"]:
        """The keys that tokens erase at, before they come to unit length."""
        return self.e_b_proj(self.e_a_proj(x)).reshape(*x.shape[:2], self.num_heads, self.head_dim)

    def apply_rule(
        self, inputs: ChannelInputs, rows: Rows = ALONE
    ) -> tuple[Float[Array, "B T HO V"], Float[Array, "N HO K V"]]:
        """See `RecurrentMixer.apply_rule`."""
        if rows.is_a_token(inputs.q):
            assert rows.state is not None
            q, k, v, g, beta, strength, _, key = jax.tree.map(lambda y: y[:, 0], inputs)
            o, state = erase_then_delta_step(q, k, v, g, beta, key, strength, rows.state)
            return o[:, None], state
        q, k, v, g, beta, strength, _, key = inputs
        options: Any = rows.packing(rows.state) | dict(implementation=self.implementation)
        return erase_then_delta_on_mesh(q, k, v, g, beta, key, strength, **options)


@dataclasses.dataclass(frozen=True)
class EraseDelta(ChannelMixer):
    """`EraseThenDelta`.

    Fields:
      erase_rank: as for `EraseThenDelta`.
    """

    name: ClassVar = "eda"
    layer: ClassVar = EraseThenDelta
    gate: str = "exponential"
    erase_rank: int = RANK

    def __post_init__(self):
        super().__post_init__()
        check_positive(erase_rank=self.erase_rank)

    def costs(self, config: Any, L: int) -> MixerCosts:
        """See `MixerConfig.costs`: a row has two tokens for each, and keeps the erase keys."""
        one, K = super().costs(config, L), config.head_dim
        state = (config.num_v_heads or config.num_heads) * K * value_width(K, config.expand_v)
        keys = L * config.num_heads * K * jnp.dtype(config.dtype).itemsize
        return one._replace(
            prefill_flops=2 * one.prefill_flops,
            activation_bytes=one.activation_bytes + keys,
            decode_flops=one.decode_flops + 4 * state,
        )

    def start(self, config: Any, time_step: float) -> Start | None:
        """See `MixerConfig.start`: what both keys erase, as one strength."""
        start = super().start(config, time_step)
        if start is None:
            return None
        return Start(start.g, start.beta + (0.5 if config.write_start is None else config.write_start))


MIXERS: dict[str, MixerConfig] = {"eda": EraseDelta(style=Style(PLUM, "D", "full", (0, (3, 1, 1, 1)), "EDA"))}
