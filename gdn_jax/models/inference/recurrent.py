"""Recurrent layers for single tokens: projections of one input are one product, which kernels read as it lies, and of
one row the norm and the layer are one kernel."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from gdn_jax.layers import RecurrentCache, RecurrentMixer
from gdn_jax.layers.blocks import RMSNorm, from_stream, normalise_first
from gdn_jax.layers.recurrent import Rows
from gdn_jax.models.inference.part import Call, Reader, cache_alone
from gdn_jax.models.inference.projections import (
    BlockGroup,
    FactorGroup,
    ProjectionGroup,
    ProjectionOfGroup,
    group_factors,
    group_of,
    group_projections,
    multiply_factors,
    parts_of,
    weights_of,
)
from gdn_jax.parts import delta_layer, row_product
from gdn_jax.parts.delta_layer import Gates
from gdn_jax.parts.kernels import is_whole, token_op, usable
from gdn_jax.parts.norms import gated_norm_of_channels
from gdn_jax.parts.products import Addend, array_of, with_words, words_after, words_of
from gdn_jax.rules.gated_delta import GATED_DELTA
from gdn_jax.serving import mixing
from gdn_jax.serving.call import At
from gdn_jax.serving.call import Call as TokenCall
from gdn_jax.serving.shards import by_heads
from gdn_jax.serving.states import StateKernels
from gdn_jax.serving.tokens import Raw, heads_of
from gdn_jax.shapes import Convolution, LayerScales

INPUTS = tuple(f"{name}_proj" for name in ("q", "k", "v", "a", "f", "f_a", "g_a", "b", "w", "g"))
"""Projections of the layer's input, in the order in which its kernels take them. First factors are neighbours: a
`FactorGroup` reads them where they lie."""
FACTORS = "fg"
"""Projections that may have two factors: to the decay and to the output gate."""


mix_token = token_op(mixing.mix_token)


class RecurrentRows(Reader):
    """A recurrent layer for single tokens of any number of rows, by its own parts.

    Args:
      mixer: the layer, of a copy for inference.
      in_parts: whether its results may be parts of a sum, see `PartsOfProjection`.
    """

    attends = False

    def __init__(self, mixer: RecurrentMixer, in_parts: bool = False):
        self.mixer: Any = mixer
        self.last = parts_of(mixer.o_proj) if in_parts else None

    @classmethod
    def of(cls, mixer: Any, call: Call) -> "RecurrentRows":
        """A layer for calls of single tokens, of a mixer that it changes in place: projections of one input are one
        product. For one row it is a `DeltaRow`, if its kernel takes it; gates of low rank then have full rank."""
        if call.rows == 1 and call.from_stream:
            whole = nnx.clone(mixer)
            multiply_factors(whole, FACTORS)
            row = DeltaRow(cls(grouped(whole)))
            if row.takes():
                return row
        return cls(grouped(mixer), call.in_parts)

    def __call__(self, x: Float[Array, "B T D"], **options: Any) -> tuple[Float[Array, "P T D"], Any]:
        """The layer, see `layers.blocks.TokenMixer`."""
        cache = cache_alone(options)
        if x.shape[1] > 1 or cache is None:
            return self.mixer(x, **options)
        return self.by_kernels(x, cache) or self._by_parts(x, cache)

    def init_cache(self, batch: int) -> RecurrentCache:
        """See `layers.blocks.TokenMixer.init_cache`."""
        return self.mixer.init_cache(batch)

    @property
    def group(self) -> Any:
        """The product that begins with q, k and v; None where they are none."""
        return group_of((self.mixer.q_proj, self.mixer.k_proj, self.mixer.v_proj))

    def gates(self) -> Gates | None:
        """Heads and gates of a layer all of whose projections of x are one product, which ends in the output gate;
        and of one in 8 bits, whose projections to decays and strengths are another.

        None of another, and of a rule that has no kernels of a token.
        """
        return None

    def narrow_group(self) -> Any:
        """The product of the projections to decays and strengths, where only the others are in 8 bits; else None."""
        return None

    def token_weights(self) -> list[nnx.Param]:
        """See `Reader.token_weights`."""
        return weights_of(self.group, group_of([self.mixer.o_proj]))

    def by_kernels(
        self, x: Float[Array, "B 1 D"], cache: RecurrentCache, slots: Int[Array, " B"] | None = None
    ) -> tuple[Float[Array, "P 1 D"], RecurrentCache] | None:
        """A token by kernels that change states where they lie; None where none takes it.

        Args:
          x: inputs.
          cache: of the tokens before.
          slots: where in the cache each row is, as for `serving.mixing.mix_token`.
        """
        del x, cache, slots

    def _known(self, cache) -> tuple[Convolution, Array | None, Array, Array]:
        """The convolution, A_log, dt_bias and the states of the rule, as kernels of a token take them."""
        m = self.mixer
        A_log = None if m.A_log is None else m.A_log[...]
        return Convolution(cache.conv, *m.filters()), A_log, m.dt_bias[...], cache.state

    def _by_parts(self, x, cache):
        """A token by the parts of the layer."""
        rows = Rows(*cache)
        inputs, conv = self.mixer.rule_inputs(x, rows)
        o, state = self.mixer.apply_rule(inputs, rows)
        return self._output(o, x), RecurrentCache(conv, state.astype(cache.state.dtype))

    def _output(self, o, x):
        """`rule_output` of a token. A gate by factors is read where it lies in the product of all."""
        gate = getattr(self.mixer, "g_proj", None)
        if isinstance(gate, ProjectionOfGroup) and isinstance(gate.group, FactorGroup):
            return self._gated(o, gate.group(x))
        return self.mixer.rule_output(o, x)

    def _gated(self, o, channels):
        """`rule_output` from channels of which the last are the gates."""
        norm = partial(gated_norm_of_channels, activation=self.mixer.activation)
        return self.mixer.gated_output(norm, o, channels)


class TokenRows(RecurrentRows):
    """A recurrent layer whose convolution and rule are kernels for a token of every row.

    Args: those of `RecurrentRows`.
    """

    def gates(self) -> Gates | None:
        """See `RecurrentRows.gates`."""
        m, last, first = self.mixer, [factors[-1] for factors in self._raw_gates()], 0
        if not self._ends_in_gate() or m.conv_weight is None:
            return None
        if group_of((m.q_proj, *last)) is None:
            if self.narrow_group() is None:
                return None
            first = self.group.outputs
        decay, strength = (first + linear.start for linear in last)
        return Gates(m.num_heads, decay, strength, m.allow_neg_eigval, m.lower_bound)

    def narrow_group(self) -> Any:
        """See `RecurrentRows.narrow_group`."""
        raw = self._raw_gates()
        is_narrow = isinstance(self.group, BlockGroup) and all(len(factors) == 1 for factors in raw)
        return group_of([linear for factors in raw for linear in factors]) if is_narrow else None

    def _raw_gates(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """Factors of the projections to the raw inputs of decays and of strengths."""
        raise NotImplementedError

    def from_stream(
        self,
        norm: RMSNorm,
        x: Float[Array, "B T D"],
        y: Float[Array, "P T D"] | Addend | None,
        **options: Any,
    ) -> tuple[Float[Array, "B T D"], tuple[Float[Array, "Q T D"] | Addend, RecurrentCache | None]]:
        """See `layers.blocks.from_stream`: of one row and projections in 8 bits the norm is made in the kernels of
        the products."""
        cache, raw, implementation = cache_alone(options), self._raw_gates(), self.mixer.implementation
        groups = self.group, group_of([linear for factors in raw for linear in factors])
        if cache is not None and self._ends_in_gate() and isinstance(groups[0], BlockGroup):
            if all(group is not None and group.takes(x, implementation) for group in groups):
                s, channels = groups[0].from_stream(norm, x, y, implementation, self.after(1))
                _, gates = groups[1].from_stream(norm, s, None, implementation)
                arrays = [(gates, linear.start) for (linear,) in raw]
                if (found := self._token(channels, arrays, None, cache)) is not None:
                    return s, (with_words(found[0], words_of(y)), found[1])
        return normalise_first(self, norm, x, y, **options)

    def by_kernels(self, x, cache, slots=None):
        """See `RecurrentRows.by_kernels`."""
        if self.mixer.conv_weight is None or not is_whole(x, *cache):
            return None
        channels = self.mixer.project_qkv(x) if self.group is None else self.group(x)
        return self._token(channels, [_raw(factors, x) for factors in self._raw_gates()], x, cache, slots)

    def _token(self, channels, raw, x, cache, slots=None):
        """A token from its products, and its gates' products with their places; None where no kernel takes it."""
        m, row, (convolution, A_log, dt_bias, state) = self.mixer, channels[:, 0], self._known(cache)
        why = mixing.reason(row, m.num_heads, convolution, cache.state)
        if not usable(m.implementation, mixing.kernel(), part="the step of a token", reason=why):
            return None
        gates = [(array[:, 0], start) for array, start in raw]
        arrays = gates, row, convolution, A_log, dt_bias, state, slots
        o, *after = mix_token(self._call(), m.num_heads, *arrays)
        o = o[:, None]
        y = self._of_heads(o, channels) if self._ends_in_gate() else self._output(o, x)
        return y, RecurrentCache(*after)

    def _call(self) -> TokenCall:
        """Options of the rule."""
        m = self.mixer
        return TokenCall(m.head_dim**-0.5, allow_neg_eigval=m.allow_neg_eigval, lower_bound=m.lower_bound)

    def _of_heads(self, o, channels):
        """`_gated`, of one row by one kernel."""
        norm, row, last = self.mixer.o_norm, o.reshape(-1, o.shape[-1]), self.mixer.o_proj
        if o.shape[0] == 1 and isinstance(last, ProjectionOfGroup) and last.is_alone:
            group: Any = last.group
            matrix, scales = group.weight[...], group.scales_of_blocks()
            if row_product.takes(row, matrix, self.mixer.implementation, scales, channels.shape[-1]):
                static: Any = dict(eps=norm.eps, activation=self.mixer.activation, ahead=self.after(2))
                arrays = row, channels.reshape(-1), norm.scale(jnp.float32), matrix, scales
                return row_product.heads_product(*arrays, **static)[None]
        if self.last is None:
            return self._gated(o, channels)
        static: Any = dict(activation=self.mixer.activation, implementation=self.mixer.implementation)
        n = gated_norm_of_channels(o, channels, norm.scale(jnp.float32), eps=norm.eps, **static)
        return self.last(n.reshape(*o.shape[:2], -1))

    def _ends_in_gate(self):
        """Whether the product of q, k and v ends in the output gate, without a bias."""
        gate = getattr(self.mixer, "g_proj", None)
        return isinstance(gate, ProjectionOfGroup) and gate.is_last and gate.group is self.group


class HeadRows(TokenRows):
    """A `GatedDeltaNet` for single tokens.

    Args: those of `RecurrentRows`.
    """

    @classmethod
    def of(cls, mixer: Any, call: Call) -> RecurrentRows:
        """See `RecurrentRows.of`: other rules have no kernels of a token."""
        return super().of(mixer, call) if mixer.rule == GATED_DELTA else RecurrentRows.of(mixer, call)

    @classmethod
    def on_mesh(cls, mixer: Any, call: Call) -> Any:
        """The same on a mesh that splits heads, whose devices have their parts of projections."""
        del call
        return cls(mixer) if mixer.rule == GATED_DELTA else mixer

    def _raw_gates(self):
        return [self.mixer.a_proj], [self.mixer.b_proj]

    def by_kernels(self, x, cache, slots=None):
        """See `RecurrentRows.by_kernels`: on a mesh, and without a convolution, the rule alone is a kernel."""
        found = super().by_kernels(x, cache, slots)
        if found is not None or slots is not None:
            return found
        m = self.mixer
        qkv, a, b = m.project(x)
        y, conv = m.convolve_token(qkv, cache.conv)
        pool, at = StateKernels(cache.state), At(None)
        raw = Raw(*heads_of(y[:, 0], pool), a[:, 0], b[:, 0], None, m.A_log[...], m.dt_bias[...])
        if not usable(m.implementation, part="the step of a token", reason=pool.reason(raw, at)):
            return None
        o, state = token_op(by_heads)((StateKernels.decode, self._call()), pool, raw, at)
        return m.rule_output(o[:, None], x), RecurrentCache(conv, state)


class ChannelRows(TokenRows):
    """A `KimiDeltaAttention` for single tokens.

    Args: those of `RecurrentRows`.
    """

    @classmethod
    def of(cls, mixer: Any, call: Call) -> RecurrentRows:
        """See `RecurrentRows.of`: the exponential gate has no kernels of a token."""
        return super().of(mixer, call) if mixer.bound == "sigmoid" else RecurrentRows.of(mixer, call)

    def _raw_gates(self):
        return self.mixer.factors("f"), [self.mixer.b_proj]


class DeltaRow(RecurrentRows):
    """A recurrent layer that is one kernel with the norm before it for a token of one row.

    Args:
      rows: the layer for single tokens, all of whose projections of its input are one product.
    """

    def __init__(self, rows: RecurrentRows):
        super().__init__(rows.mixer)
        self.rows = rows

    def by_kernels(self, x, cache, slots=None):
        """See `RecurrentRows.by_kernels`."""
        return self.rows.by_kernels(x, cache, slots)

    def from_stream(
        self,
        norm: RMSNorm,
        x: Float[Array, "B T D"],
        y: Float[Array, "P T D"] | Addend | None,
        **options: Any,
    ) -> tuple[Float[Array, "B T D"], tuple[Float[Array, "Q T D"] | Addend, RecurrentCache | None]]:
        """See `layers.blocks.from_stream`: the kernel's result is in parts."""
        cache = cache_alone(options)
        found = None if cache is None else self._layer(norm.scale(jnp.float32), cache)
        if found is None or not delta_layer.takes(x, *found, self.mixer.implementation):
            return from_stream(self.rows)(norm, x, y, **options)
        static = delta_layer.Options(norm.eps, self.mixer.o_norm.eps, self.mixer.activation)
        words = words_after(y)
        after, out, *states = delta_layer.delta_layer(x, array_of(y), *found, static, self.after(2), words)
        return after, (with_words(out, words), RecurrentCache(*states))

    def takes(self) -> bool:
        """Whether the kernel takes a token of one row of this layer."""
        width, implementation = self.mixer.hidden_size, self.mixer.implementation
        found = self._layer(jnp.ones(width), self.init_cache(1))
        return found is not None and delta_layer.takes(jnp.zeros((1, 1, width)), *found, implementation)

    def _layer(self, norm, cache) -> tuple[delta_layer.Layer, Gates] | None:
        """Arguments of `parts.delta_layer`; None where the layer's products are not what it reads."""
        m, gates, last = self.mixer, self.rows.gates(), self.mixer.o_proj
        if gates is None or not isinstance(last, ProjectionOfGroup) or not last.is_alone:
            return None
        inputs, output = self.group, last.group
        known = *self._known(cache), m.o_norm.scale(jnp.float32), output.weight[...]
        layer = delta_layer.Layer(norm, inputs.weight[...], *known)
        if not isinstance(inputs, BlockGroup):
            return layer, gates
        narrow = self.rows.narrow_group()
        if not isinstance(output, BlockGroup) or not isinstance(narrow, ProjectionGroup):
            return None
        if inputs.whole_blocks is None or output.whole_blocks is None:
            return None
        scales = LayerScales(inputs.whole_blocks[...], output.whole_blocks[...], narrow.weight[...])
        return layer._replace(scales=scales), gates


def grouped(mixer: RecurrentMixer) -> RecurrentMixer:
    """Makes one product of all projections of the layer's input, in place, and one of second factors."""
    # Whole heads, so that a kernel can take the last ones as those of the output gate.
    group_projections(mixer, INPUTS, mixer.head_v_dim)
    group_projections(mixer, ("o_proj",))
    group_factors(mixer, FACTORS)
    return mixer


def _raw(factors, x):
    """An array in which the results of a projection lie, given as its factors, and where they begin."""
    *firsts, last = factors
    for linear in firsts:
        x = linear(x)
    if isinstance(last, ProjectionOfGroup) and last.bias is None:
        return last.group(x), last.start
    return last(x), 0
