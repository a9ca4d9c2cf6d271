"""Views of a gated delta rule at work: attention maps, half-lives, retrieval, spectra, gates, Householder geometry.

Pure functions of arrays, computed in float32 (float64 when an argument is). Functions of many operations are
compiled, a program for each shape. Pictures of the results are drawn by `gdn_jax.inspect.plots`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from gdn_jax.gates import l2norm
from gdn_jax.rule.chunks.decay import chunk_cumsum
from gdn_jax.rule.chunks.stages import Numerics, kkt
from gdn_jax.rule.definition import recurrent_step
from gdn_jax.shapes import accumulation_dtype, check_array, rule_dims, split_heads


class HalfLives(NamedTuple):
    """Half-lives of a layer in tokens, inf where nothing decays. Each field is [HO], or [HO, K] of key channels.

    Fields:
      mean_rate: ln 2 / -mean(g), what the state's decay over whole rows amounts to.
      p10, median, p90: percentiles over the tokens of `half_life(g)`.
    """

    mean_rate: Float[Array, "HO *K"]
    p10: Float[Array, "HO *K"]
    median: Float[Array, "HO *K"]
    p90: Float[Array, "HO *K"]


@jax.jit
def effective_attention(
    q: Float[Array, "B T Hq K"],
    k: Float[Array, "B T Hk K"],
    g: Float[Array, "B T HO"] | None = None,
    beta: Float[Array, "B T HO"] | None = None,
    *,
    scale: float | Float[Array, ""] | None = None,
) -> Float[Array, "B HO T T"]:
    """The matrix M of each head with o = M v: the attention map that a call of the rule from a zero state implies.

        M = scale lower(q k^T exp(G_i - G_j)) (I + kkt)^-1 diag(beta)

    Linear attention with decay is the first factor alone; the inverse takes out of token j's value what earlier
    keys had already stored under its key. Entries have either sign and rows do not sum to 1.

    Args:
      q, k, g, beta: as for `gated_delta_rule` (keys normalised by the caller). HO is the head count of g or beta
        where given, else max(Hq, Hk); value heads that share all of q, k, g and beta share a map.
      scale: factor of the output, K ** -0.5 by default.

    Returns:
      M [B, HO, T, T], rows are queries, 0 above the diagonal, float32 (float64 when an argument is).

    Raises:
      ValueError: shapes or dtypes do not fit; names the argument.

    Numerics: one triangular solve of T unknowns, products in full precision; B HO T^2 numbers.
    Source: the chunkwise form of Yang, Kautz, Hatamizadeh 2024 with a single chunk.
    """
    HO = next((x.shape[-1] for x in (g, beta) if x is not None), max(q.shape[2], k.shape[2]))
    v = jax.ShapeDtypeStruct((*q.shape[:2], HO, 1), q.dtype)
    dims = rule_dims(q, k, v, g, beta, None, None, None, "kv")
    numerics = Numerics.full(*(x for x in (q, k, g, beta) if x is not None))
    g, beta = _full_gates(dims.B, dims.T, HO, numerics.accumulate, g, beta)
    q, k, g, beta = (_heads_first(x, (dims.Hq, dims.Hk, HO)) for x in (q, k, g, beta))
    decay = chunk_cumsum(g)
    scores = numerics.einsum("...ik,...jk->...ij", q, k) * decay.between()
    system = kkt(k, decay, beta, numerics)
    # x (I + kkt) = scores: substitution reads only what lies below the diagonal, which is taken to be 1.
    solved = lax.linalg.triangular_solve(system, scores, left_side=False, lower=True, unit_diagonal=True)
    M = (dims.K**-0.5 if scale is None else scale) * solved * beta[..., None, :]
    return M.reshape(dims.B, HO, dims.T, dims.T)


def half_life(g: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Tokens after which a decay of g at every token would leave half of the state: n = ln 2 / -g.

    Args:
      g: log decay <= 0.

    Returns:
      n in tokens, not rounded: inf for g = 0, 1 for g = -ln 2, 0 for g = -inf.
    """
    return jnp.where(g == 0, jnp.inf, -math.log(2) / g)


def memory_horizon(
    width: int, g: float | Float[Array, "*S"] = 0.0, beta: float | Float[Array, "*S"] = 0.0
) -> Float[Array, "*S"]:
    """Tokens until half of a stored key's direction is left, where every token decays by g and writes with beta.

    A write under another key erases too: what it leaves of a stored direction e is e^T (I - beta k k^T) e, which is
    1 - beta / K on average over unit keys k of all directions. After n tokens (exp(g) (1 - beta / K))^n is left, so

        n = ln 2 / (-g - ln(1 - beta / K))        about K ln 2 / beta without decay

    It is what a layer remembers before it has learned where to write and what to keep.

    Args:
      width: K of the keys.
      g: log decay <= 0; 0 for a rule without decay.
      beta: write strength, not above K; 0 for a rule without correction, whose writes erase nothing.

    Returns:
      n in tokens, not rounded; inf where nothing is lost.
    """
    rate = -jnp.asarray(g) - jnp.log1p(-jnp.asarray(beta) / width)
    return jnp.where(rate == 0, jnp.inf, math.log(2) / rate)


@jax.jit
def write_half_life(g: Float[Array, "B T HO"]) -> Float[Array, "B T HO"]:
    """Tokens until what token t writes has decayed to half: the least n with exp(g_{t+1} + ... + g_{t+n}) <= 1/2.

    Unlike `half_life` it follows the gates that really come, and counts whole tokens. Only decay is counted: a
    later write under a similar key erases too.

    Args:
      g: log decay <= 0, -inf for a reset.

    Returns:
      n >= 1, a whole number of tokens in g's dtype; inf where the row ends before half is lost.
    """
    T = g.shape[1]
    left = chunk_cumsum(jnp.moveaxis(g, 1, 2)).between()  # [B, HO, s, t]: what is left at s of a write at t
    steps = jnp.sum(left > 0.5, axis=-2)  # tokens s = t, t + 1, ... with more than half
    ends = steps == T - jnp.arange(T)
    return jnp.moveaxis(jnp.where(ends, jnp.inf, steps), 1, 2).astype(g.dtype)


@jax.jit
def layer_half_lives(g: Float[Array, "B T HO *K"]) -> HalfLives:
    """Summary of a layer's half-lives, per head, or per key channel, over all tokens of the batch.

    Args:
      g: log decay <= 0.
    """
    n = half_life(g)
    # Nearest tokens, not a mean of two: one of them may be inf.
    percentiles = (jnp.percentile(n, p, axis=(0, 1), method="nearest") for p in (10, 50, 90))
    return HalfLives(half_life(jnp.mean(g, axis=(0, 1))), *percentiles)


@jax.jit
def retrieval_error(
    h: Float[Array, "*S K V"], k: Float[Array, "*Sk n K"], v: Float[Array, "*Sv n V"]
) -> Float[Array, "*So n"]:
    """Relative error of n stored pairs read from a state with their own keys: |k^T h - v| / |v|.

    0 is exact retrieval, 1 is what an empty state gives.

    Args:
      h: state.
      k, v: the pairs; v is nowhere all zero. Leading axes broadcast against those of h.
    """
    read = jnp.einsum("...nk,...kv->...nv", k, h, precision=lax.Precision.HIGHEST)
    return jnp.linalg.norm(read - v, axis=-1) / jnp.linalg.norm(v, axis=-1)


@jax.jit
def retrieval_by_load(
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HO"] | None = None,
    beta: Float[Array, "B T HO"] | None = None,
) -> Float[Array, "B HO T T"]:
    """Retrieval error of every stored pair while the rule writes pair after pair into a zero state.

    Args:
      k, v, g, beta: pairs in the order in which they are written, as for `gated_delta_rule`; v nowhere all zero.

    Returns:
      E [B, HO, t, i]: `retrieval_error` of pair i after token t, NaN where i is not stored yet (i > t). After
      token t the load is (t + 1) / K pairs per dimension of the key; the mean over i of row t is the error at
      that load, the diagonal the error right after writing, a column the fate of one pair.
    """
    HO = next((x.shape[-1] for x in (g, beta) if x is not None), max(k.shape[2], v.shape[2]))
    q = jax.ShapeDtypeStruct((*k.shape[:2], HO, k.shape[3]), k.dtype)
    dims = rule_dims(q, k, v, g, beta, None, None, None, "kv")
    dtype = accumulation_dtype(k, v, g, beta)
    g, beta = _full_gates(dims.B, dims.T, HO, dtype, g, beta)
    keys, values, g, beta = (_heads_first(x.astype(dtype), (dims.Hk, dims.HV, HO)) for x in (k, v, g, beta))
    heads = jnp.broadcast_shapes(*(x.shape[1 : g.ndim - 1] for x in (keys, values, g)))

    def token(h, t):
        k, v = keys[..., t, :], values[..., t, :]
        h, _ = recurrent_step(h, k, k, v, g[..., t], beta[..., t], scale=1.0)
        error = retrieval_error(h, keys, values)
        return h, jnp.where(jnp.arange(dims.T) <= t, error, jnp.nan)

    start = jnp.zeros((dims.B, *heads, dims.K, dims.V), dtype)
    _, errors = lax.scan(token, start, jnp.arange(dims.T))
    return jnp.moveaxis(errors.reshape(dims.T, dims.B, HO, dims.T), 0, 2)


def state_spectrum(h: Float[Array, "*S K V"]) -> Float[Array, "*S R"]:
    """Singular values of states, largest first, R = min(K, V).

    Args:
      h: states, for instance of `chunk_states` [B, L, HO, K, V], which shows them over time.
    """
    return jnp.linalg.svd(h, compute_uv=False)


@jax.jit
def effective_rank(singular_values: Float[Array, "*S R"]) -> Float[Array, "*S"]:
    """exp(-sum p ln p) with p = sigma / sum(sigma): how many directions a state really uses.

    1 for a rank-one state, R for R equal singular values, 0 for a state of zeros.

    Args:
      singular_values: >= 0, see `state_spectrum`.

    Source: Roy and Vetterli 2007, "The effective rank: a measure of effective dimensionality".
    """
    total = jnp.sum(singular_values, axis=-1, keepdims=True)
    p = singular_values / jnp.where(total > 0, total, 1)
    rank = jnp.exp(jnp.sum(jax.scipy.special.entr(p), axis=-1))
    return jnp.where(total[..., 0] > 0, rank, 0)


def rule_inputs(layer: Any, x: Float[Array, "B T D"]) -> Any:
    """Returns the inputs of the rule in a recurrent layer of `gdn_jax.layers` (whole rows x, no padding, no cache).

    q and k have unit length: for a GatedDeltaNet `gated_delta_rule(*inputs)` is the rule's output before norm and
    output gate. The layer's `rule_inputs` describes the inputs; they begin with q, k, v, g and beta.

    Args:
      layer: the layer, with any rule; one that does not read a gate leaves it without effect.
      x: its inputs [B, T, hidden_size]. In a model: the normalised residual stream, see `model_rule_inputs`.

    Raises:
      ValueError: layer is of another kind, or x of another width.
    """
    _check_layer(layer)
    check_array("x", x, (None, None, layer.hidden_size), "B, T, hidden_size")
    inputs, _ = layer.rule_inputs(x)
    return inputs._replace(q=l2norm(inputs.q), k=l2norm(inputs.k))


def model_rule_inputs(model: Any, tokens: Int[Array, "B T"]) -> list[Any]:
    """Returns the inputs of the rule in every layer of a `gdn_jax.models.LanguageModel`, first layer first.

    Args:
      model: the model; a hybrid has attention in some of its layers.
      tokens: integers in [0, vocab_size).

    Returns:
      An entry a layer: its `rule_inputs`, None for a layer of attention, which has no rule.

    Raises:
      ValueError: no layer is recurrent.
    """
    _check_model(model)
    layers = []

    def watch(_, mixer, x, **options):
        layers.append(rule_inputs(mixer, x) if _has_rule(mixer) else None)
        return mixer(x, **options)

    model.hidden_states(tokens, around=watch)
    return layers


def logits_with_gates(
    model: Any, tokens: Int[Array, "B T"], change: Callable[[int, Array, Array], tuple[Array, Array]]
) -> Float[Array, "B T vocab"]:
    """Logits of a `gdn_jax.models.LanguageModel` whose gates are changed on the way: an intervention.

    Later layers see what the change did to earlier ones. Attention layers have no gates and stay as they are.

    Args:
      model: the model, with any rule that reads g and beta; a hybrid has attention in some of its layers.
      tokens: integers in [0, vocab_size).
      change: from (layer, g, beta), as in `rule_inputs`, to the g and beta to use instead. The layer is counted from
        0 over all layers, of which those with attention are not asked.

    Raises:
      ValueError: no layer is recurrent.
    """
    _check_model(model)

    def changed(i, mixer, x, **options):
        if not _has_rule(mixer):
            return mixer(x, **options)
        inputs, _ = mixer.rule_inputs(x)
        g, beta = change(i, inputs.g, inputs.beta)
        o, _ = mixer.apply_rule(inputs._replace(g=g, beta=beta))
        return mixer.rule_output(o, x), None

    return model(tokens, around=changed)[0]


def mean_by_kind(
    x: Float[Array, "B T HO *K"], kind: Int[Array, "B T"], num_kinds: int
) -> Float[Array, "kinds HO *K"]:
    """Mean of a gate over the tokens of each kind: how alpha and beta are used on keys, on values, on noise.

    Args:
      x: g, alpha, beta or another number per token and head, or per key channel.
      kind: of each token, in [0, num_kinds); a token of another kind is left out.
      num_kinds: number of kinds.

    Returns:
      [num_kinds, HO], or [num_kinds, HO, K]; NaN for a kind without tokens.
    """
    member = jax.nn.one_hot(kind, num_kinds, dtype=x.dtype)
    total = jnp.einsum("btn,bt...->n...", member, x, precision=lax.Precision.HIGHEST)
    return total / jnp.sum(member, axis=(0, 1)).reshape(-1, *(1,) * (x.ndim - 2))


def householder(k: Float[Array, "*S K"], beta: Float[Array, "*S"]) -> Float[Array, "*S K K"]:
    """The transition H = I - beta k k^T of a write: what happens to the state's columns before v is added.

    For a unit key: the identity at beta = 0, the projection onto the plane orthogonal to k at 1, the reflection
    in that plane (a Householder matrix) at 2.

    Args:
      k: keys.
      beta: write strengths, in [0, 1], or [0, 2] with negative eigenvalues.
    """
    outer = k[..., :, None] * k[..., None, :]
    return jnp.eye(k.shape[-1], dtype=outer.dtype) - beta[..., None, None] * outer


def householder_eigenvalues(k: Float[Array, "*S K"], beta: Float[Array, "*S"]) -> Float[Array, "*S K"]:
    """Eigenvalues of I - beta k k^T: 1 - beta |k|^2 along k, first, then K - 1 times 1 on the plane orthogonal to it.

    Below 0 for beta |k|^2 > 1 (what state tracking needs, Grazzi et al. 2024), below -1 for beta |k|^2 > 2,
    where the rule grows without bound.
    """
    along = 1 - beta * jnp.sum(k * k, axis=-1)
    ones = jnp.ones((*along.shape, k.shape[-1] - 1), along.dtype)
    return jnp.concatenate([along[..., None], ones], axis=-1)


def apply_householder(
    k: Float[Array, "*S K"], beta: Float[Array, "*S"], x: Float[Array, "*S K"]
) -> Float[Array, "*S K"]:
    """(I - beta k k^T) x = x - beta (k . x) k, without the matrix."""
    return x - (beta * jnp.sum(k * x, axis=-1))[..., None] * k


def _has_rule(mixer: Any) -> bool:
    return hasattr(mixer, "rule_inputs")


def _check_model(model: Any) -> None:
    if not any(_has_rule(block.mixer) for block in model.blocks):
        kinds = sorted({type(block.mixer).__name__ for block in model.blocks})
        raise ValueError(f"model: expected a recurrent layer, got {', '.join(kinds)} alone")


def _check_layer(layer: Any) -> None:
    if not _has_rule(layer):
        raise ValueError(f"layer: expected a recurrent layer, got {type(layer).__name__}")


def _full_gates(B: int, T: int, HO: int, dtype: Any, g: Array | None, beta: Array | None):
    """g and beta as full arrays of a dtype: no decay and full writes where they are None."""
    g = jnp.zeros((B, T, HO), dtype) if g is None else g.astype(dtype)
    beta = jnp.ones((B, T, HO), dtype) if beta is None else beta.astype(dtype)
    return g, beta


def _heads_first(x: Array, head_counts: tuple[int, ...]) -> Array:
    """[B, T, H, ...] to [B, heads..., T, ...], heads split so that shared ones broadcast."""
    return split_heads(jnp.moveaxis(x, 2, 1), 1, head_counts)
