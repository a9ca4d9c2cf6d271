"""A few tokens of every running request, each state read once from its slot of a pool and written back in place.

    g = -exp(A_log) softplus(a + dt_bias),  beta = sigmoid(b)
    S <- exp(g) S;   u = beta (v - k^T S);   S <- S + k u^T;   o = scale q^T S

With T = 1 this is decoding. With more tokens it is verification of drafts: the state after token t goes to a slot of
its own, and stays in float32 between the tokens. The tokens may be a tree: one that does not follow the token before
it starts from the state at the start of the call, which waits in shared memory, and meets its ancestors once more. No
state that was written is read again, so it does not matter which of them were rounded, dropped or overwritten: every
token has the state and the output that its path alone would have.

Inputs (GMEM): q [N, T, Hq K], k [N, T, Hk K], v [N, T, HV V] bfloat16, float16 or float32; a, b [N, T, HV] of any
floating dtype; each may also be channels of an array [N, T, C], from one that `Channels` names on, so that one array
can be several of them; A_log, dt_bias [HV]; read_slots [N], write_slots [N, T] int32; optionally num_tokens [N] and
parents [N, T] int32.
In place (GMEM): pool [slots, HV, K, V], or [slots, HV, V, K], float32 or bfloat16; with an axis of layers after the
first in a pool that serves a whole model.
Outputs (GMEM): o [N, T, HV, V] in v's dtype.
Grid: a warpgroup for each (row, value head, tile of `block` entries of V), by itself. It holds its tile in registers:
the bytes in flight are those of all the warpgroups that fit on an SM. With one token each also asks the L2 cache for
the tile of a later one. Vectors, norms and gates of several tokens are worked out while the state is on its way, and
wait in shared memory.
Numerics: gates, norms, sums and states in float32, rounded once where they are stored. The order of every sum depends
on K, V, and the pool's dtype and layout, not on N: a request's bits do not depend on its neighbours.
Hardware: `NEEDS`. Limits: K <= 256; K and V multiples of 32; HV a multiple of Hq and Hk.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.decode.cta import ALONE, Channels, Config, Cta
from pallas_kernels.decode.tiles import GRANULE, Norms, Sizes, Tile, Token, Vectors, load, vector_layout
from pallas_kernels.device import generations
from pallas_kernels.device.launch import grid_index, launch, num_sms
from pallas_kernels.device.memory import Buffer, Memory, smem_bytes, store_any
from pallas_kernels.device.needs import Needs
from pallas_kernels.work.slots import layer_input, one_for_all_layers

NEEDS = Needs.NOTHING

MAX_K = 256
"""The registers of a warpgroup hold tiles of at most this many entries of K."""

ALIGNED = 8
"""Channels that a thread reads at once at most: q, k and v begin at a multiple of them, in arrays of a multiple."""

MAX_TREE = 32
"""Tokens of a tree: an int32 has a bit for each of a token's ancestors."""

POOL_DTYPES = ("float32", "bfloat16")
"""Dtypes of the states in a pool."""

REDUCTION_BYTES = 4096
"""Shared memory for sums over warps."""


def check_supported(
    q, k, v, pool, *, is_tree: bool = False, dtypes: tuple[str, ...] = POOL_DTYPES
) -> str | None:
    """Why the kernel cannot take a call, from its arrays or their shapes; None if it can.

    Args:
      is_tree: whether the tokens are given parents.
      dtypes: of states that a kernel takes.
    """
    if is_tree and q.shape[1] > MAX_TREE:
        return f"a tree of {q.shape[1]} drafts; the kernel takes trees of at most {MAX_TREE}"
    (Hq, K), (Hk, _), (HV, V) = q.shape[-2:], k.shape[-2:], v.shape[-2:]
    if jnp.dtype(pool.dtype).name not in dtypes:
        return f"the pool is {jnp.dtype(pool.dtype).name}; the kernel takes {' and '.join(dtypes)}"
    if not q.dtype == k.dtype == v.dtype or jnp.dtype(q.dtype).itemsize > 4:
        return f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; the kernel takes one dtype of at most 32 bits"
    if K % GRANULE or V % GRANULE or not 0 < K <= MAX_K:
        return f"K = {K}, V = {V}; the kernel takes multiples of {GRANULE}, K up to {MAX_K}"
    if HV % Hq or HV % Hk:
        return f"{HV} value heads, {Hq} and {Hk} of q and k; the kernel takes whole groups of value heads"
    if pool.shape[-3] != HV:
        return f"the pool is {pool.shape}; the kernel takes as many states as value heads, {HV}"
    if not v.shape[0] or not pool.shape[0]:
        return "there are no requests, or no slots"
    return None


SCALARS = 5
"""Scalars of a token in shared memory: exp(g), beta, and the norms."""

GROUP = 2
"""Tokens whose vectors are loaded together."""


def memory(sizes: Sizes, config: Config, T: int, uneven: bool, tree_of: Any = None) -> Memory:
    """Shared memory of a CTA: several tokens, and for trees the state from which they begin.

    Args:
      uneven: whether requests have different numbers of tokens.
      tree_of: dtype of the pool where the tokens are trees, else None.
    """
    if T == 1 and not uneven:
        return {}
    shape = Tile(sizes, config.block, 4).shape
    return {
        "initial": None if tree_of is None else Buffer(shape, tree_of),
        "q": Buffer((T, sizes.K)),
        "k": Buffer((T, sizes.K)),
        "v": Buffer((T, config.block)),
        "scalars": Buffer((T, SCALARS)),
    }


def bytes_of_tokens(T: int, pool: jax.Array, kv_layout: bool, is_tree: bool) -> int:
    """Shared memory of a CTA at most for T tokens of each request, whatever their gates are.

    Args:
      pool: the pool's states, or their shape.
      kv_layout: whether states are [K, V].
      is_tree: whether the tokens are given parents.
    """
    K, V = pool.shape[-2:] if kv_layout else pool.shape[:-3:-1]
    block = Config.default(K, V, pool.dtype, kv_layout, T).block
    known: Memory = {
        "initial": Buffer((K, block), pool.dtype) if is_tree else None,
        "q and k": Buffer((T, 2 * K)),
        "gates of channels": Buffer((T, 2 * K)),
        "v": Buffer((T, block)),
        "scalars": Buffer((T, SCALARS)),
    }
    return smem_bytes(known, REDUCTION_BYTES)


def _bring_near(cta: Cta) -> None:
    """Asks the L2 cache for the tile of a warpgroup that has no room on an SM yet."""
    later = grid_index() + cta.config.ahead

    @pl.when(later < cta.warpgroups)
    def _():
        row, head, entries = cta.tile.where(later * cta.config.turns)
        slot = cta.read_slot(row)
        pl.when(cta.sizes.slots.is_slot(slot))(lambda: generations.prefetch(cta.state(slot, head, entries)))


def _decode(cta: Cta, x: Vectors) -> None:
    """The only token of a row."""
    S = cta.read()
    if 0 < cta.config.ahead < cta.warpgroups:
        _bring_near(cta)
    to = cta.write_slot(0)

    def again(S):
        return cta.dev.unknown(S, cta.tile.layout) if cta.config.narrow else S

    alpha, beta = cta.gates(0)

    def add(a, x, c):
        a = plgpu.layout_cast(lax.broadcast(a, x.shape), cta.tile.v_layout)
        return cta.dev.multiply_add(a, x, c, cta.tile.v_layout)

    # With one tile to a warpgroup or several, by how many requests there are, a request has the same bits.
    alike = {} if cta.sizes.kv_layout or cta.gmem.pool.dtype.itemsize == 4 else {"add": add}
    is_own_slot = cta.gmem.write_slots is None and beta.ndim == 0
    if (cta.config.narrow or cta.config.turns > 1) and is_own_slot and cta.warpgroups > 2 * num_sms():
        # It stays what it is, for beta is at most 2, but a compiler that knew would keep the addresses of all loads
        # for the stores, in 50 registers, and two warpgroups would fit on an SM instead of three.
        to = to + (beta > 4.0).astype(jnp.int32)
    q, k, q_whole, k_whole, v = (y.astype(jnp.float32) for y in x)
    norms = functools.cache(lambda: cta.tile.norms(q_whole, k_whole))
    for i in range(cta.config.turns):
        here, following = cta.turn(i), cta.turn(i + 1)
        is_last = i + 1 == cta.config.turns
        S_next, v_next = (S, v) if is_last else (following.read(), load(following.v(0), cta.tile.v_layout))
        v = here.written(0, v)
        S, o = cta.tile.update(S, Token(q, k, v, alpha, beta), norms, again, **alike)
        # Rounded outside of the branch: its registers are free earlier.
        S = S.astype(cta.gmem.pool.dtype)
        here.write_output(0, o)
        here.write(to, S)
        S, v = S_next, v_next.astype(jnp.float32)


def _prepare(cta: Cta, group: jax.Array) -> None:
    """Stores a group of tokens in shared memory; the last one several times where there are not as many."""
    smem, whole = cta.smem, vector_layout(cta.sizes.K)
    numbers = [jnp.minimum(group * GROUP + i, cta.T - 1) for i in range(min(GROUP, cta.T))]
    found = [
        (
            load(cta.q(t), whole),
            load(cta.k(t), whole),
            load(cta.v(t), cta.tile.v_layout),
            *cta.gates_to_keep(t),
        )
        for t in numbers
    ]
    for t, (*vectors, alpha, beta) in zip(numbers, found, strict=True):
        q, k, v = (y.astype(jnp.float32) for y in vectors)
        v = cta.written(t, v)
        for ref, y in ((smem.q, q), (smem.k, k), (smem.v, v)):
            store_any(ref.at[t], y)
        norms = cta.tile.norms(q, k)
        cta.keep_gates(t, alpha, beta)
        for i, y in enumerate(norms, 2):
            smem.scalars[t, i] = jnp.float32(y)


def _ancestors(cta: Cta, t: jax.Array) -> jax.Array:
    """The ancestors of token t, as bits; a parent that does not come before it is none."""

    def up(i, carry):
        found, wanted = carry
        s = t - 1 - i
        is_one = s == wanted
        bit = lax.shift_left(jnp.int32(1), s)
        return jnp.where(is_one, found | bit, found), jnp.where(is_one, cta.gmem.parents[cta.row, s], wanted)

    return lax.fori_loop(0, t, up, (jnp.int32(0), cta.gmem.parents[cta.row, t]))[0]


def _state_before(cta: Cta, t: jax.Array) -> jax.Array:
    """The state that token t of a tree follows, from the state at the start of the call on."""
    smem, tile, path = cta.smem, cta.tile, _ancestors(cta, t)

    def follow(s, S):
        alpha, beta = cta.kept_gates(s)
        _, rk, _ = (smem.scalars[s, i] for i in range(2, SCALARS))
        k, v = load(smem.k.at[s], tile.k_layout), load(smem.v.at[s], tile.v_layout)
        return tile.follow(S, k, v, alpha, beta, rk)

    def visit(s, S):
        is_one = lax.shift_right_logical(path, s) & 1 == 1
        return lax.cond(is_one, functools.partial(follow, s), lambda S: S, S)

    return lax.fori_loop(0, t, visit, load(smem.initial, tile.layout).astype(jnp.float32))


def _token(cta: Cta, t: jax.Array, S: jax.Array) -> jax.Array:
    """Token t, whose vectors, norms and gates wait in shared memory: the state after it."""
    gmem, smem, tile = cta.gmem, cta.smem, cta.tile
    if gmem.parents is not None:
        follows = gmem.parents[cta.row, t] == t - 1
        S = lax.cond(follows, lambda S: S, lambda _: _state_before(cta, t), S)
    to = cta.write_slot(t)
    alpha, beta = cta.kept_gates(t)
    norms = [smem.scalars[t, i] for i in range(2, SCALARS)]
    q, k = (load(ref.at[t], tile.k_layout) for ref in (smem.q, smem.k))
    v = load(smem.v.at[t], tile.v_layout)
    S, o = tile.update(S, Token(q, k, v, alpha, beta), lambda: Norms(*norms))
    cta.write_output(t, o)
    cta.write(to, S)
    return S


def _verify(cta: Cta) -> None:
    """All tokens of a row, one after the other."""
    # The state is on its way while the tokens are prepared.
    S = cta.read()
    lax.fori_loop(0, -(-cta.T // GROUP), lambda group, _: _prepare(cta, group), None)
    if cta.gmem.parents is not None:
        store_any(cta.smem.initial, S)
    generations.commit()
    lax.fori_loop(0, cta.count, functools.partial(_token, cta), S.astype(jnp.float32))


def _body(gmem: Any, smem: Any, kind: type[Cta], **static: Any) -> None:
    cta = kind(gmem, smem, **static)
    is_slot = cta.sizes.slots.is_slot(cta.slot)
    if cta.T == 1 and gmem.num_tokens is None:
        pl.when(is_slot)(functools.partial(_decode, cta, cta.tile.vectors(cta.q(0), cta.k(0), cta.v(0))))
    else:
        pl.when(is_slot)(lambda: _verify(cta))
    # Padding tokens, or a padding row.
    padding_from = jnp.where(is_slot, cta.count, 0)

    def pad(t, carry):
        for i in range(cta.config.turns):
            cta.turn(i).write_output(t, cta.tile.zeros())
        return carry

    lax.fori_loop(padding_from, cta.T, pad, None)


def step_of_channels(
    q: Float[Array, "N T Cq"],
    k: Float[Array, "N T Ck"],
    v: Float[Array, "N T Cv"],
    a: Float[Array, "N T Ca"],
    b: Float[Array, "N T Cb"],
    pool: Float[Array, "slots *layers HV rows columns"],
    *,
    heads: tuple[int, int, int],
    first: Channels = ALONE,
    A_log: Float[Array, " HV"],
    dt_bias: Float[Array, " biases"],
    read_slots: Int[Array, " N"] | None,
    write_slots: Int[Array, "N T"] | None,
    num_tokens: Int[Array, " N"] | None = None,
    parents: Int[Array, "N T"] | None = None,
    layer: int | Int[Array, ""] | None = None,
    config: Config | None = None,
    kind: type[Cta] = Cta,
    settings: dict[str, Any] | None = None,
    w: Float[Array, "N T Cw"] | None = None,
    erase_key: Float[Array, "N T Ce"] | None = None,
    interpret=None,
    **options: Any,
) -> tuple[Float[Array, "N T HV V"], Float[Array, "slots *layers HV rows columns"]]:
    """T tokens of N requests, and the pool with the states after them; all other slots keep their bits.

    Heads lie side by side in arrays of channels, of which several may be one array.
    The pool is updated in place where it is donated to the compiled function around this call; else XLA copies it.

    Args:
      q, k, v, a, b: arrays of channels, q, k and v of one dtype and with a multiple of `ALIGNED` channels.
      pool: states that `check_supported` accepts.
      heads: Hq, Hk and HV.
      first: where the heads of each begin in its array, for q, k and v a multiple of `ALIGNED`.
      A_log, dt_bias: parameters of the decay.
      read_slots: where each request's state is. One that is negative, past the pool or null_slot is padding: its
        output is 0, and nothing is read or written. None: that of request i is in slot i.
      write_slots: where the state after each token goes, which is dropped where that is padding. No slot twice, and
        none that another request reads. None, for one token without read_slots: where the states were.
      num_tokens: tokens that each request has; the others are padding. None for all.
      parents: of two to `MAX_TREE` tokens, those that each one follows, which come before it; -1 for the state that
        was read. None: each follows the one before.
      layer: index of the second axis of a pool that serves a whole model.
      config: None for the default.
      kind, settings: the `Cta` that knows the gates, and what it is made with.
      w, erase_key: inputs more, for a `Cta` that knows them.
      interpret: parameters of Pallas' interpreter, None to compile.
      options: as for `Sizes.of`.

    Returns:
      o [N, T, HV, V] in v's dtype, and the pool.
    """
    N, T = q.shape[:2]
    for x, start in zip((q, k, v), first[:3], strict=True):
        assert x.shape[2] % ALIGNED == start % ALIGNED == 0, f"channels from {start} of {x.shape}"
    sizes = Sizes.of(heads, pool, layer, **options)
    HV, V = sizes.HV, sizes.V
    alone = T == 1 and num_tokens is None
    config = config or kind.default_config(sizes, pool.dtype, T, N if alone else 0)
    assert alone or config.turns == 1
    assert V // config.block % config.turns == 0
    assert parents is None or 1 < T <= MAX_TREE
    static: Any = dict(sizes=sizes, config=config, first=first, interpreted=interpret is not None)
    static |= settings or {}
    room = memory(sizes, config, T, num_tokens is not None, None if parents is None else pool.dtype)
    inputs = dict(q=q, k=k, v=v, a=a, b=b, A_log=A_log, dt_bias=dt_bias, read_slots=read_slots)
    inputs |= dict(write_slots=write_slots, num_tokens=num_tokens, parents=parents, w=w)
    inputs |= dict(erase_key=erase_key)
    results = launch(
        "decode_step",
        functools.partial(_body, kind=kind, **static),
        inputs=inputs | dict(layer=layer_input(layer)),
        outputs={"o": jax.ShapeDtypeStruct((N, T, HV, V), v.dtype)},
        updated={"pool": one_for_all_layers(pool, layer)},
        memory={**room, **kind.gate_memory(sizes, T)} if room else room,
        ctas=N * HV * (V // config.block) // config.turns,
        reduction_bytes=REDUCTION_BYTES,
        interpret=interpret,
    )
    return results["o"], results["pool"].reshape(pool.shape)
