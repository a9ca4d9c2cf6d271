"""Kimi Delta Attention (KDA): the delta rule with a decay of each key channel and one write strength a head."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from gdn_jax.gates import write_strength
from gdn_jax.layers import blocks
from gdn_jax.layers.blocks import RMSNorm, normalise_first
from gdn_jax.layers.channel_decay import ChannelDecayMixer, ChannelMixer
from gdn_jax.layers.mixer import MixerConfig
from gdn_jax.layers.recurrent import RecurrentCache
from gdn_jax.parts import channel_token, row_product
from gdn_jax.parts.ahead import read_ahead
from gdn_jax.parts.kernels import is_whole
from gdn_jax.parts.products import Addend, array_of
from gdn_jax.shapes import Convolution
from gdn_jax.styles import ROSE, WINE, Style


class _Joined(NamedTuple):
    """Places in the product of q, k and v, in a copy of the layer for single tokens, which other projections share.

    Where the results of a projection of x begin in it; None where they are a product of their own, or need a bias.
    """

    product: blocks.ProjectionGroup | None
    """None in a layer that has none."""
    decay: int | None
    gate: int | None
    """The gate of the output; None also where others lie behind it."""
    strength: int | None


class KimiDeltaAttention(ChannelDecayMixer):
    """The Kimi Delta Attention token mixer.

        S <- Diag(exp(g)) S;   S <- S + beta k (v - k^T S)^T;   o = S^T q / sqrt(K)
        beta = sigmoid(x Wb + c), doubled with allow_neg_eigval

    What makes q, k, v, g and y is in `layers.channel_decay`; the arguments are those of `ChannelDecayMixer`.

    Parameters: those of `ChannelDecayMixer`, and b_proj [hidden_size, num_v_heads], whose bias c there is with a
      write_start.

    Raises:
      ValueError: as `ChannelDecayMixer`.

    Source: Kimi Team, "Kimi Linear" (arXiv 2510.26692), with the gate "softplus" and both ranks the width of a head.
      Ling-3.0 has the gate "lower_bound" and projections of full rank. In fla's layer of that name the output gate
      has a bias.
    """

    b_proj: blocks.Projection

    def _make_strengths(self, linear: Callable[[int, int], nnx.Linear]) -> None:
        self.b_proj = linear(self.hidden_size, self.num_v_heads)

    def strength_projections(self) -> tuple[blocks.Projection, ...]:
        """See `RecurrentMixer.strength_projections`."""
        return (self.b_proj,)

    def _logits(self, *logits: Array) -> tuple[Array, Array | None]:
        return logits[0], None

    def strengths(self, b: Array, w: Array | None) -> tuple[Array | None, Array | None, Array | None]:
        """See `ChannelDecayMixer.strengths`: beta of each head."""
        del w
        return write_strength(b, allow_neg_eigval=self.allow_neg_eigval), None, None

    def from_stream(
        self,
        norm: RMSNorm,
        x: Float[Array, "B T D"],
        y: Float[Array, "P T D"] | Addend | None,
        *,
        cache: RecurrentCache | None = None,
        mask: Bool[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        return_cache: bool = False,
    ) -> tuple[Float[Array, "B T D"], tuple[Float[Array, "B T D"], RecurrentCache | None]]:
        """See `blocks.from_stream`: of a token of one row the norm, the product of all projections and the
        convolution are one kernel."""
        group = self._joined().product if self.token_gates() is not None else None
        if group is not None and cache is not None and mask is None and segment_ids is None:
            weight, convolution = group.weight[...], Convolution(cache.conv, *self.filters())
            if row_product.takes(x, weight, self.implementation, convolution) and is_whole(*cache):
                static: Any = dict(eps=norm.eps, dtype=group.dtype or weight.dtype, ahead=read_ahead(self, 1))
                after, _, channels, conv = row_product.stream_product(
                    x, array_of(y), norm.scale(jnp.float32), weight, convolution, **static
                )
                assert conv is not None
                behind = RecurrentCache(conv, cache.state)
                if (found := self._of_channels(channels, channels, channels, behind)) is not None:
                    return after, found
        options: Any = dict(cache=cache, mask=mask, segment_ids=segment_ids, return_cache=return_cache)
        return normalise_first(self, norm, x, y, **options)

    def token_gates(self) -> channel_token.ChannelGates | None:
        """See `RecurrentMixer.token_gates`."""
        _, decay, gate, strength = self._joined()
        if decay is None or gate is None or strength is None or self.conv_weight is None:
            return None
        own = self.lower_bound, self.allow_neg_eigval
        return channel_token.ChannelGates(self.num_heads, decay, strength, *own)

    def _by_kernels(self, x, cache, segment_ids, return_cache):
        """`__call__` of one token of every row by `parts.channel_token`; None where its kernels do not take it."""
        del segment_ids, return_cache
        if cache is None or x.shape[1] > 1 or self.conv_weight is None or not is_whole(x, *cache):
            return None
        if jax.eval_shape(self.raw_gates, x)[2] is not None:  # what is written is not what is erased
            return None
        return self._of_channels(*self._projected(x), cache, x)

    def _projected(self, x) -> tuple[Array, Array, Array]:
        """The arrays of `ChannelToken` that are made of x: channels, f and b, each [B, T, ..]."""
        f, b, _ = self.raw_gates(x)
        both, joined = self._joined_factors(x), self._joined()
        channels = self.project_qkv(x) if joined.product is None else joined.product(x)
        if joined.decay is not None:
            f = channels
        else:
            f = f.reshape(*f.shape[:2], -1) if both is None else both
        return channels, f, b if joined.strength is None else channels

    def _of_channels(self, channels, f, b, cache, x=None):
        """A token from its products; None where kernels do not take it.

        Without x all are one product, in which q, k and v are behind the convolution, as is the cache.
        """
        joined, options = self._joined(), (self.lower_bound, self.allow_neg_eigval)
        begin = joined.decay or 0, joined.strength or 0
        gates = channel_token.ChannelGates(self.num_heads, *begin, *options)
        A_log = None if self.A_log is None else self.A_log[...]
        weight, bias = (None, None) if x is None else self.filters()
        inputs, parameters = (channels[:, 0], f[:, 0], b[:, 0]), (A_log, self.dt_bias[...])
        token = channel_token.ChannelToken(*inputs, weight, bias, *parameters, *cache)
        if not channel_token.takes(token, gates, self.implementation):
            return None
        o, *after = channel_token.mix_channel_token(token, gates)
        o, cache = o[:, None], RecurrentCache(*after)
        if x is None or joined.gate is not None:
            return self._gated_output_of_channels(o, channels), cache
        return self.rule_output(o, x), cache

    def _joined(self) -> _Joined:
        product = blocks.group_of((self.q_proj, self.k_proj, self.v_proj))

        def first(linear: blocks.Projection) -> int | None:
            if not isinstance(linear, blocks.ProjectionOfGroup) or linear.group is not product:
                return None
            return linear.start if linear.bias is None else None

        decay, gate = (self._factors(name)[-1] for name in "fg")
        start = first(gate)
        if (
            product is not None
            and start is not None
            and start + blocks.width_of(gate) < product.weight.shape[0]
        ):
            start = None
        return _Joined(product, first(decay), start, first(self.b_proj))


@dataclasses.dataclass(frozen=True)
class KimiDelta(ChannelMixer):
    """`KimiDeltaAttention`."""

    name: ClassVar = "kda"
    layer: ClassVar = KimiDeltaAttention


MIXERS: dict[str, MixerConfig] = {
    "kda": KimiDelta(style=Style(WINE, ">", "full", (0, (5, 1)), "KDA")),
    "kda_lower_bound": KimiDelta(
        gate="lower_bound", style=Style(ROSE, "8", "none", (0, (5, 1)), "KDA, bounded gate")
    ),
}
