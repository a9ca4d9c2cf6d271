"""The serving call of tpu-inference, and of tokamax: a short convolution and the rule over pools of states.

A step's tokens lie behind one another in one array. The first `distribution[0]` requests are running ones, of one
token each or of one and its drafts; those up to `distribution[2]` are prompts or pieces of prompts; what follows is
padding. The two kinds are two phases, and a phase without requests is not run.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from gdn_jax import channel_log_decay, log_decay, serving, write_strength
from gdn_jax.adapters.arguments import named, refuse
from gdn_jax.shapes import ArgumentError, check_array, check_choice, check_floating

NULL_SLOT = 0
"""The slot that is padding."""
Indices = Integer[Array, " N"] | Integer[np.ndarray, " N"]


class _Weights(NamedTuple):
    """Parameters of the convolution and of the gates, in this package's layouts."""

    conv: Any
    bias: Any
    A_log: Any
    dt_bias: Any
    lower_bound: float | None
    is_kda: bool

    @property
    def gates(self) -> dict[str, Any]:
        """Keywords of `serving.decode` and `serving.verify`."""
        return dict(A_log=self.A_log, dt_bias=self.dt_bias, lower_bound=self.lower_bound)

    def raw(self, a: jax.Array) -> jax.Array:
        """a of each channel where the decay is one."""
        return a.reshape(*a.shape[:-1], *self.dt_bias.shape) if self.is_kda else a

    def log_decay(self, a: jax.Array) -> jax.Array:
        """The log decay of raw inputs."""
        if self.is_kda:
            return channel_log_decay(self.raw(a), self.A_log, self.dt_bias, self.lower_bound)
        return log_decay(a, self.A_log, self.dt_bias)


class _Requests(NamedTuple):
    """Where the tokens of the requests lie, and their states."""

    starts: jax.Array
    """[N + 1] first tokens; those behind the last request have no tokens."""
    first_prompt: Any
    end: Any
    read: jax.Array
    write: jax.Array
    is_new: jax.Array
    """[N] whether there is no state yet."""
    offsets: Any
    """[N] which of its states a request with drafts goes on from."""

    @property
    def lengths(self) -> jax.Array:
        return jnp.diff(self.starts)

    def slots(self, slots: jax.Array, is_prompt: bool) -> jax.Array:
        """Slots of one kind of requests; -1 for the others and for those without tokens."""
        index = jnp.arange(slots.shape[0])
        is_kind = (
            (index >= self.first_prompt) & (index < self.end) if is_prompt else index < self.first_prompt
        )
        return jnp.where(is_kind & (self.lengths > 0) & (slots != NULL_SLOT), slots, -1)


class _Step(NamedTuple):
    """Arrays that the phases change: the two pools, and the outputs so far [T, n_v * d_v]."""

    windows: jax.Array
    """The convolution's pool [slots, D, W - 1]."""
    states: Any
    out: jax.Array


def fused_conv1d_gdn(
    qkv: Float[Array, "T D"],
    b: Float[Array, "T n_v"],
    a: Float[Array, "T gates"],
    conv_state: Float[Array, "slots W1 D"],
    recurrent_state: Float[Array, "slots n_v d_k d_v"],
    conv_weight: Float[Array, "D 1 W"],
    conv_bias: Float[Array, " D"] | None,
    a_log: Float[Array, " n_v"],
    dt_bias: Float[Array, " n_v"] | Float[Array, "n_v d_k"],
    query_start_loc: Integer[Array, " N1"] | Integer[np.ndarray, " N1"],
    state_indices: Indices,
    distribution: Integer[Array, " 3"] | Integer[np.ndarray, " 3"],
    seq_lens: Indices,
    *,
    read_state_indices: Indices | None = None,
    read_offsets: Indices | None = None,
    n_kq: int,
    n_v: int,
    d_k: int,
    d_v: int,
    kernel_size: int,
    attention_mode: Any = "GDN",
    gate_lower_bound: float | None = None,
    num_spec_tokens: int = 0,
    zero_initialize_out: bool = True,
    compute_precision: Any = jnp.float32,
    decode_tile_size: int | None = None,
    mixed_tile_size: int | None = None,
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """The `fused_conv1d_gdn` of tpu-inference and tokamax: convolution, gates and rule of one step of a server.

    Args:
      qkv: [T, 2 n_kq d_k + n_v d_v], queries, keys and values of every token before the convolution.
      b, a: raw inputs [T, n_v] of write strength and decay; with KDA a is [T, n_v * d_k].
      conv_state: the last inputs of every slot [slots, kernel_size - 1, D], oldest first. It is transposed on the
        way in and out; the pools of `gdn_jax.serving` are [slots, D, kernel_size - 1] and spare that.
      recurrent_state: states of every slot [slots, n_v, d_k, d_v], any floating dtype; donated outside jit.
      conv_weight: [D, 1, kernel_size]. conv_bias: [D] or None.
      a_log: [n_v]. dt_bias: [n_v], with KDA [n_v, d_k].
      query_start_loc: [N + 1] first token of each request.
      state_indices: [N] slots; 0 is padding. With drafts the first of num_spec_tokens + 1 slots in a row.
      distribution: [3] ends of the running requests, of the prompts, and of all. As a NumPy array it leaves a phase
        without requests out of the program; else it is skipped while the program runs.
      seq_lens: [N] lengths with the tokens of this step. A request that has no others starts from zeros.
      read_state_indices: [N] slots to read from, if not state_indices; not with drafts.
      read_offsets: [N] number of accepted tokens less one, with drafts.
      n_kq, n_v, d_k, d_v, kernel_size: heads and widths.
      attention_mode: "GDN" or "KDA", or an enumeration's member of that name.
      gate_lower_bound: see `channel_log_decay`; only with KDA.
      num_spec_tokens: drafts that a running request may have.
      zero_initialize_out: either; the output of padding is 0.
      compute_precision: float32.
      decode_tile_size, mixed_tile_size: None; tiles are a TPU's.

    Returns:
      ((conv_state, recurrent_state), out [T, n_v * d_v] in qkv's dtype).

    Raises:
      ValueError: an argument is wrong; names it, what was expected and what came.
      NotImplementedError: an argument asks for what is not there, with the reason.

    Source: tpu-inference b8692ff `kernels.gdn.v3.wrapper`; tokamax 0.0.17 `causal_conv1d_gated_delta_rule`. There
      read_offsets is positional, at another place in each.
    """
    refuse("for tiles are a TPU's", decode_tile_size=decode_tile_size, mixed_tile_size=mixed_tile_size)
    if jnp.dtype(compute_precision) != jnp.float32:
        raise NotImplementedError(f"compute_precision: expected float32, got {compute_precision}")
    mode = getattr(attention_mode, "name", attention_mode)
    check_choice("attention_mode", mode, ("GDN", "KDA"))
    is_kda = mode == "KDA"
    if gate_lower_bound is not None and not is_kda:
        raise ArgumentError("gate_lower_bound", "None without KDA", gate_lower_bound)
    T, D = qkv.shape
    check_array("qkv", qkv, (None, 2 * n_kq * d_k + n_v * d_v), "T, 2 n_kq d_k + n_v d_v")
    check_array("conv_weight", conv_weight, (D, 1, kernel_size), "D, 1, kernel_size")
    check_array("conv_state", conv_state, (None, kernel_size - 1, D), "slots, kernel_size - 1, D")
    check_array("recurrent_state", recurrent_state, (None, n_v, d_k, d_v), "slots, n_v, d_k, d_v")
    for name, pool in (("conv_state", conv_state), ("recurrent_state", recurrent_state)):
        check_floating(name, pool)
    check_array("a_log", a_log, (n_v,), "n_v")
    if conv_bias is not None:
        check_array("conv_bias", conv_bias, (D,), "D")
    check_array("a", a, (T, n_v * d_k if is_kda else n_v), "T, n_v * d_k" if is_kda else "T, n_v")
    check_array("b", b, (T, n_v), "T, n_v")
    check_array("dt_bias", dt_bias, (n_v, d_k) if is_kda else (n_v,), "n_v, d_k" if is_kda else "n_v")
    requests = _requests(
        query_start_loc,
        state_indices,
        distribution,
        seq_lens,
        read_state_indices,
        read_offsets,
        num_spec_tokens,
    )
    weights = _Weights(conv_weight[:, 0], conv_bias, a_log, dt_bias, gate_lower_bound, is_kda)
    out = jnp.zeros((T, n_v * d_v), qkv.dtype)
    step = _Step(jnp.swapaxes(conv_state, 1, 2), jnp.asarray(recurrent_state), out)
    running = _drafts if num_spec_tokens else _tokens

    def phase(work, is_there, step: _Step) -> _Step:
        def run(step: _Step) -> _Step:
            return work(qkv, a, b, weights, requests, num_spec_tokens, step)

        if isinstance(is_there, jax.Array):
            return jax.lax.cond(is_there, run, lambda step: step, step)
        return run(step) if is_there else step

    with named(x="qkv", pool="recurrent_state", A_log="a_log"):
        step = phase(running, requests.first_prompt > 0, step)
        step = phase(_prompts, requests.end > requests.first_prompt, step)
    return (jnp.swapaxes(step.windows, 1, 2), step.states), step.out


def _requests(starts, write, distribution, seq_lens, read, offsets, num_spec_tokens: int) -> _Requests:
    check_array("state_indices", write, (None,), "N")
    N = write.shape[0]
    check_array("query_start_loc", starts, (N + 1,), "N + 1")
    check_array("distribution", distribution, (3,), "3")
    check_array("seq_lens", seq_lens, (N,), "N")
    for name, x in (("read_state_indices", read), ("read_offsets", offsets)):
        if x is not None:
            check_array(name, x, (N,), "N")
    if num_spec_tokens:
        refuse("for drafts go on from the slots they are written to", read_state_indices=read)
        if offsets is None:
            raise ArgumentError("read_offsets", "an array [N] with num_spec_tokens", "None")
    else:
        refuse("without num_spec_tokens", read_offsets=offsets)
    starts, write = jnp.asarray(starts, jnp.int32), jnp.asarray(write, jnp.int32)
    end = distribution[2]
    starts = jnp.where(jnp.arange(N + 1) <= end, starts, starts[end])
    is_new = jnp.asarray(seq_lens) <= jnp.diff(starts)
    # A new request's slot for reading may be another's: zeros are put into its own.
    read = write if read is None else jnp.where(is_new, write, jnp.asarray(read, jnp.int32))
    return _Requests(starts, distribution[0], end, read, write, is_new, offsets)


def _tokens(qkv, a, b, weights: _Weights, requests: _Requests, _, step: _Step) -> _Step:
    """Running requests of one token."""
    read, write = (requests.slots(x, is_prompt=False) for x in (requests.read, requests.write))
    slots = dict(read_slots=read, write_slots=write, null_slot=NULL_SLOT)
    token = requests.starts[:-1]
    windows, states = _cleared(step, jnp.where(requests.is_new, write, -1))
    x, windows = serving.causal_conv1d_update(_at(qkv, token), windows, weights.conv, weights.bias, **slots)
    a, b = weights.raw(_at(a, token)), _at(b, token)
    o, states = serving.decode_packed(x, a, b, states, **weights.gates, **slots)
    return _Step(windows, states, _put(step.out, jnp.where(write < 0, -1, token), o))


def _drafts(qkv, a, b, weights: _Weights, requests: _Requests, num_spec_tokens: int, step: _Step) -> _Step:
    """Running requests of one token and its drafts, with a state after each."""
    behind = jnp.arange(num_spec_tokens + 1)
    base = requests.slots(requests.write, is_prompt=False)[:, None]
    slots = jnp.where(base < 0, -1, base + behind)
    offsets = jnp.asarray(requests.offsets, jnp.int32)
    number = jnp.where(base[:, 0] < 0, 0, requests.lengths)
    begun = jnp.take_along_axis(slots, offsets[:, None], 1)[:, 0]
    spans = dict(state_slots=slots, num_accepted_tokens=offsets + 1, num_tokens=number, null_slot=NULL_SLOT)
    token = requests.starts[:-1, None] + behind
    windows, states = _cleared(step, jnp.where(requests.is_new, begun, -1))
    x, windows = serving.causal_conv1d_verify(_at(qkv, token), windows, weights.conv, weights.bias, **spans)
    q, k, v = _heads(x, states)
    a, b = weights.raw(_at(a, token)), _at(b, token)
    o, states = serving.verify(q, k, v, a, b, states, **weights.gates, **spans)
    return _Step(windows, states, _put(step.out, jnp.where(behind < number[:, None], token, -1), o))


def _prompts(qkv, a, b, weights: _Weights, requests: _Requests, _, step: _Step) -> _Step:
    """Prompts and pieces of prompts."""
    read, write = (requests.slots(x, is_prompt=True) for x in (requests.read, requests.write))
    slots = dict(read_slots=read, write_slots=write, has_initial_state=~requests.is_new, null_slot=NULL_SLOT)
    x, windows = serving.causal_conv1d(
        qkv[None], requests.starts, step.windows, weights.conv, weights.bias, **slots
    )
    q, k, v = _heads(x, step.states)
    g, beta = weights.log_decay(a)[None], write_strength(b)[None]
    o, states = serving.prefill(q, k, v, g, beta, requests.starts, step.states, use_qk_l2norm=True, **slots)
    # The tokens of other requests have output 0 here.
    return _Step(windows, states, step.out + o.reshape(step.out.shape).astype(step.out.dtype))


def _heads(x: jax.Array, states: jax.Array) -> tuple[jax.Array, ...]:
    """Queries, keys and values [.., heads, width] of channels [.., D]."""
    n_v, d_k, d_v = states.shape[1:]
    keys = (x.shape[-1] - n_v * d_v) // 2
    parts = jnp.split(x, (keys, 2 * keys), -1)
    return tuple(y.reshape(*x.shape[:-1], -1, width) for y, width in zip(parts, (d_k, d_k, d_v), strict=True))


def _cleared(step: _Step, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both pools with zeros at slots of requests that are new; -1 is none."""

    def clear(pool: jax.Array) -> jax.Array:
        return pool.at[jnp.where(slots < 0, pool.shape[0], slots)].set(0, mode="drop")

    return clear(step.windows), clear(step.states)


def _at(x: jax.Array, tokens: jax.Array) -> jax.Array:
    return jnp.take(x, tokens, axis=0, mode="clip")


def _put(out: jax.Array, tokens: jax.Array, o: jax.Array) -> jax.Array:
    """out with o at its tokens; -1 is none."""
    at = jnp.where(tokens < 0, out.shape[0], tokens).reshape(-1)
    return out.at[at].set(o.reshape(-1, out.shape[1]).astype(out.dtype), mode="drop")
