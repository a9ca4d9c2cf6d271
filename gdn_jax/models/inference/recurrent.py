"""Recurrent layers for single tokens: projections of one input are one product, which kernels read as it lies, and of
one row the norm and the layer are one kernel."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from gdn_jax.layers import GatedDeltaNet, RecurrentCache, RecurrentMixer
from gdn_jax.layers.blocks import Projection, RMSNorm, from_stream, normalise_first
from gdn_jax.models.inference.call import Call
from gdn_jax.models.inference.projections import (
    PartOfProduct,
    ProjectionGroup,
    ProjectionOfGroup,
    ProjectionOfStack,
    group_of,
    group_projections,
    multiply_factors,
    stack_factors,
)
from gdn_jax.parts import delta_layer, heads_product, row_product, token, token_step
from gdn_jax.parts.ahead import read_ahead
from gdn_jax.parts.kernels import is_whole
from gdn_jax.parts.norms import gated_norm_of_channels
from gdn_jax.parts.products import Addend, array_of
from gdn_jax.parts.short_conv import split_normalized
from gdn_jax.rules.gated_delta import GATED_DELTA
from gdn_jax.shapes import Convolution

INPUTS = tuple(f"{name}_proj" for name in ("q", "k", "v", "a", "f", "f_a", "g_a", "b", "w", "g"))
"""Projections of the layer's input, in the order in which its kernels take them. First factors are neighbours: what
multiplies both, a `ProjectionStack`, reads them where they lie."""
FACTORS = "fg"
"""Projections that may have two factors: to the decay and to the output gate."""

Mixed = tuple[Float[Array, "B T D"], RecurrentCache]
"""The output of a layer and its cache after a token."""


class RecurrentRows(nnx.Module):
    """A recurrent layer for single tokens of rows, of which each part is what the layer itself has.

    Args:
      mixer: the layer, of a copy for inference.
    """

    attends = False

    def __init__(self, mixer: RecurrentMixer):
        self.mixer: Any = mixer

    @classmethod
    def of(cls, mixer: RecurrentMixer, call: Call) -> "RecurrentRows | DeltaRow":
        """A layer for calls of single tokens, which takes the mixer over: a `DeltaRow` where its kernel takes it.

        Projections of one input are one product. Gates of low rank have full rank where that makes the kernel take
        the layer.
        """
        if call.rows == 1 and call.from_stream:
            whole = nnx.clone(mixer)
            multiply_factors(whole, FACTORS)
            row = DeltaRow(cls(grouped(whole)))
            if row.takes():
                return row
        return cls(grouped(mixer))

    def __call__(self, x: Float[Array, "B T D"], **options: Any) -> tuple[Float[Array, "B T D"], Any]:
        """The layer, see `layers.blocks.TokenMixer`."""
        cache = _only_cache(options)
        if x.shape[1] > 1 or cache is None:
            return self.mixer(x, **options)
        return self.by_kernels(x, cache) or self.by_parts(x, cache)

    def init_cache(self, batch: int) -> RecurrentCache:
        """See `layers.blocks.TokenMixer.init_cache`."""
        return self.mixer.init_cache(batch)

    def by_kernels(self, x: Float[Array, "B 1 D"], cache: RecurrentCache) -> Mixed | None:
        """A token of every row by kernels that change states where they lie; None where none takes it."""
        del x, cache
        return None

    def by_parts(self, x: Float[Array, "B 1 D"], cache: RecurrentCache) -> Mixed:
        """A token of every row by the parts of the layer."""
        inputs, conv = self.mixer.rule_inputs(x, conv_state=cache.conv)
        o, state = self.mixer.apply_rule(inputs, initial_state=cache.state)
        return self.output(o, x), RecurrentCache(conv, state.astype(cache.state.dtype))

    def output(self, o: Float[Array, "B 1 HO V"], x: Float[Array, "B 1 D"]) -> Float[Array, "B 1 D"]:
        """See `RecurrentMixer.rule_output`. A gate by factors is read where it lies in the product of both."""
        gate = getattr(self.mixer, "g_proj", None)
        if not isinstance(gate, ProjectionOfStack):
            return self.mixer.rule_output(o, x)
        return self.gated(o, gate.product(x))

    def gated(self, o: Float[Array, "B 1 HO V"], channels: Float[Array, "B 1 C"]) -> Float[Array, "B 1 D"]:
        """The output of a token whose gates are the last of some channels."""
        norm = partial(gated_norm_of_channels, activation=self.mixer.activation)
        return self.mixer.gated_output(norm, o, channels)

    @property
    def group(self) -> ProjectionGroup | None:
        """The product that begins with q, k and v; None where they are none."""
        return group_of((self.mixer.q_proj, self.mixer.k_proj, self.mixer.v_proj))

    def gates(self) -> token.Gates | None:
        """Heads and gates of a layer all of whose projections of x are one product, which ends in the output gate.

        None of another, and of a rule that has no kernels of a token.
        """
        return None

    ahead: tuple[nnx.Param, ...] = ()
    """See `parts.ahead.Reader`."""

    def token_weights(self) -> list[nnx.Param]:
        """See `parts.ahead.Reader.token_weights`."""
        groups = self.group, getattr(self.mixer.o_proj, "group", None)
        weights = [group.weight for group in groups if group is not None]
        return weights if len(weights) == len(groups) else []


class TokenRows(RecurrentRows):
    """A layer whose convolution and rule are kernels for a token of every row.

    Args: those of `RecurrentRows`.
    """

    def raw_gates(self) -> tuple[list[Projection], list[Projection]]:
        """The projections to the raw inputs of decays and of strengths, each one or two factors."""
        raise NotImplementedError

    def gates_at(self, decay: int, strength: int) -> token.Gates:
        """The heads and gates, from the places of the raw inputs in their arrays."""
        raise NotImplementedError

    def gates(self) -> token.Gates | None:
        """See `RecurrentRows.gates`."""
        raw: list[Any] = [factors[-1] for factors in self.raw_gates()]
        if not self._ends_in_gate() or group_of((self.mixer.q_proj, *raw)) is None:
            return None
        return None if self.mixer.conv_weight is None else self.gates_at(*(linear.start for linear in raw))

    def by_kernels(self, x: Float[Array, "B 1 D"], cache: RecurrentCache) -> Mixed | None:
        """See `RecurrentRows.by_kernels`."""
        if self.mixer.conv_weight is None or not is_whole(x, *cache):
            return None
        channels = self.mixer.project_qkv(x) if self.group is None else self.group(x)
        raw, starts = zip(*(_raw(factors, x) for factors in self.raw_gates()), strict=True)
        gates, filters = self.gates_at(*starts), self.mixer.filters()
        if (found := self.of_channels((channels, *raw), gates, filters, cache)) is None:
            return None
        o, cache = found
        return self.of_heads(o, channels) if self._ends_in_gate() else self.output(o, x), cache

    def of_channels(
        self,
        channels: Sequence[Array],
        gates: token.Gates,
        filters: Sequence[Array | None],
        cache: RecurrentCache,
    ) -> tuple[Float[Array, "B 1 HV V"], RecurrentCache] | None:
        """The rule's result for a token and the cache after it, from its products; None where no kernel takes them.

        Args:
          channels: [B, 1, ..] with q, k and v, and with the raw inputs of decays and of strengths.
          gates: heads and gates.
          filters: weight and bias of the convolution; None where channels and cache have passed through it.
          cache: before the token.
        """
        A_log = None if self.mixer.A_log is None else self.mixer.A_log[...]
        arrays: Any = *(a[:, 0] for a in channels), *filters, A_log, self.mixer.dt_bias[...], *cache
        if not token.takes(token.Token(*arrays), gates, self.mixer.implementation):
            return None
        o, *after = token.mix_token(token.Token(*arrays), gates)
        return o[:, None], RecurrentCache(*after)

    def of_heads(self, o: Float[Array, "B 1 HV V"], channels: Float[Array, "B 1 C"]) -> Float[Array, "B 1 D"]:
        """`gated`, of one row by one kernel."""
        norm, row, last = self.mixer.o_norm, o.reshape(-1, o.shape[-1]), self.mixer.o_proj
        if o.shape[0] == 1 and isinstance(last, ProjectionOfGroup) and last.is_alone:
            matrix = last.group.weight[...]
            if heads_product.takes(row, channels.shape[-1], matrix, self.mixer.implementation):
                static: Any = dict(eps=norm.eps, activation=self.mixer.activation, ahead=read_ahead(self, 2))
                arrays = row, channels.reshape(-1), norm.scale(jnp.float32), matrix
                return heads_product.heads_product(*arrays, **static)[None]
        return self.gated(o, channels)

    def _ends_in_gate(self) -> bool:
        """Whether the product of q, k and v ends in the output gate, without a bias."""
        gate = getattr(self.mixer, "g_proj", None)
        return isinstance(gate, ProjectionOfGroup) and gate.is_last and gate.group is self.group


class HeadRows(TokenRows):
    """A `GatedDeltaNet` for single tokens.

    Args: those of `RecurrentRows`.
    """

    @classmethod
    def of(cls, mixer: Any, call: Call) -> "RecurrentRows | DeltaRow":
        """See `RecurrentRows.of`: other rules have no kernels of a token."""
        return super().of(mixer, call) if mixer.rule == GATED_DELTA else RecurrentRows.of(mixer, call)

    @classmethod
    def on_mesh(cls, mixer: GatedDeltaNet, call: Call) -> "RecurrentMixer | HeadRows":
        """A layer for calls of single tokens on a mesh that splits heads: devices have their parts of projections."""
        del call
        return cls(mixer) if mixer.rule == GATED_DELTA else mixer

    def raw_gates(self) -> tuple[list[Projection], list[Projection]]:
        """See `TokenRows.raw_gates`."""
        return [self.mixer.a_proj], [self.mixer.b_proj]

    def gates_at(self, decay: int, strength: int) -> token.Gates:
        """See `TokenRows.gates_at`."""
        return token.HeadGates(self.mixer.num_heads, decay, strength, self.mixer.allow_neg_eigval)

    def by_kernels(self, x: Float[Array, "B 1 D"], cache: RecurrentCache) -> Mixed | None:
        """See `RecurrentRows.by_kernels`: on a mesh, and without a convolution, the rule alone is a kernel."""
        return super().by_kernels(x, cache) or self._by_rule(x, cache)

    def _by_rule(self, x, cache):
        layer = self.mixer
        qkv, a, b = layer.project(x)
        y, conv = layer.convolve_token(qkv, cache.conv)
        q, k, v = split_normalized(y[:, 0], layer.num_heads, layer.head_dim, normalize=False)
        v = v.reshape(-1, layer.num_v_heads, layer.head_v_dim)
        arrays = q, k, v, a[:, 0], b[:, 0], layer.A_log[...], layer.dt_bias[...], cache.state
        if not token_step.takes(*arrays, implementation=layer.implementation):
            return None
        o, state = token_step.token_step(*arrays, allow_neg_eigval=layer.allow_neg_eigval)
        return layer.rule_output(o[:, None], x), RecurrentCache(conv, state)


class ChannelRows(TokenRows):
    """A `KimiDeltaAttention` for single tokens.

    Args: those of `RecurrentRows`.
    """

    def raw_gates(self) -> tuple[list[Projection], list[Projection]]:
        """See `TokenRows.raw_gates`."""
        return self.mixer.factors("f"), [self.mixer.b_proj]

    def gates_at(self, decay: int, strength: int) -> token.Gates:
        """See `TokenRows.gates_at`."""
        layer = self.mixer
        bound = layer.lower_bound
        return token.ChannelGates(layer.num_heads, decay, strength, layer.allow_neg_eigval, bound)

    def from_stream(
        self,
        norm: RMSNorm,
        x: Float[Array, "B T D"],
        y: Float[Array, "P T D"] | Addend | None,
        **options: Any,
    ) -> tuple[Float[Array, "B T D"], tuple[Float[Array, "B T D"], RecurrentCache | None]]:
        """See `layers.blocks.from_stream`: of a token of one row the norm, the product of all projections and the
        convolution are one kernel."""
        cache, gates, implementation = _only_cache(options), self.gates(), self.mixer.implementation
        if cache is not None and gates is not None and self.group is not None and is_whole(*cache):
            weight, convolution = self.group.weight[...], Convolution(cache.conv, *self.mixer.filters())
            if row_product.takes(x, weight, implementation, convolution):
                static: Any = dict(
                    eps=norm.eps, dtype=self.group.dtype or weight.dtype, ahead=read_ahead(self, 1)
                )
                arrays = array_of(y), norm.scale(jnp.float32), weight, convolution
                after, _, channels, conv = row_product.stream_product(x, *arrays, **static)
                assert conv is not None
                behind = RecurrentCache(conv, cache.state)
                if (found := self.of_channels(3 * (channels,), gates, (None, None), behind)) is not None:
                    o, cache = found
                    return after, (self.of_heads(o, channels), cache)
        return normalise_first(self, norm, x, y, **options)


class DeltaRow(RecurrentRows):
    """A recurrent layer that is one kernel with the norm before it for a token of one row.

    Args:
      rows: the layer for single tokens, all of whose projections of its input are one product.
    """

    def __init__(self, rows: RecurrentRows):
        super().__init__(rows.mixer)
        self.rows = rows

    def by_kernels(self, x: Float[Array, "B 1 D"], cache: RecurrentCache) -> Mixed | None:
        """See `RecurrentRows.by_kernels`: without the norm it is several."""
        return self.rows.by_kernels(x, cache)

    def from_stream(
        self,
        norm: RMSNorm,
        x: Float[Array, "B T D"],
        y: Float[Array, "P T D"] | Addend | None,
        **options: Any,
    ) -> tuple[Float[Array, "B T D"], tuple[Float[Array, "Q T D"] | Addend, RecurrentCache | None]]:
        """See `layers.blocks.from_stream`: the kernel's result is in parts."""
        cache = _only_cache(options)
        found = None if cache is None else self._layer(norm.scale(jnp.float32), cache)
        if found is None or not delta_layer.takes(x, *found, self.mixer.implementation):
            return from_stream(self.rows)(norm, x, y, **options)
        static = delta_layer.Options(norm.eps, self.mixer.o_norm.eps, self.mixer.activation)
        after, out, *states = delta_layer.delta_layer(x, array_of(y), *found, static, read_ahead(self, 2))
        return after, (out, RecurrentCache(*states))

    def takes(self) -> bool:
        """Whether the kernel takes a token of one row of this layer."""
        width, implementation = self.mixer.hidden_size, self.mixer.implementation
        found = self._layer(jnp.ones(width), self.init_cache(1))
        return found is not None and delta_layer.takes(jnp.zeros((1, 1, width)), *found, implementation)

    def _layer(
        self, norm: Float[Array, " D"], cache: RecurrentCache
    ) -> tuple[delta_layer.Layer, token.Gates] | None:
        """The arguments of `parts.delta_layer`; None where the layer's products are not what it reads."""
        mixer, product, gates = self.mixer, self.group, self.rows.gates()
        last = mixer.o_proj
        if gates is None or product is None or not isinstance(last, ProjectionOfGroup) or not last.is_alone:
            return None
        layer = delta_layer.Layer(
            norm=norm,
            inputs=product.weight[...],
            convolution=Convolution(cache.conv, *mixer.filters()),
            A_log=None if mixer.A_log is None else mixer.A_log[...],
            dt_bias=mixer.dt_bias[...],
            state=cache.state,
            output_norm=mixer.o_norm.scale(jnp.float32),
            output=last.group.weight[...],
        )
        return layer, gates


def grouped(mixer: RecurrentMixer) -> RecurrentMixer:
    """Makes one product of all projections of the layer's input, in place, and one of second factors."""
    # Whole heads, so that a kernel can take the last ones as those of the output gate.
    group_projections(mixer, INPUTS, mixer.head_v_dim)
    group_projections(mixer, ("o_proj",))
    stack_factors(mixer, FACTORS)
    return mixer


def _only_cache(options: dict[str, Any]) -> RecurrentCache | None:
    """The cache of a call of whose other options none says what tokens are; else None."""
    others = [value for name, value in options.items() if name not in ("cache", "return_cache")]
    return options.get("cache") if all(value is None for value in others) else None


def _raw(factors: list[Any], x: Float[Array, "B 1 D"]) -> tuple[Float[Array, "B 1 F"], int]:
    """An array in which the results of a projection lie, given as its factors, and where they begin."""
    *firsts, last = factors
    for linear in firsts:
        x = linear(x)
    if isinstance(last, PartOfProduct) and last.bias is None:
        return last.product(x), last.start
    return last(x), 0
