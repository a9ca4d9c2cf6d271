"""Shared parts of the token mixers that have a short convolution and a recurrent state.

A layer of this kind is `rule_inputs` (projections, convolution and gates), `apply_rule` and `rule_output` (norm of
each head, output gate and output projection), one after the other. Its own file has these; here is what goes around
them: the cache, padding, packed rows, and the checks of a call.

Parameters live in param_dtype (float32 by default) and are cast to dtype, the compute dtype, at every call, as in
flax's own layers. Norms, gates, the convolution's sums and the recurrent state are float32 in any case.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Required, TypedDict

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from gdn_jax.gates import init_A_log, init_dt_bias, logit
from gdn_jax.layers import blocks
from gdn_jax.layers.blocks import RMSNorm
from gdn_jax.layers.options import check_sizes, value_width
from gdn_jax.layers.padding import check_rows, clear_padding, convolve_tokens
from gdn_jax.parallel.head_shards import causal_conv1d_on_mesh, short_conv_on_mesh
from gdn_jax.parts.conv import causal_conv1d_update
from gdn_jax.parts.products import PLAIN
from gdn_jax.parts.short_conv import KeyHeads, split_normalized
from gdn_jax.shapes import accumulation_dtype, check_array, check_type


class RecurrentCache(NamedTuple):
    """Memory of a recurrent layer for the tokens that it has seen. A pytree.

    Fields:
      conv: last W - 1 projected inputs [N, conv_dim, W - 1] of the convolution, oldest first (width 0 without the
        short convolution), in the compute dtype.
      state: recurrent state [N, num_v_heads, head_dim, head_v_dim], float32.
    """

    conv: Float[Array, "N D W1"]
    state: Float[Array, "N HO K V"]


class Rows(NamedTuple):
    """Rows of a call without their tokens x; see `RecurrentMixer.__call__`.

    Fields:
      conv, state: of the cache after the tokens before; None before the first one.
      mask, segment_ids, cu_seqlens: as for a call, but padding has the id of the nearest token.
    """

    conv: Float[Array, "N conv_dim W1"] | None = None
    state: Float[Array, "N HO K V"] | None = None
    mask: Bool[Array, "B T"] | None = None
    segment_ids: Int[Array, "B T"] | None = None
    cu_seqlens: Int[Array, " N1"] | None = None

    def is_a_token(self, x: Float[Array, "B T *_"]) -> bool:
        """Whether x is one token of every row after others."""
        return self.state is not None and x.shape[1] == 1 and self.cu_seqlens is None

    def packing(self, initial_state: Array | None) -> dict[str, Any]:
        """Returns the keywords that a rule or a convolution takes for these rows.

        Args:
          initial_state: `conv` or `state`, whichever the operation goes on from.
        """
        ids = dict(segment_ids=self.segment_ids, cu_seqlens=self.cu_seqlens)
        return dict(initial_state=initial_state) | ids


ALONE = Rows()
"""Rows with nothing before them, whose tokens all belong together."""


class LayerOptions(TypedDict, total=False):
    """Arguments that a recurrent layer hands on to the constructor of `RecurrentMixer` as they are."""

    conv_size: int
    conv_bias: bool
    use_short_conv: bool
    write_start: float | None
    norm_eps: float
    dtype: DTypeLike | None
    param_dtype: DTypeLike
    implementation: str | None
    kernel_init: blocks.Initializer | None
    out_kernel_init: blocks.Initializer | None
    rngs: Required[nnx.Rngs]


class RecurrentMixer(nnx.Module):
    """A token mixer with a short convolution and a recurrent state, the base of all layers here.

    A layer is `rule_inputs` (projections, convolution and gates), `apply_rule` and `rule_output` (norm of each head,
    output gate and output projection), one after the other. This class has the cache, padding, packed rows, checks.
    The constructor makes the parts of all layers, with the initial values that `GatedDeltaNet` describes. A layer
    makes its own projections in `_make_gates`, and its decay in `_make_decay` where it has none for each head.

    Parameters have param_dtype (float32 by default) and are cast to dtype, the compute dtype, at every call. Norms,
    gates, the convolution's sums and the recurrent state are float32 in any case.

    Args: as for `GatedDeltaNet`.

    Raises:
      ValueError: an argument is wrong; names it, what was expected and what came.

    Attributes:
      q_proj, k_proj, v_proj: projections to queries, keys and values.
      hidden_size, num_heads, num_v_heads, head_dim, head_v_dim, conv_dim, conv_size: sizes, see `RecurrentCache`;
        conv_size is 1 without the short convolution.
      allow_neg_eigval, use_short_conv, dtype, param_dtype, implementation: options of the layer.
      conv_weight, conv_bias: filters [conv_dim, W] and bias [conv_dim], or None.
      A_log, dt_bias: parameters of the decay, float32. A_log may be None.
      o_norm, o_proj: norm of each head and output projection.
    """

    A_log: Any
    dt_bias: nnx.Param

    lower_bound: float | None = None
    """The strongest log decay of a token, of a bounded gate."""
    by_channels = False
    """Whether its gates have a number for each channel."""
    activation: ClassVar[str] = "silu"
    """The function of the output gate."""

    @property
    def steps(self) -> int:
        """Steps of the rule for every token, each with a key and a value."""
        return 1

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_v_heads: int | None,
        head_dim: int,
        expand_v: float,
        allow_neg_eigval: bool,
        *,
        conv_size: int = 4,
        conv_bias: bool = False,
        use_short_conv: bool = True,
        write_start: float | None = None,
        norm_eps: float = 1e-5,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        implementation: str | None = None,
        kernel_init: blocks.Initializer | None = None,
        out_kernel_init: blocks.Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        check_sizes(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_v_heads=num_v_heads,
            head_dim=head_dim,
            expand_v=expand_v,
            conv_size=conv_size,
            norm_eps=norm_eps,
            write_start=write_start,
            implementation=implementation,
        )
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, head_dim
        self.num_v_heads = num_heads if num_v_heads is None else num_v_heads
        self.head_v_dim = value_width(head_dim, expand_v)
        self.allow_neg_eigval = allow_neg_eigval
        self.dtype, self.param_dtype, self.implementation = dtype, param_dtype, implementation

        keys, values = num_heads * head_dim, self.num_v_heads * self.head_v_dim
        linear, out = blocks.bias_free_linears(dtype, param_dtype, kernel_init, out_kernel_init, rngs)
        self.q_proj = linear(hidden_size, keys)
        self.k_proj = linear(hidden_size, self.steps * keys)
        self.v_proj = linear(hidden_size, self.steps * values)
        self._make_gates(linear)
        self._add_write_start(write_start)
        self.o_proj = out(values, hidden_size)

        self.conv_dim = keys + self.steps * (keys + values)
        self.conv_size, self.use_short_conv = conv_size if use_short_conv else 1, use_short_conv
        weight = bias = None
        if use_short_conv:
            bound, shape = conv_size**-0.5, (self.conv_dim, conv_size)
            weight = jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound)
            weight = nnx.Param(weight.astype(param_dtype))
            bias = nnx.Param(jnp.zeros(self.conv_dim, param_dtype)) if conv_bias else None
        self.conv_weight, self.conv_bias = weight, bias
        self._make_decay(rngs)
        options: Any = dict(dtype=jnp.float32, param_dtype=param_dtype, implementation=implementation)
        self.o_norm = RMSNorm(self.head_v_dim, eps=norm_eps, **options)

    def _make_gates(self, linear: Callable[[int, int], nnx.Linear]) -> None:
        """Sets the projections to the gates; linear(inputs, outputs) makes one."""
        raise NotImplementedError

    def _make_decay(self, rngs: nnx.Rngs) -> None:
        """Sets A_log and dt_bias, of a decay for each head."""
        self.A_log = blocks.NoDecayParam(init_A_log(rngs.params(), self.num_v_heads))
        self.dt_bias = blocks.NoDecayParam(init_dt_bias(rngs.params(), self.num_v_heads))

    @property
    def can_be_served(self) -> bool:
        """Whether `raw_gates` and `gates` are all that is needed to run it over pools of states."""
        return False

    @property
    def attends(self) -> bool:
        """Whether the layer's rule is softmax attention, which keeps no state."""
        return False

    def init_cache(self, batch: int, dtype: DTypeLike | None = None) -> RecurrentCache:
        """The cache before the first token: zeros, for `batch` sequences.

        Args:
          batch: sequences, B or len(cu_seqlens) - 1.
          dtype: of the convolution's part; default the compute dtype (param_dtype where that is None).
        """
        dtype = dtype or self.dtype or self.param_dtype
        return RecurrentCache(
            jnp.zeros((batch, self.conv_dim, self.conv_size - 1), dtype),
            jnp.zeros((batch, self.num_v_heads, self.head_dim, self.head_v_dim), jnp.float32),
        )

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        cache: RecurrentCache | None = None,
        mask: Bool[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        cu_seqlens: Int[Array, " N1"] | None = None,
        return_cache: bool = False,
    ) -> tuple[Float[Array, "B T D"], RecurrentCache | None]:
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

        Returns:
          y [B, T, hidden_size] in the compute dtype, and the cache after the last token (None without cache
          and return_cache).

        Raises:
          ValueError: an argument is wrong, names it; also a mask with a gap, where its values are known
            (outside jit; inside, a gap leaves the recurrent state alone and is zeros to the convolution).
          NotImplementedError: the layer's rule cannot run with these arguments, with the reason.
        """
        self._check_call(x, cache, mask, segment_ids, cu_seqlens, return_cache)
        x, segment_ids = clear_padding(x, mask, segment_ids, cu_seqlens)
        if cache is None and mask is None and cu_seqlens is None:
            if (found := self._as_one_operation(x, segment_ids, return_cache)) is not None:
                return found
        rows = Rows(*(cache or (None, None)), mask, segment_ids, cu_seqlens)
        in_common = self.in_common(x)
        inputs, conv = self.rule_inputs(x, rows, **in_common)
        o, state = self.apply_rule(inputs, rows)
        y = self.rule_output(o, x, **in_common)
        if state is None or (cache is None and not return_cache):
            return y, None
        return y, RecurrentCache(conv, state if cache is None else state.astype(cache.state.dtype))

    def in_common(self, x: Float[Array, "B T D"]) -> dict[str, Any]:
        """Makes once what the layer's own `rule_inputs` and `rule_output` both need of x: keywords of both, which may
        be left out."""
        del x
        return {}

    def rule_inputs(
        self, x: Float[Array, "B T D"], rows: Rows = ALONE
    ) -> tuple[Any, Float[Array, "N conv_dim W1"]]:
        """Makes the inputs of the rule: projections, convolution and gates.

        `__call__` has checked the arguments; this method does not.

        Args:
          x: inputs [B, T, hidden_size], 0 at padding.
          rows: the call's.

        Returns:
          A NamedTuple that begins with q, k, v, g and beta, and the new convolution state. q and k have unit length
          where the rule wants it. At padding nothing decays and nothing is erased or written.
        """
        raise NotImplementedError

    def apply_rule(
        self, inputs: Any, rows: Rows = ALONE
    ) -> tuple[Float[Array, "B T HO V"], Float[Array, "N HO K V"] | None]:
        """Applies the layer's rule to `rule_inputs`: the outputs and the final states."""
        raise NotImplementedError

    def rule_output(self, o: Float[Array, "B T HO V"], x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Makes the layer's output from the rule's: norm of each head, output gate and output projection.

        Args:
          o: output of the rule [B, T, num_v_heads, head_v_dim].
          x: inputs of the layer [B, T, hidden_size], 0 at padding, which the gate reads.

        Returns:
          y [B, T, hidden_size] in the compute dtype; 0 at padding, where x is 0 and therefore q and o are.
        """
        raise NotImplementedError

    def project_qkv(self, x: Float[Array, "B T D"]) -> Float[Array, "B T conv_dim"]:
        """Queries, keys and values of every token side by side, before the convolution."""
        return blocks.shared_products(x, [(self.q_proj, self.k_proj, self.v_proj)], self.dtype)[0]

    def raw_gates(self, x: Float[Array, "B T D"]) -> tuple[Array, Array, Array | None]:
        """The raw inputs a, b and w of the gates, as `serving.decode` takes them after the tokens."""
        raise NotImplementedError

    def gates(
        self, a: Array, b: Array, w: Array | None
    ) -> tuple[Array, Array | None, Array | None, Array | None]:
        """g, beta, erase and write as `delta_rule` takes them, from `raw_gates`."""
        raise NotImplementedError

    def filters(self) -> tuple[Float[Array, "conv_dim W"], Float[Array, " conv_dim"] | None]:
        """Weight [conv_dim, W] and bias of the convolution, in a layer that has one."""
        assert self.conv_weight is not None
        return self.conv_weight[...], None if self.conv_bias is None else self.conv_bias[...]

    def scale_time_steps(self, factor: float | Float[Array, ""]) -> None:
        """Multiplies the time steps of the gates, in place: 0.1 makes the first half-lives ten times as long."""
        step = factor * jax.nn.softplus(self.dt_bias[...])
        self.dt_bias[...] = step + jnp.log(-jnp.expm1(-step))  # inverse softplus

    def strength_projections(self) -> tuple[blocks.Projection, ...]:
        """The projections of x to the logits of the strengths, which have a bias where there is a write_start."""
        raise NotImplementedError

    def set_write_start(self, start: Float[Array, ""]) -> None:
        """Makes strengths start elsewhere, in place, in a layer with a write_start."""
        for linear in self.strength_projections():
            assert linear.bias is not None, "the layer has no write_start"
            linear.bias[...] = jnp.full_like(linear.bias[...], jax.scipy.special.logit(start))

    def _add_write_start(self, write_start: float | None) -> None:
        """Gives the strengths the bias with which they start there; None: none."""
        if write_start is None:
            return
        for linear in self.strength_projections():
            assert isinstance(linear, nnx.Linear)
            blocks.add_bias(linear, jnp.full(linear.out_features, logit(write_start), self.param_dtype))

    def gated_output(self, norm: Callable[..., Array], o: Float[Array, "B T HO V"], gate: Array) -> Array:
        """The output projection of norm(o, gate, ..), one of those in `parts.norms`."""
        weight = self.o_norm.scale(jnp.float32)
        options: Any = dict(eps=self.o_norm.eps, implementation=self.implementation)
        if isinstance(self.o_proj, nnx.Linear) and self.o_proj.dot_general is PLAIN:
            return norm(o, gate, weight, self.o_proj.kernel[...], **options)
        return self.o_proj(norm(o, gate, weight, **options).reshape(*o.shape[:2], -1))

    def _as_one_operation(self, x, segment_ids, return_cache) -> Any:
        """`__call__` of whole rows by kernels that join its parts; None where there are none or they cannot."""
        del x, segment_ids, return_cache
        return None

    def _convolve_qkv(self, heads: KeyHeads, qkv, rows: Rows):
        """q, k [B, T, H, K] and v [B, T, HV, V] after the convolution, and its new state."""
        if self.conv_weight is None or rows.mask is not None or rows.is_a_token(qkv):
            y, state = self._convolve(qkv, rows)
            q, k, v = split_normalized(y, *heads)
        else:
            options: Any = rows.packing(rows.conv) | dict(implementation=self.implementation)
            q, k, v, state = short_conv_on_mesh(qkv, *self.filters(), **heads._asdict(), **options)
        return q, k, v.reshape(*v.shape[:2], self.num_v_heads, self.head_v_dim), state

    def _convolve(self, x, rows: Rows):
        """Channels [B, T, conv_dim] after the convolution in plain JAX, and its new state."""
        if rows.is_a_token(x):
            assert rows.conv is not None
            return self.convolve_token(x, rows.conv, rows.mask)
        if self.conv_weight is None:
            N = x.shape[0] if rows.cu_seqlens is None else rows.cu_seqlens.shape[0] - 1
            return _silu(x), jnp.zeros((N, self.conv_dim, 0), x.dtype)
        if rows.mask is not None:
            return convolve_tokens(x, *self.filters(), rows.conv, rows.mask, rows.segment_ids)
        return causal_conv1d_on_mesh(x, *self.filters(), **rows.packing(rows.conv))

    def convolve_token(
        self,
        x: Float[Array, "B 1 conv_dim"],
        past: Float[Array, "B conv_dim W1"],
        mask: Bool[Array, "B 1"] | None = None,
    ) -> tuple[Float[Array, "B 1 conv_dim"], Float[Array, "B conv_dim W1"]]:
        """Channels of a token after the convolution, and its new state, as it was where the token is padding."""
        if self.conv_weight is None:
            return _silu(x), past
        y, state = causal_conv1d_update(x[:, 0], past, *self.filters())
        if mask is not None:
            y = jnp.where(mask, y, 0)
            state = jnp.where(mask[:, :, None], state, past)
        return y[:, None], state

    def _check_call(self, x, cache, mask, segment_ids, cu_seqlens, return_cache):
        del return_cache
        check_rows(x, mask, segment_ids, self.hidden_size, cu_seqlens)
        if cache is not None:
            check_type("cache", cache, RecurrentCache)
            if cu_seqlens is not None:
                check_array("cu_seqlens", cu_seqlens, (None,), "N+1")
            N = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
            check_array("cache.conv", cache.conv, (N, self.conv_dim, self.conv_size - 1), "N conv_dim W-1")
            state = (self.num_v_heads, self.head_dim, self.head_v_dim)
            check_array("cache.state", cache.state, (N, *state), "N HO K V")


def at_tokens(mask: Bool[Array, "B T"] | None, *gates: Any) -> Any:
    """Gates [B, T, ..] with zeros at padding. A gate may be None and stays so."""
    if mask is None:
        return gates
    return jax.tree.map(lambda y: jnp.where(jnp.expand_dims(mask, (*range(2, y.ndim),)), y, 0), gates)


def _silu(x):
    """silu(x) in float32 (float64 when x is), rounded once to x's dtype: a layer without the convolution."""
    return jax.nn.silu(x.astype(accumulation_dtype(x))).astype(x.dtype)
