"""Helpers of the tests of the kernels around the rule: a convolution, and a layer as one operation, with results."""

import collections
import functools

import fused_oracle
import jax
import jax.numpy as jnp
import numpy as np
from device_arrays import put
from flax import nnx
from fused_harness import draws
from fused_oracle import wide
from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn_jax.layers import GatedDeltaNet
from gdn_jax.parts import mixer, norms
from gdn_jax.parts.short_conv import KeyHeads
from gdn_jax.parts.short_conv import short_conv as fused_short_conv
from pallas_kernels.device import launch
from pallas_kernels.layer import (
    channel_gates,
    cross_entropy,
    eight_bits,
    embedding,
    expert_gradient,
    expert_product,
    gated_norm,
    gated_norm_eight_bits,
    logit_cotangents,
    norm,
    norm_eight_bits,
    short_conv,
    swiglu,
    swiglu_cotangents,
    swiglu_eight_bits,
    swiglu_product,
    weight_gradient,
)
from pallas_kernels.rows import (
    attention_rows,
    cached_heads,
    delta_layer,
    dense_stream,
    expert_swiglu,
    expert_tiles,
    few_product,
    latent_row,
    parts_norm,
    routed_stream,
    routing,
    row_product,
)

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)

KERNELS = (
    (norm, "add_norm"),
    (gated_norm, "gated_norm"),
    (channel_gates, "channel_gates"),
    (swiglu, "swiglu"),
    (swiglu_product, "swiglu_product"),
    (swiglu_cotangents, "swiglu_cotangents"),
    (expert_product, "expert_product"),
    (expert_gradient, "expert_gradient"),
    (expert_tiles, "expert_tiles"),
    (expert_swiglu, "expert_swiglu"),
    (routed_stream, "routed_stream"),
    (dense_stream, "dense_stream"),
    (routing, "choose"),
    (latent_row, "latent_row"),
    (attention_rows, "attention_rows"),
    (attention_rows, "attention_parts"),
    (cached_heads, "cached_heads"),
    (parts_norm, "parts_norm"),
    (few_product, "few_product"),
    (row_product, "stream_product"),
    (row_product, "heads_product"),
    (row_product, "attended_product"),
    (delta_layer, "delta_layer"),
    (weight_gradient, "weight_gradient"),
    (short_conv, "short_conv"),
    (embedding, "embedding_gradient"),
    (cross_entropy, "cross_entropy"),
    (logit_cotangents, "logit_cotangents"),
    (eight_bits, "eight_bits"),
    (swiglu_eight_bits, "swiglu"),
    (norm_eight_bits, "add_norm_eight_bits"),
    (gated_norm_eight_bits, "gated_norm_eight_bits"),
)
"""Every file of a kernel, and the name of its function; that of its derivative ends in `_backward`."""


def interpret(monkeypatch) -> collections.Counter:
    """`gdn_jax.parts` takes the kernels, interpreted, as on a GPU. Returns the counts of their calls by name."""
    calls = collections.Counter()
    monkeypatch.setattr(launch, "device_reason", lambda *_: None)

    def counted(kernel, function, *arguments, **options):
        calls[kernel] += 1
        return function(*arguments, interpret=INTERPRET, **options)

    for module, name in KERNELS:
        for kernel in (name, f"{name}_backward"):
            if hasattr(module, kernel):
                function = functools.partial(counted, kernel, getattr(module, kernel))
                monkeypatch.setattr(module, kernel, function)
    return calls


def leave_last_arrivals(monkeypatch) -> None:
    """A warpgroup that waits on a barrier need not wait for its last arrivals where the kernel ends after them.

    A GPU does not ask for it, nor does Pallas' interpreter from JAX 0.12 on: there a warpgroup must have seen all
    arrivals before it allocates another barrier, which these kernels do not. The interpreter of JAX 0.11 wants every
    arrival seen at the end too. It still checks that no arrival of a barrier is missing then.
    """
    from jax._src.pallas.mosaic_gpu.interpret import shared_memory

    if hasattr(shared_memory, "BarrierReallocationChecker"):
        return
    deallocate = shared_memory.Barrier.deallocate

    def without_what_was_seen(barrier):
        with barrier.cv:
            if barrier.ref_count == 1:
                barrier.last_observed_phase_by_thread.clear()
            deallocate(barrier)

    monkeypatch.setattr(shared_memory.Barrier, "deallocate", without_what_was_seen)


def interpret_tokens(monkeypatch, *kernels) -> list[str]:
    """Kernels of a token, functions of modules, are interpreted; which of them were called."""
    calls = []
    # Inside a compiled function the interpreter hangs, and a later test would find the interpreted kernel there.
    monkeypatch.setattr(launch, "compiled", lambda run, *_, **__: run)

    def told(name, kernel, *args, **options):
        calls.append(name)
        return kernel(*args, **options | {"interpret": INTERPRET})

    for module, name in kernels:
        monkeypatch.setattr(module, name, functools.partial(told, name, getattr(module, name)))
    return calls


@functools.cache
def joining_layer(implementation=None, **options):
    """A small layer that can have all products of its input in one array: its gated norm takes four heads at once."""
    sizes = dict(num_heads=4, head_dim=256, expand_v=1.0, dtype=jnp.bfloat16)
    return GatedDeltaNet(32, **sizes | options, implementation=implementation, rngs=nnx.Rngs(0))


def plain_kernels(monkeypatch):
    """The plain forms of the convolution and of the gated norm in the place of their kernels, so that a CPU compiles
    all of `parts.mixer`. Where the kernels leave memory as it is, there is NaN."""

    def filtered(how, x, weight, fresh):
        segments = None if fresh is None else jnp.cumsum(fresh, axis=1)
        options = dict(segment_ids=segments, implementation="chunked")
        return fused_short_conv(x[..., : len(weight)], weight, **how._asdict(), **options)[:3]

    def filtered_gradients(how, saved, cotangents, others):
        x, weight, fresh = saved
        dnext, dothers = others
        _, back = jax.vjp(lambda x, weight: filtered(how, x, weight, fresh), x, weight)
        dx, dweight = back(cotangents)
        D, n = len(weight), dnext.shape[-1]
        return jnp.concatenate([dx[..., :D], dnext, dothers[..., D + n :]], -1), dweight

    def gated(options, o, heads, weight, projection):
        gate = heads[..., -o.shape[-2] :, :]
        return norms.gated_norm(o, gate, weight, projection, **options._asdict(), implementation="chunked")

    def gated_gradients(options, saved, dy):
        do, dheads, *others = jax.vjp(functools.partial(gated, options), *saved)[1](dy)
        return do, dheads.at[..., : -do.shape[-2], :].set(jnp.nan), *others

    plain = filtered, filtered_gradients, gated, gated_gradients
    names = "filtered", "filtered_gradients", "gated_norm_kernel", "gated_norm_gradients"
    for name, function in zip(names, plain, strict=True):
        monkeypatch.setattr(mixer, name, function)


def convolution(dtype, *, B, T, HV, heads=4, width=32, borders=None, normalize=True):
    """Arrays and options of a convolution, and what float64 makes of them.

    Returns (x, weight, segment_ids), cotangents, options of the operation, and the expected results.
    """
    draw, D = draws(T), (2 * heads + HV) * width
    segments = None
    if borders is not None:
        segments = np.cumsum(np.isin(np.arange(T), borders))[None].repeat(B, 0).astype(np.int32)
    x, weight = draw(B, T, D, dtype=dtype), draw(D, short_conv.WIDTH, scale=0.5)
    cotangents = tuple(draw(B, T, *shape, dtype=dtype) for shape in 2 * [(heads, width)] + [(HV * width,)])
    pieces = fused_oracle.whole_rows(B, T) if segments is None else fused_oracle.pieces_of_ids(segments)
    options = dict(heads=heads, width=width, normalize=normalize)
    zeros = np.zeros((B, D, short_conv.WIDTH - 1))
    expected = fused_oracle.short_conv(x, weight, cotangents=(*cotangents, zeros), pieces=pieces, **options)
    return (x, weight, None if segments is None else put(segments)), cotangents, options, expected


def check_one_operation(evaluate, close, *, B, T, heads, width, borders=None):
    """Compares `parts.mixer` with float64. Its inside is shown by a rule that returns v as outputs, and its other
    arguments as the state.

    Args:
      evaluate: from a function, cotangents and primals to the results and the gradients.
      close: as in `fused_harness`.
      B, T: rows and tokens.
      heads, width: of q, of k, and of v.
      borders: first tokens of segments.
    """
    sizes = dict(B=B, T=T, HV=heads, borders=borders, heads=heads, width=width)
    (x, weight, segments), (dq, dk, _), options, _ = convolution("bfloat16", **sizes)
    draw, kind = draws(3), dict(dtype="bfloat16")
    between, gate = draw(B, T, width, **kind), draw(B, T, heads, width, **kind)
    dy, dbeta = draw(B, T, heads * width, **kind), draw(B, T, heads)
    parameters = draw(heads), draw(heads), draw(heads), draw(width), jnp.eye(heads * width, **kind)

    def rule(q, k, v, g, beta, *, segment_ids):
        return v, (q, k, v, beta)

    layer = mixer.Mixer(KeyHeads(heads, width), heads, width, 1e-5, False, jnp.bfloat16, rule)
    channels = jnp.concatenate([x, between, gate.reshape(B, T, -1)], axis=-1)

    def run(channels, weight, *parameters):
        return mixer._mix(layer, channels, weight, *parameters, segments, None)

    cotangents = dy, (dq, dk, jnp.zeros((B, T, heads, width), **kind), dbeta)
    (y, (q, k, v, beta)), gradients = evaluate(run, cotangents, channels, weight, *parameters)
    norm, dy = parameters[3], dy.reshape(gate.shape)
    close(fused_oracle.gated_norm(v, gate, norm), y.reshape(gate.shape), "y")
    do, dgate, dnorm = fused_oracle.gated_norm_gradients(v, gate, norm, dy)
    zeros = jnp.zeros((B, x.shape[-1], short_conv.WIDTH - 1))
    cotangents = dq, dk, do.reshape(B, T, -1), zeros
    pieces = fused_oracle.whole_rows(B, T) if segments is None else fused_oracle.pieces_of_ids(segments)
    expected = fused_oracle.short_conv(x, weight, cotangents=cotangents, pieces=pieces, **options)
    for name, got in zip("qkv", (q, k, v.reshape(B, T, -1)), strict=True):
        close(getattr(expected, name), got, name)
    strength = fused_oracle.sigmoid(
        fused_oracle.wide(between[..., heads : 2 * heads] + parameters[2].astype("bfloat16"))
    )
    close(strength, beta, "beta")
    dx, dbetween, got_dgate = np.split(gradients[0], (x.shape[-1], x.shape[-1] + width), axis=-1)
    close(expected.dx, dx, "dx", 2)  # the cotangent of v is rounded too
    close(expected.dweight, gradients[1], "dweight", dtype="bfloat16")
    close(dbeta * strength * (1 - strength), dbetween[..., heads : 2 * heads], "db")
    np.testing.assert_array_equal(dbetween[..., :heads], 0)
    np.testing.assert_array_equal(dbetween[..., 2 * heads :], 0)
    close(dgate, got_dgate.reshape(gate.shape), "dgate")
    close(dnorm, gradients[5], "dnorm")


def dense_gradients(rows, weights, chosen, gate_up, down, dy):
    """Gradients of a mixture of experts that are all multiplied by all rows, in float64: of the rows, the weights of
    the choices, and both projections."""

    def dense(rows, weights, gate_up, down):
        a, b = jnp.split(jnp.einsum("nd,edf->nef", rows, gate_up), 2, axis=-1)
        y = jnp.einsum("nef,efd->ned", jax.nn.silu(a) * b, down)
        return jnp.einsum("nk,nkd->nd", weights, jnp.take_along_axis(y, chosen[..., None], axis=1))

    with jax.enable_x64(True):
        *args, dy = (jnp.asarray(wide(x)) for x in (rows, weights, gate_up, down, dy))
        return [np.asarray(x) for x in jax.vjp(dense, *args)[1](dy)]
