"""Kimi Delta Attention (KDA): the delta rule with a decay of each key channel and one write strength a head."""

from collections.abc import Callable

import jax
from flax import nnx
from jaxtyping import Array

from gdn_jax import blocks
from gdn_jax.fused import channel_token
from gdn_jax.fused.token import is_whole
from gdn_jax.gates import write_strength
from gdn_jax.layers.channel_decay import ChannelDecayMixer
from gdn_jax.layers.recurrent import RecurrentCache


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

    def _by_kernels(self, x, cache, segment_ids, return_cache):
        """`__call__` of one token of every row by `fused.channel_token`; None where its kernels do not take it."""
        del segment_ids, return_cache
        if cache is None or x.shape[1] > 1 or self.conv_weight is None or not is_whole(x, *cache):
            return None
        first = self._first_strength() or 0
        gates = channel_token.ChannelGates(self.num_heads, first, self.lower_bound, self.allow_neg_eigval)
        if jax.eval_shape(self.raw_gates, x)[2] is not None:  # what is written is not what is erased
            return None
        if not channel_token.has_kernels(jax.eval_shape(self._token, x, cache), gates, self.implementation):
            return None
        o, *after = channel_token.mix_channel_token(self._token(x, cache), gates)
        return self.rule_output(o[:, None], x), RecurrentCache(*after)

    def _token(self, x, cache) -> channel_token.ChannelToken:
        """Arrays that `mix_channel_token` takes."""
        f, b, _ = self.raw_gates(x)
        both, group = self._joined_factors(x), self._group()
        f = f.reshape(*f.shape[:2], -1) if both is None else both
        channels = self.project_qkv(x) if group is None else group(x)
        b = b if self._first_strength() is None else channels
        A_log = None if self.A_log is None else self.A_log[...]
        gates = f[:, 0], b[:, 0], *self.filters(), A_log, self.dt_bias[...]
        return channel_token.ChannelToken(channels[:, 0], *gates, *cache)

    def _group(self) -> blocks.ProjectionGroup | None:
        """The product that the projections of x are parts of, in a copy of the layer for single tokens."""
        return blocks.group_of((self.q_proj, self.k_proj, self.v_proj))

    def _first_strength(self) -> int | None:
        """Where the raw input of the strengths begins in that product, if it lies there as it is."""
        b = self.b_proj
        if isinstance(b, blocks.ProjectionOfGroup) and b.group is self._group() and b.bias is None:
            return b.start
        return None
