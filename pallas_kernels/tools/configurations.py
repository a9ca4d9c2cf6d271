"""The kernel configurations that `ptxas_report` and `fingerprint` look at, each as a function and its argument
shapes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backward.chain import Config
from pallas_kernels.backward.chains import chains
from pallas_kernels.backward.gradients import gradients
from pallas_kernels.backward.segment_adjoints import segment_adjoints
from pallas_kernels.chunks.gates import chunk_gates
from pallas_kernels.chunks.inverse import gated_inverse
from pallas_kernels.chunks.segment_states import segment_states
from pallas_kernels.decode.conv_update import conv_update
from pallas_kernels.decode.ring_drafts import ring_drafts
from pallas_kernels.decode.ring_step import Drafts, ring_step
from pallas_kernels.decode.step import Channels, step, step_of_channels
from pallas_kernels.forward import outputs, transitions
from pallas_kernels.layer import short_conv
from pallas_kernels.layer.cross_entropy import cross_entropy
from pallas_kernels.layer.embedding import embedding_gradient
from pallas_kernels.layer.gated_norm import gated_norm, gated_norm_backward
from pallas_kernels.layer.logit_cotangents import logit_cotangents
from pallas_kernels.layer.norm import add_norm, add_norm_backward
from pallas_kernels.layer.swiglu import swiglu, swiglu_backward
from pallas_kernels.layer.swiglu_cotangents import swiglu_cotangents
from pallas_kernels.layer.swiglu_product import swiglu_product
from pallas_kernels.layer.weight_gradient import weight_gradient
from pallas_kernels.work.residuals import Transition
from pallas_kernels.work.slots import PoolStates, Slots
from pallas_kernels.work.tables import Items, ItemTables, Split, VisitTables


def _shape(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def inverse_case(K=128, group=2, packed=False, normalize=False, dtype=jnp.bfloat16, T=2**16):
    """A function and its argument shapes: gated_inverse. With few tokens a key head's output heads are split."""
    first = _shape(T, dtype=jnp.int32) if packed else None
    function = functools.partial(gated_inverse, normalize=normalize)
    return function, (_shape(1, T, 2, K, dtype=dtype), *[_shape(1, 2 * group, T)] * 2, first)


def _items(packed: str | None, segments: bool = False) -> Items:
    """Items of 1024 tokens: one row, or three packed sequences as "sequences" or in "segments"."""
    i32: Any = functools.partial(_shape, dtype=jnp.int32)
    if packed == "segments":
        return Items(Split(12, 4), ItemTables(i32(4), i32(12), i32(5)))
    if packed == "sequences":
        return Items(Split(4, None), ItemTables(i32(4), None, None))
    return Items(Split(4, 4) if segments else Split(1, None), None)


def outputs_case(
    K=128, V=128, warpgroups=2, h_0=True, packed=None, normalize=False, dtype: Any = jnp.bfloat16, **options
):
    """A function and its argument shapes: outputs. packed: None, "sequences" or "segments"."""
    Hk, HO, T = 2, 4, 1024
    (split, tables), x = _items(packed), functools.partial(_shape, dtype=dtype)
    config = outputs.default_config(K, warpgroups)
    state = (K, V) if options.get("h_0_kv_layout", False) else (V, K)

    def run(tables, rstd, *arguments, states=None):
        static: Any = dict(items=Items(split, tables), scale=0.1, config=config, **options)
        return outputs.outputs(*arguments, rstd=rstd, states=states, **static)

    return run, (
        tables,
        (_shape(1, Hk, T),) * 2 if normalize else None,
        x(1, T, Hk, K),
        x(1, T, Hk, K),
        x(1, T, HO, V),
        *[_shape(1, HO, T)] * 2,
        x(1, HO, T, 64),
        _shape(split.num_items, HO, *state) if h_0 else None,
    )


def _pool_states(N, HO, K, V, dtype, kv_layout) -> PoolStates:
    """Shapes of a pool of eight states and of slots for N sequences, of which some may start from zeros."""
    slots: Any = _shape(N, dtype=jnp.int32)
    pool: Any = _shape(8, HO, *((K, V) if kv_layout else (V, K)), dtype=dtype)
    return PoolStates(Slots(8, None, 1), pool, slots, None, slots, None)


def pool_case(K=128, V=128, warpgroups=2, pool_dtype: Any = jnp.float32, kv_layout=True, segments=False):
    """A function and its argument shapes: outputs of packed rows, whose states are in a pool."""
    run, (tables, rstd, *arguments) = outputs_case(
        K, V, warpgroups, segments, "segments" if segments else "sequences", True, kv_layout=kv_layout
    )
    states = _pool_states(3, 4, K, V, pool_dtype, kv_layout)

    def run_on_pool(tables, rstd, states, *arguments):
        return run(tables, rstd, *arguments, states=states)

    return run_on_pool, (tables, rstd, states, *arguments)


def transitions_case(K=128, V=128, warpgroups=2, packed=None, normalize=False):
    """A function and its argument shapes: segment_transitions."""
    Hk, HO, T = 2, 4, 1024
    (split, tables), x = _items(packed, segments=True), functools.partial(_shape, dtype=jnp.bfloat16)
    config = transitions.default_config(K, warpgroups)

    def run(tables, k_rstd, *arguments):
        items = Items(split, tables)
        return transitions.segment_transitions(*arguments, items=items, k_rstd=k_rstd, config=config)

    tokens = (x(1, T, Hk, K), x(1, T, HO, V), *[_shape(1, HO, T)] * 2, x(1, HO, T, 64))
    return run, (tables, _shape(1, Hk, T) if normalize else None, *tokens)


def segment_case(K=128, V=128, backwards=False, pool_dtype: Any = None, kv_layout=False):
    """A function and its argument shapes: segment_states, from states in a pool where that has a dtype."""
    options = dict(num_sequences=2, backwards=backwards, kv_layout=kv_layout)
    n = _shape(8, 4, V, K)
    m_t: Any = (_shape(8, 4, K), _shape(8, 4, K, K, dtype=jnp.bfloat16))
    h_0 = _shape(2, 4, V, K) if pool_dtype is None else _pool_states(2, 4, K, V, pool_dtype, kv_layout)
    return functools.partial(segment_states, **options), (n, Transition(*m_t), h_0, None)


def _visits(packed: bool) -> tuple[int, VisitTables | None]:
    """Visits of 1024 tokens, and the tables of three packed sequences."""
    i32: Any = functools.partial(_shape, dtype=jnp.int32)
    return (19, VisitTables(i32(4), i32(5), i32(19), i32(19))) if packed else (16, None)


def chains_case(
    K=128,
    V=128,
    warpgroups=1,
    packed=False,
    segments=False,
    both=True,
    dtype: Any = jnp.bfloat16,
    states=True,
    **options,
):
    """A function and its argument shapes: chains, or segment_adjoints (not both)."""
    Hk, HO, T = 2, 4, 1024
    x: Any = functools.partial(_shape, dtype=dtype)
    split, tables = _items("segments" if packed else None, segments=True) if segments else (None, None)
    config = Config.default(K, warpgroups)

    def run(item_tables, *arguments):
        items = None if split is None else Items(split, item_tables)
        function: Any = chains if both else segment_adjoints
        return function(*arguments, scale=0.1, items=items, config=config, **options)

    count = split.num_items if split is not None and both else 3 if packed else 1
    state = _shape(count, HO, V, K) if states else None
    q, v, t = x(1, T, Hk, K), x(1, T, HO, V), x(1, HO, T, 64)
    visits, gates = _visits(packed)[1], _shape(1, HO, T)
    if both:
        return run, (tables, q, q, v, v, gates, gates, t, state, state, visits)
    return run, (tables, q, q, v, gates, gates, t, state, visits)


def gradients_case(K=128, V=128, group=2, packed=False, dtype: Any = jnp.bfloat16):
    """A function and its argument shapes: gradients."""
    Hk, HO, T = 2, 2 * group, 1024
    x: Any = functools.partial(_shape, dtype=dtype)
    visits, tables = _visits(packed)
    of_float16 = [_shape(1, HO, T), _shape(visits, HO)] if dtype == jnp.float16 else [None, None]
    q, v, u, state = x(1, T, Hk, K), x(1, T, HO, V), x(visits, HO, 64, V), x(visits, HO, V, K)

    def run(power, lift, *arguments):
        return gradients(*arguments, power=power, lift=lift, scale=0.1)

    return run, (*of_float16, q, q, v, u, v, state, state, _shape(1, HO, T), tables)


def short_conv_case(segments=False, backwards=False, others=0):
    """A function and its argument shapes: short_conv, or short_conv_backward, with others behind the heads."""
    x, heads = functools.partial(_shape, dtype=jnp.bfloat16), 4
    fresh = _shape(1, 512, dtype=jnp.int32) if segments else None
    channels = x(1, 512, (3 * heads + others) * 128)
    arguments = (channels, _shape(3 * heads * 128, 4), fresh)
    if backwards:
        key, value = x(1, 512, heads, 128), x(1, 512, heads * 128)
        dothers = (channels,) if others else ()
        return short_conv.short_conv_backward, (*arguments, key, key, value, *dothers)
    return functools.partial(short_conv.short_conv, heads=heads, width=128), arguments


def gates_case(packed=False, ordered=False):
    """A function and its argument shapes: chunk_gates."""
    g, cu_seqlens = _shape(1, 256, 16), _shape(4, dtype=jnp.int32) if packed else None
    return functools.partial(chunk_gates, ordered=ordered), (g, g, cu_seqlens)


def norm_case(width=1024, backwards=False, weighted=True):
    """A function and its argument shapes: add_norm, or add_norm_backward."""
    x, y, weight = (
        _shape(64, width),
        _shape(64, width, dtype=jnp.bfloat16),
        _shape(width) if weighted else None,
    )
    if backwards:
        dtypes = dict(x_dtype=jnp.float32, y_dtype=jnp.bfloat16)
        if not weighted:
            call = functools.partial(add_norm_backward, eps=1e-5, **dtypes)
            return lambda n, ds, dn, factors: call(n, None, ds, dn, factors=factors), (y, x, y, _shape(64))
        return functools.partial(add_norm_backward, eps=1e-5, **dtypes), (y, weight, x, y)
    return functools.partial(add_norm, eps=1e-5, dtype=jnp.bfloat16, keep=True), (x, y, weight)


def gated_norm_case(width=128, backwards=False, others=0):
    """A function and its argument shapes: gated_norm, or gated_norm_backward, with heads before the gates'."""
    o, weight = _shape(2048, width, dtype=jnp.bfloat16), _shape(width)
    z = _shape(256, 8 + others, width, dtype=jnp.bfloat16) if others else o
    if backwards:
        return functools.partial(gated_norm_backward, eps=1e-5), (o, z, weight, o)
    return functools.partial(gated_norm, eps=1e-5), (o, z, weight)


def swiglu_case(backwards=False):
    """A function and its argument shapes: swiglu, or swiglu_backward."""
    a = _shape(2**16, dtype=jnp.bfloat16)
    ab = jax.ShapeDtypeStruct((2 * a.size,), a.dtype)
    return (swiglu_backward, (ab, a)) if backwards else (swiglu, (ab,))


def swiglu_product_case(backwards=False):
    """A function and its argument shapes: swiglu_product, or swiglu_cotangents."""
    M, D, F, dtype = 4096, 1024, 2752, jnp.bfloat16
    if not backwards:
        return swiglu_product, (_shape(M, D, dtype=dtype), _shape(D, 2 * F, dtype=dtype))
    return swiglu_cotangents, tuple(_shape(*shape, dtype=dtype) for shape in ((M, D), (F, D), (M, 2 * F)))


def weight_gradient_case():
    """A function and its argument shapes: weight_gradient."""
    x, dy = _shape(2**16, 1024, dtype=jnp.bfloat16), _shape(2**16, 5504, dtype=jnp.bfloat16)
    return functools.partial(weight_gradient, parts=3), (x, dy)


def cross_entropy_case():
    """A function and its argument shapes: cross_entropy."""
    x, weight = _shape(8192, 1024, dtype=jnp.bfloat16), _shape(32768, 1024, dtype=jnp.bfloat16)
    return cross_entropy, (x, weight, _shape(8192, dtype=jnp.int32))


def logit_cotangents_case():
    """A function and its argument shapes: logit_cotangents."""
    T, V = 8192, 32768
    per_row = _shape(T)
    u, f = _shape(T, V, dtype=jnp.bfloat16), _shape(V // 256, T)
    return logit_cotangents, (u, f, _shape(T, dtype=jnp.int32), per_row)


def embedding_case():
    """A function and its argument shapes: embedding_gradient."""
    return embedding_gradient, (_shape(64, 1024), _shape(64, dtype=jnp.int32), _shape(33, dtype=jnp.int32))


def step_case(
    T=1,
    K=128,
    V=128,
    kv_layout=True,
    pool_dtype: Any = jnp.float32,
    dtype: Any = jnp.bfloat16,
    uneven=False,
    tree=False,
):
    """A function and its argument shapes: step, with the pool in place."""
    # With one token, as many requests as have tiles that are brought into the L2 cache.
    N, Hk, HV, i32 = 128 if T == 1 else 4, 2, 4, functools.partial(_shape, dtype=jnp.int32)
    x: Any = functools.partial(_shape, dtype=dtype)
    pool = _shape(8, HV, *((K, V) if kv_layout else (V, K)), dtype=pool_dtype)
    gates, heads = x(N, T, HV), _shape(HV)

    def run(q, k, v, a, b, pool, A_log, dt_bias, read_slots, write_slots, num_tokens, parents):
        slots = dict(read_slots=read_slots, write_slots=write_slots, num_tokens=num_tokens, parents=parents)
        static: Any = dict(scale=0.1, kv_layout=kv_layout)
        return step(q, k, v, a, b, pool, A_log=A_log, dt_bias=dt_bias, **slots, **static)

    vectors = (x(N, T, Hk, K), x(N, T, Hk, K), x(N, T, HV, V))
    spans = (i32(N), i32(N, T), i32(N) if uneven else None, i32(N, T) if tree else None)
    return run, (*vectors, gates, gates, pool, heads, heads, *spans)


def joined_step_case(pool_dtype: Any = jnp.float32):
    """A function and its argument shapes: step_of_channels, one token whose row is its slot."""
    (B, H, K), x = (256, 2, 128), functools.partial(_shape, dtype=jnp.bfloat16)
    pool, heads = _shape(B, H, K, K, dtype=pool_dtype), _shape(H)

    def run(qkv, products, pool, A_log, dt_bias):
        first = Channels(0, H * K, 2 * H * K, 3 * H * K, 3 * H * K + H)
        static: Any = dict(heads=(H, H, H), first=first, scale=0.1, read_slots=None, write_slots=None)
        gates = dict(A_log=A_log, dt_bias=dt_bias)
        return step_of_channels(qkv, qkv, qkv, products, products, pool, **gates, **static)

    return run, (x(B, 1, 3 * H * K), x(B, 1, (4 * H + 1) * K), pool, heads, heads)


def conv_update_case(D=1024, W=4, others=0, bias=False, pool_dtype: Any = jnp.bfloat16, in_slots=True):
    """A function and its argument shapes: conv_update, with the pool in place and others behind the channels."""
    x, pool = _shape(4, D + others, dtype=jnp.bfloat16), _shape(8, D, W - 1, dtype=pool_dtype)
    slots = _shape(4, dtype=jnp.int32) if in_slots else None

    def run(x, pool, weight, bias, read_slots, write_slots):
        return conv_update(x, pool, weight, bias, read_slots=read_slots, write_slots=write_slots)

    return run, (x, pool, _shape(D, W), _shape(D) if bias else None, slots, slots)


def _ring(kv_layout=True, pool_dtype: Any = jnp.float32):
    """Shapes of states, rings and cursors."""
    slots, Hk, HV, K, V, L = 8, 2, 4, 128, 128, 16
    state = _shape(slots, HV, *((K, V) if kv_layout else (V, K)), dtype=pool_dtype)
    rings = (_shape(slots, Hk, L, K, dtype=jnp.bfloat16), _shape(slots, HV, L, V, dtype=jnp.bfloat16))
    return state, *rings, _shape(slots, HV, L), _shape(slots, HV, 2, dtype=jnp.int32)


def ring_case(T=1, **options):
    """A function and its argument shapes: ring_step, with the pool in place."""
    arguments = step_case(T)[1]
    of_requests = arguments[8]

    def run(tokens, ring, A_log, dt_bias, read_slots, accepted):
        static: Any = dict(scale=0.1, kv_layout=options.get("kv_layout", True))
        call: Any = {"drafts": None} if T == 1 else {"drafts": Drafts(T), "accepted": accepted}
        rest = dict(A_log=A_log, dt_bias=dt_bias, read_slots=read_slots)
        return ring_step(*tokens, *ring, **rest, **call, **static)

    return run, (arguments[:5], _ring(**options), *arguments[6:8], of_requests, of_requests)


def ring_drafts_case(T=4):
    """A function and its argument shapes: ring_drafts, with the pool in place."""
    arguments = step_case(T)[1]
    of_requests = arguments[8]

    def run(tokens, ring, A_log, dt_bias, read_slots, accepted):
        rest = dict(A_log=A_log, dt_bias=dt_bias, read_slots=read_slots, accepted=accepted)
        return ring_drafts(*tokens, *ring, **rest, scale=0.1)

    return run, (arguments[:5], _ring(pool_dtype=jnp.bfloat16), *arguments[6:8], of_requests, of_requests)


CASES = {
    "decode": step_case,
    "decode, bfloat16": functools.partial(step_case, pool_dtype=jnp.bfloat16),
    "decode, vk": functools.partial(step_case, kv_layout=False),
    "decode, vk, bfloat16": functools.partial(step_case, kv_layout=False, pool_dtype=jnp.bfloat16),
    "decode, K 256": functools.partial(step_case, K=256),
    "decode, K 256, bfloat16": functools.partial(step_case, K=256, V=256, pool_dtype=jnp.bfloat16),
    "decode, K 32, bfloat16": functools.partial(step_case, K=32, V=32, pool_dtype=jnp.bfloat16),
    "decode, joined": joined_step_case,
    "decode, joined, bfloat16": functools.partial(joined_step_case, pool_dtype=jnp.bfloat16),
    "verify, 4 tokens": functools.partial(step_case, T=4),
    "verify, 4 tokens, bfloat16": functools.partial(step_case, T=4, pool_dtype=jnp.bfloat16),
    "verify, 4 tokens, vk, uneven": functools.partial(step_case, T=4, kv_layout=False, uneven=True),
    "verify, tree": functools.partial(step_case, T=8, tree=True),
    "verify, tree, bfloat16": functools.partial(step_case, T=8, tree=True, pool_dtype=jnp.bfloat16),
    "verify, tree, vk": functools.partial(step_case, T=8, tree=True, kv_layout=False),
    "verify, tree, vk, bfloat16": functools.partial(
        step_case, T=8, tree=True, kv_layout=False, pool_dtype=jnp.bfloat16
    ),
    "verify, tree, K 256": functools.partial(step_case, T=8, tree=True, K=256, V=256),
    "decode deferred": ring_case,
    "decode deferred, bfloat16": functools.partial(ring_case, pool_dtype=jnp.bfloat16),
    "decode deferred, vk": functools.partial(ring_case, kv_layout=False),
    "decode deferred, vk, bfloat16": functools.partial(ring_case, kv_layout=False, pool_dtype=jnp.bfloat16),
    "verify on a ring, 4 tokens": functools.partial(ring_case, T=4),
    "verify on a ring, 4 tokens, vk": functools.partial(ring_case, T=4, kv_layout=False),
    "verify on a ring, tensor cores, 2 tokens": functools.partial(ring_drafts_case, T=2),
    "verify on a ring, tensor cores, 4 tokens": ring_drafts_case,
    "verify on a ring, tensor cores, 8 tokens": functools.partial(ring_drafts_case, T=8),
    "verify on a ring, tensor cores, 16 tokens": functools.partial(ring_drafts_case, T=16),
    "convolution of a token": conv_update_case,
    "convolution of a token, joined": functools.partial(conv_update_case, others=144, in_slots=False),
    "convolution of a token, float32": functools.partial(
        conv_update_case, D=1000, W=3, bias=True, pool_dtype=jnp.float32
    ),
    "short convolution": short_conv_case,
    "short convolution, segments": functools.partial(short_conv_case, segments=True),
    "short convolution, backwards": functools.partial(short_conv_case, backwards=True),
    "short convolution, backwards, segments": functools.partial(
        short_conv_case, segments=True, backwards=True
    ),
    "short convolution, joined": functools.partial(short_conv_case, others=5),
    "short convolution, backwards, joined": functools.partial(short_conv_case, backwards=True, others=5),
    "norm": norm_case,
    "norm, 4096": functools.partial(norm_case, width=4096),
    "norm, backwards": functools.partial(norm_case, backwards=True),
    "norm, backwards, 2048": functools.partial(norm_case, width=2048, backwards=True),
    "norm, backwards, 5120": functools.partial(norm_case, width=5120, backwards=True),
    "norm, without a weight": functools.partial(norm_case, weighted=False),
    "norm, without a weight, backwards": functools.partial(norm_case, backwards=True, weighted=False),
    "gated norm": gated_norm_case,
    "gated norm, backwards": functools.partial(gated_norm_case, backwards=True),
    "gated norm, joined": functools.partial(gated_norm_case, others=25),
    "gated norm, backwards, joined": functools.partial(gated_norm_case, backwards=True, others=25),
    "swiglu": swiglu_case,
    "swiglu, backwards": functools.partial(swiglu_case, backwards=True),
    "swiglu in its product": swiglu_product_case,
    "swiglu in its product, backwards": functools.partial(swiglu_product_case, backwards=True),
    "gradient of weights": weight_gradient_case,
    "embedding": embedding_case,
    "cross entropy": cross_entropy_case,
    "cotangents of logits": logit_cotangents_case,
    "gates": gates_case,
    "gates packed": functools.partial(gates_case, packed=True),
    "gates packed, ordered": functools.partial(gates_case, packed=True, ordered=True),
    "inverse": inverse_case,
    "inverse, 1 head": functools.partial(inverse_case, group=1),
    "inverse, packed": functools.partial(inverse_case, packed=True),
    "inverse, K 192, 32 heads": functools.partial(inverse_case, K=192, group=32),
    "inverse, K 256": functools.partial(inverse_case, K=256),
    "inverse, few tokens": functools.partial(inverse_case, T=256, packed=True),
    "full head": outputs_case,
    "full head, kv": functools.partial(outputs_case, kv_layout=True, h_0_kv_layout=True),
    "full head, normalised": functools.partial(outputs_case, normalize=True),
    "half, normalised": functools.partial(outputs_case, warpgroups=1, normalize=True),
    "inverse, normalised": functools.partial(inverse_case, normalize=True),
    "full head, packed": functools.partial(outputs_case, packed="sequences"),
    "full head, packed segments": functools.partial(outputs_case, packed="segments"),
    "half": functools.partial(outputs_case, warpgroups=1),
    "half, packed": functools.partial(outputs_case, warpgroups=1, packed="sequences"),
    "transition": transitions_case,
    "transition, half": functools.partial(transitions_case, warpgroups=1),
    "transition, packed": functools.partial(transitions_case, packed="segments"),
    "K 64": functools.partial(outputs_case, K=64),
    "K 192": functools.partial(outputs_case, K=192, warpgroups=1),
    "K 256": functools.partial(outputs_case, K=256, warpgroups=1),
    "K 256, transition": functools.partial(transitions_case, K=256, warpgroups=1),
    "segment states": segment_case,
    "segment states, K 256": functools.partial(segment_case, K=256),
    "segment states, backwards": functools.partial(segment_case, backwards=True),
    "full head, pool": pool_case,
    "full head, pool, bfloat16": functools.partial(pool_case, pool_dtype=jnp.bfloat16),
    "full head, pool, bfloat16, vk": functools.partial(pool_case, pool_dtype=jnp.bfloat16, kv_layout=False),
    "full head, pool, vk": functools.partial(pool_case, kv_layout=False),
    "full head, pool, segments": functools.partial(pool_case, segments=True, pool_dtype=jnp.bfloat16),
    "half, pool": functools.partial(pool_case, warpgroups=1),
    "half, pool, bfloat16": functools.partial(pool_case, warpgroups=1, pool_dtype=jnp.bfloat16),
    "K 256, pool, bfloat16": functools.partial(pool_case, K=256, warpgroups=1, pool_dtype=jnp.bfloat16),
    "segment states, pool": functools.partial(segment_case, pool_dtype=jnp.float32, kv_layout=True),
    "segment states, pool, bfloat16": functools.partial(
        segment_case, pool_dtype=jnp.bfloat16, kv_layout=True
    ),
    "segment states, pool, vk": functools.partial(segment_case, pool_dtype=jnp.bfloat16),
    "chains": chains_case,
    "chains, packed": functools.partial(chains_case, packed=True),
    "chains, full head": functools.partial(chains_case, warpgroups=2),
    "chains, K 64": functools.partial(chains_case, K=64, V=64),
    "chains, segments": functools.partial(chains_case, segments=True),
    "chains, packed segments": functools.partial(chains_case, segments=True, packed=True),
    "segment adjoints": functools.partial(chains_case, segments=True, both=False),
    "segment adjoints, full head": functools.partial(chains_case, segments=True, both=False, warpgroups=2),
    "chains, full head, packed": functools.partial(chains_case, warpgroups=2, packed=True),
    "segment adjoints, packed": functools.partial(chains_case, segments=True, packed=True, both=False),
    "chains, K 256": functools.partial(chains_case, K=256),
    "chains, float16": functools.partial(chains_case, dtype=jnp.float16),
    "chains, float16 packed": functools.partial(chains_case, packed=True, dtype=jnp.float16),
    "segment adjoints, float16": functools.partial(chains_case, segments=True, both=False, dtype=jnp.float16),
    "gradients": gradients_case,
    "gradients, 1 head": functools.partial(gradients_case, group=1),
    "gradients, packed": functools.partial(gradients_case, packed=True),
    "gradients, K 64": functools.partial(gradients_case, K=64, V=64),
    "gradients, K 256": functools.partial(gradients_case, K=256),
    "gradients, V 256": functools.partial(gradients_case, V=256),
    "gradients, float16": functools.partial(gradients_case, dtype=jnp.float16),
    "gradients, float16 packed": functools.partial(gradients_case, packed=True, dtype=jnp.float16),
    "inverse, float16": functools.partial(inverse_case, dtype=jnp.float16),
    "inverse, normalised, packed": functools.partial(inverse_case, normalize=True, packed=True),
    "full head, float16": functools.partial(outputs_case, dtype=jnp.float16),
    "full head, no state": functools.partial(outputs_case, h_0=False),
    "full head, normalised, packed": functools.partial(outputs_case, normalize=True, packed="sequences"),
    "K 256, packed": functools.partial(outputs_case, K=256, warpgroups=1, packed="sequences"),
    "transition, normalised, packed": functools.partial(transitions_case, normalize=True, packed="segments"),
    "chains, kv, no states": functools.partial(chains_case, states=False, kv_layout=True),
    "chains, K 256, packed": functools.partial(chains_case, K=256, packed=True),
    "gradients, K 256, packed": functools.partial(gradients_case, K=256, packed=True),
}
"""Name -> a function without arguments that returns (function, argument shapes)."""
