"""Transformations of JAX: vmap, forward mode, second order, checkpoint, shard_map, ahead of time, all under jit.

Derivatives are compared in float64, where a wrong term can't hide in rounding.
"""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from tolerances import FINITE_DIFFERENCES, GRADIENTS, assert_close, differences, head_axis, tolerance

import gdn_jax
from gdn_jax.checks import cases, oracle
from gdn_jax.checks.check import value_and_gradients
from gdn_jax.rule import chunked
from gdn_jax.rule.chunks.recurrence import INVERSE_NAME, STATES_NAME
from gdn_jax.rule.chunks.rows import RESIDUAL_NAMES

SMALL = {
    "plain": cases.Case("transform", T=20, B=2, heads=(1, 1, 2), K=6, V=5, chunk_size=16),
    "packed-reset-l2norm": cases.Case(
        "transform-packed",
        T=40,
        B=1,
        K=6,
        V=5,
        lengths=(3, 0, 30),
        g="some -inf",
        use_qk_l2norm=True,
        keys="any",
        chunk_size=16,
    ),
    "segments": cases.Case(
        "transform-segments",
        T=20,
        B=2,
        heads=(1, 1, 2),
        K=6,
        V=5,
        segments=((1, 4, 15), (20,)),
        chunk_size=16,
    ),
    "channels": cases.Case(
        "transform-channels",
        T=20,
        B=2,
        K=6,
        V=5,
        channel_g="mixed",
        erase="channel",
        write="head",
        chunk_size=16,
    ),
}
both = pytest.mark.parametrize("implementation", harness.IMPLEMENTATIONS)


def rule(implementation, case, x, *primals):
    options = dict(
        case.options, implementation=implementation, cu_seqlens=x.cu_seqlens, segment_ids=x.segment_ids
    )
    options = {name: jnp.asarray(y) if isinstance(y, np.ndarray) else y for name, y in options.items()}
    return harness.rule(primals, **options)


def loss(implementation, case, x, *primals):
    o, h_T = rule(implementation, case, x, *primals)
    return jnp.vdot(o, x.do) + jnp.vdot(h_T, x.dh_T)


def directions(x, seed=1):
    rng = np.random.default_rng(seed)
    return tuple(None if y is None else rng.standard_normal(y.shape) for y in x.primals)


def oracle_gradients(case, x, primals):
    names = dict(zip((*harness.PRIMALS, "erase", "write"), primals, strict=False))
    return oracle.gradients(**{**x.arguments, **names}, **case.rule_options, do=x.do, dh_T=x.dh_T)


# Both sides are sums of up to 240 products of numbers that went through up to 40 tokens in float64. Most of their
# roundings, u = 1.1e-16 each, take turns: what is left is at most 1.0e-16 of the norms. Nine times u.
INNER_PRODUCTS = 1e-15


@both
@pytest.mark.parametrize("name", harness.tiers(SMALL, ("packed-reset-l2norm",)))
def test_forward_mode(implementation, name):
    """<(do, dh_T), J t> = <gradients, t> for the tangent t of every single input, against the oracle's gradients."""
    case = SMALL[name]
    with jax.enable_x64(True):
        x = cases.inputs(case, "float64")
        tangents = directions(x)
        f = functools.partial(rule, implementation, case, x)
        jvp = jax.jit(lambda tangents: jax.jvp(f, x_primals, tangents)[1])
        x_primals = jax.device_put(x.primals)
        gradients = oracle_gradients(case, x, x.primals)
        for i in (i for i, t in enumerate(tangents) if t is not None):
            one = tuple(t if j == i else jax.tree.map(np.zeros_like, t) for j, t in enumerate(tangents))
            o_t, h_t = jvp(one)
            expected = (gradients[i] * tangents[i]).sum()
            got = (np.asarray(o_t) * x.do).sum() + (np.asarray(h_t) * x.dh_T).sum()
            # Not against the sum itself, which may cancel, but against the most that it can be.
            largest = np.linalg.norm(gradients[i]) * np.linalg.norm(tangents[i])
            assert abs(expected - got) <= INNER_PRODUCTS * largest, gradients._fields[i]


@pytest.mark.parametrize("implementation", harness.CHUNKED_FIRST)
@pytest.mark.parametrize(
    "name, order",
    [
        pytest.param("plain", "forward-over-reverse", marks=pytest.mark.crossed),
        pytest.param("plain", "reverse-over-reverse", marks=pytest.mark.crossed),
        pytest.param("segments", "reverse-over-reverse", marks=pytest.mark.slow),
        pytest.param("packed-reset-l2norm", "forward-over-reverse", marks=pytest.mark.slow),
        pytest.param("channels", "forward-over-reverse", marks=pytest.mark.slow),
    ],
)
def test_second_order(implementation, name, order):
    """Hessian times vector, in all inputs at once, against differences of the oracle's gradients."""
    case = SMALL[name]
    with jax.enable_x64(True):
        x = cases.inputs(case, "float64")
        direction = directions(x)
        primals = jax.device_put(x.primals)
        argnums = tuple(range(len(primals)))
        gradient = jax.grad(functools.partial(loss, implementation, case, x), argnums=argnums)
        if order == "forward-over-reverse":
            hvp = jax.jit(lambda *p: jax.jvp(gradient, p, direction)[1])(*primals)
        else:

            def inner(*p):
                return sum(map(jnp.vdot, *map(jax.tree.leaves, (gradient(*p), direction))))

            hvp = jax.jit(jax.grad(inner, argnums=argnums))(*primals)
        hvp = jax.device_get(hvp)

    def moved(by):
        return oracle_gradients(case, x, jax.tree.map(lambda p, d: p + by * d, x.primals, direction))

    expected = differences(moved)
    for output, reference, got in zip(expected._fields, expected, hvp, strict=False):
        assert (reference is None) == (got is None), output
        if got is not None:
            assert_close(reference, got, FINITE_DIFFERENCES, output)


@pytest.mark.parametrize("channel_g", [None, pytest.param("mixed", marks=pytest.mark.slow)])
@pytest.mark.parametrize("implementation", harness.CHUNKED_FIRST)
def test_vmap(implementation, channel_g):
    """A mapped axis on every input, and on v alone; gradients per sample."""
    case = cases.Case("vmap", T=20, B=1, K=8, V=8, chunk_size=16, channel_g=channel_g)
    many = [cases.inputs(case, seed=seed) for seed in range(3)]
    stacked = tuple(np.stack(y) for y in zip(*(x[:6] for x in many), strict=True))
    f = functools.partial(rule, implementation, case, many[0])
    o, h_T = jax.device_get(jax.jit(jax.vmap(f))(*stacked))
    for i, x in enumerate(many):
        expected, final = oracle.forward(**x.arguments)
        assert_close(expected, o[i], tolerance("o", "float32"), "o", 2)
        assert_close(final, h_T[i], tolerance("final_state", "float32"), "state", 1)

    q, k, _, g, beta, h_0 = (jax.device_put(y) for y in many[0][:6])
    only_v = np.asarray(jax.jit(jax.vmap(lambda v: f(q, k, v, g, beta, h_0)[0]))(stacked[2]))
    for i, x in enumerate(many):
        expected, _ = oracle.forward(**{**many[0].arguments, "v": x.v})
        assert_close(expected, only_v[i], tolerance("o", "float32"), "o, v mapped", 2)

    per_sample = jax.vmap(
        jax.grad(functools.partial(loss, implementation, case, many[0]), argnums=tuple(range(6)))
    )
    gradients = jax.device_get(jax.jit(per_sample)(*stacked))
    for i, x in enumerate(many):
        expected = oracle.gradients(**x.arguments, do=many[0].do, dh_T=many[0].dh_T)
        for name, reference, got in zip(GRADIENTS, expected, gradients, strict=False):
            assert_close(reference, got[i], tolerance(name, "float32"), name, head_axis(name))


BFLOAT16_MAPPED = {"v": (2,), "gates and state": (3, 4, 5), "k": (1,)}
"""Name -> places of the inputs that a call is mapped over, alone."""


@pytest.mark.parametrize("name", harness.tiers(BFLOAT16_MAPPED, (), ("v", "gates and state")))
def test_vmap_of_packed_bfloat16(name):
    """Forward and gradients where some inputs alone are mapped: on a CPU a product then takes a form of its own."""
    case = cases.Case(
        "vmap-bfloat16", T=20, B=1, heads=(2, 2, 2), K=8, V=4, lengths=(3, 0, 16), chunk_size=16
    )
    many = [cases.inputs(case, "bfloat16", seed=seed) for seed in range(2)]
    mapped = BFLOAT16_MAPPED[name]
    both = value_and_gradients("chunked", case.options)
    axes = tuple(0 if i in mapped else None for i in range(6))
    primals = tuple(np.stack([x[i] for x in many]) if i in mapped else many[0][i] for i in range(6))
    call = jax.jit(jax.vmap(both, (axes, None, None, None)))
    results = jax.device_get(call(primals, (many[0].do, many[0].dh_T), many[0].cu_seqlens, None))
    for i, x in enumerate(many):
        x = cases.Inputs(*(x[j] if j in mapped else many[0][j] for j in range(len(x))))
        harness.check(case, x, "bfloat16", harness.named(jax.tree.map(lambda y, i=i: y[i], results)))


def test_tangents_of_packed_bfloat16():
    """jvp mapped over tangents of k, in which the same product has the other operand mapped."""
    case = cases.Case("jvp-bfloat16", T=20, B=1, heads=(2, 2, 2), K=8, V=4, lengths=(3, 0, 16), chunk_size=16)
    x = cases.inputs(case, "bfloat16")
    f = functools.partial(rule, "chunked", case, x)
    primals = tuple(jax.device_put(y) for y in x[:6])
    along = np.random.default_rng(1).standard_normal((2, *x.k.shape)).astype(jnp.bfloat16)

    @jax.jit
    @jax.vmap
    def tangents(dk):
        return jax.jvp(lambda k: f(primals[0], k, *primals[2:]), primals[1:2], (dk,))[1]

    gradients = oracle_gradients(case, x, x[:6])
    for dk, o_t, h_t in zip(along, *jax.device_get(tangents(along)), strict=True):
        expected = (gradients[1] * np.asarray(dk, np.float64)).sum()
        got = (np.asarray(o_t, np.float64) * x.do).sum() + (np.asarray(h_t, np.float64) * x.dh_T).sum()
        largest = np.linalg.norm(gradients[1]) * np.linalg.norm(np.asarray(dk, np.float64))
        assert abs(expected - got) <= tolerance("dk", "bfloat16") * largest


@both
def test_scale_may_be_traced(implementation):
    """scale is differentiable: o is proportional to it."""
    case = cases.Case("scale", T=3, B=1, heads=(1, 1, 1), K=4, V=4)
    x = cases.inputs(case)
    q, k, v, g, beta, _ = (jax.device_put(y) for y in x[:6])

    def f(scale):
        o, _ = gdn_jax.gated_delta_rule(q, k, v, g, beta, scale=scale, implementation=implementation)
        return jnp.vdot(o, x.do)

    value, derivative = jax.device_get(jax.jit(jax.value_and_grad(f))(np.float32(0.5)))
    assert_close(value / 0.5, derivative, tolerance("dq", "float32"))


def _residual_bytes(f, primals) -> int:
    kept = jax.eval_shape(lambda *p: jax.vjp(f, *p)[1], *primals)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))


def test_checkpoint_names():
    """A caller's policy that saves the documented names saves them; one that saves nothing saves nothing."""
    case = cases.Case("checkpoint", T=256, B=1, K=8, V=8)
    x = cases.inputs(case)
    f = functools.partial(rule, "chunked", case, x)
    primals = tuple(jax.device_put(y) for y in x[:6])
    policies = jax.checkpoint_policies
    nothing = _residual_bytes(jax.checkpoint(f, policy=policies.nothing_saveable), primals)
    inputs = sum(y.nbytes for y in x[:6])
    assert inputs <= nothing <= 1.1 * inputs
    chunks = case.HO * case.T // case.chunk_size
    sizes = {INVERSE_NAME: 4 * chunks * 64 * 64, STATES_NAME: 4 * chunks * 8 * 8}
    assert set(sizes) == set(RESIDUAL_NAMES)
    for names in ((INVERSE_NAME,), (STATES_NAME,), RESIDUAL_NAMES):
        named = jax.checkpoint(f, policy=policies.save_only_these_names(*names))
        assert _residual_bytes(named, primals) - nothing == sum(sizes[name] for name in names), names


@both
def test_gradients_under_checkpoint(implementation):
    case = cases.Case("remat", T=70)
    x = cases.inputs(case)
    f = functools.partial(loss, implementation, case, x)
    policies = jax.checkpoint_policies
    policy = (
        policies.save_only_these_names(*RESIDUAL_NAMES)
        if implementation == "chunked"
        else policies.nothing_saveable
    )
    gradients = jax.jit(jax.grad(jax.checkpoint(f, policy=policy), argnums=tuple(range(6))))(*x[:6])
    expected = oracle_gradients(case, x, x[:6])
    for name, reference, got in zip(GRADIENTS, expected, gradients, strict=False):
        assert_close(reference, got, tolerance(name, "float32"), name, head_axis(name))


TOKEN_ROWS, TOKEN_HEADS = PartitionSpec("shard"), PartitionSpec(None, None, "shard")
STATE_HEADS, REPLICATED = PartitionSpec(None, "shard"), PartitionSpec()
PLACEMENTS = {
    "rows": ((TOKEN_ROWS,) * 5 + (TOKEN_ROWS,), {}),
    "heads": ((TOKEN_HEADS,) * 5 + (STATE_HEADS,), {}),
    "rows, neither gates nor state": ((TOKEN_ROWS,) * 3, dict(g=None, beta=None, initial_state=False)),
    "rows of two stretches, no state": ((TOKEN_ROWS,) * 5, dict(initial_state=False, T=1100)),
    "packed, heads, one key head for all, no state": (
        (TOKEN_HEADS, REPLICATED, *(TOKEN_HEADS,) * 3),
        dict(B=1, heads=(2, 1, 2), lengths=(3, 0, 61), initial_state=False),
    ),
}
"""Name -> how the arguments that there are lie on the mesh, and what the case has of its own."""


def two_devices():
    """A mesh of them."""
    if jax.device_count() < 2:
        pytest.skip("needs two devices, JAX sees one")
    return jax.make_mesh((2,), ("shard",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))


def shard_mapped(implementation, case, x, specs, primals):
    """Outputs and gradients of those primals that are given, sharded by specs."""
    given = {name: y for name, y in zip(harness.PRIMALS, primals, strict=True) if y is not None}

    def call(*some):
        some = dict(zip(given, some, strict=True))
        return rule(implementation, case, x, *(some.get(name) for name in harness.PRIMALS))

    out_specs = (specs[0], STATE_HEADS if specs[0] is TOKEN_HEADS else TOKEN_ROWS)
    f = jax.shard_map(call, mesh=two_devices(), in_specs=specs, out_specs=out_specs)

    @jax.jit
    def value_and_gradients(primals, cotangents):
        outputs, vjp = jax.vjp(f, *primals)
        return *outputs, *vjp(cotangents)

    return value_and_gradients(tuple(given.values()), (x.do, x.dh_T))


@pytest.mark.parametrize("implementation", harness.CHUNKED_FIRST)
@pytest.mark.parametrize("placement", harness.tiers(PLACEMENTS, ("rows",)))
def test_shard_map(implementation, placement):
    """Rows or heads spread over two devices, forward and gradients."""
    specs, own = PLACEMENTS[placement]
    case = cases.Case("mesh", **{**dict(T=70, B=2, heads=(2, 2, 2), K=8, V=8), **own})
    x = cases.inputs(case)
    got = shard_mapped(implementation, case, x, specs, x[:6])
    expected = {name: y for name, y in harness.truth(case.options, x).items() if y is not None}
    for (name, reference), y in zip(expected.items(), got, strict=True):
        assert_close(reference, y, tolerance(name, "float32"), name, head_axis(name))


@both
def test_shard_map_from_one_state(implementation):
    """Rows on two devices start from one replicated state, whose gradient is the sum over them."""
    case = cases.Case("mesh", T=20, B=2, heads=(1, 1, 2), K=8, V=8)
    x = cases.inputs(case)
    one = x.initial_state[:1]
    got = shard_mapped(implementation, case, x, (TOKEN_ROWS,) * 5 + (REPLICATED,), (*x[:5], one))
    expected = harness.truth(case.options, x._replace(initial_state=np.repeat(one, 2, axis=0)))
    expected["dh_0"] = expected["dh_0"].sum(0, keepdims=True)
    expected = {name: y for name, y in expected.items() if y is not None}
    for (name, reference), y in zip(expected.items(), got, strict=True):
        assert_close(reference, y, tolerance(name, "float32"), name, head_axis(name))


def test_shard_map_of_lanes():
    """A row's chunks walked in lanes, as on a GPU, from no state."""
    case = cases.Case("lanes", T=64, B=2, heads=(1, 1, 1), K=8, V=8, initial_state=False, chunk_size=16)
    x = cases.inputs(case)

    def call(q, k, v, g, beta):
        arguments = dict(scale=case.K**-0.5, cu_seqlens=None, chunk_size=16, lanes=2)
        return chunked.chunked_rule(q, k, v, g, beta, None, **arguments)

    f = jax.shard_map(call, mesh=two_devices(), in_specs=TOKEN_ROWS, out_specs=TOKEN_ROWS)
    expected = harness.truth(case.options, x)
    for name, y in zip(("o", "final_state"), jax.jit(f)(*x[:5]), strict=True):
        assert_close(expected[name], y, tolerance(name, "float32"), name, head_axis(name))


def test_shard_map_of_chunk_states():
    """The state at the start of the second chunk, no initial state."""
    case = cases.Case("states", T=32, B=2, heads=(1, 1, 1), K=8, V=8, initial_state=False, chunk_size=16)
    x = cases.inputs(case)
    f = functools.partial(gdn_jax.chunk_states, chunk_size=16)
    f = jax.shard_map(f, mesh=two_devices(), in_specs=TOKEN_ROWS, out_specs=TOKEN_ROWS)
    half = {name: y[:, :16] for name, y in x.arguments.items()}
    _, expected = oracle.forward(**half)
    assert_close(
        expected, np.asarray(jax.jit(f)(*x[1:5]))[:, 1], tolerance("final_state", "float32"), "state", 1
    )


@both
def test_ahead_of_time(implementation):
    """Lowering from shapes alone needs no values."""
    case = cases.Case("aot", T=3, B=1, heads=(1, 1, 1), K=4, V=4)
    x = cases.inputs(case)
    shapes = jax.tree.map(lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype), x[:6])
    compiled = jax.jit(functools.partial(rule, implementation, case, x)).lower(*shapes).compile()
    expected, _ = oracle.forward(**x.arguments)
    assert_close(expected, compiled(*x[:6])[0], tolerance("o", "float32"))
