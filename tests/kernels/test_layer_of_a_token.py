"""The kernel that is a recurrent layer of one token of one row, interpreted, by every plan of its work."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import row_kernels
from fused_harness import close
from jax.experimental import pallas as pl
from jax.experimental.pallas.mosaic_gpu import barrier_wait, copy_gmem_to_smem
from layer_kernels import INTERPRET

from gdn_jax.parts import delta_layer as fused_delta_layer
from gdn_jax.shapes import Convolution
from pallas_kernels.device.lanes import load
from pallas_kernels.device.launch import grid_index
from pallas_kernels.device.memory import store_any
from pallas_kernels.device.operations import Device
from pallas_kernels.rows import delta_layer
from pallas_kernels.rows.delta_decays import ChannelDecay, HeadDecay
from pallas_kernels.rows.delta_heads import Head, Places, Rule
from pallas_kernels.rows.delta_plan import Plan, plan_of
from pallas_kernels.rows.delta_projections import Alone, Projections
from pallas_kernels.rows.delta_rooms import APART, LENT, ROWS, STAGES, WARPGROUPS, WIDEST

LAYERS: dict[str, tuple] = {
    "heads": (row_kernels.HEADS, 1, 1, 512, 4, APART),
    "heads, two of v": (row_kernels.HEADS, 1, 2, 512, 2, APART),
    "heads, turns of two kinds": (row_kernels.HEADS, 1, 1, 512, 8, APART),
    "heads, lent": (row_kernels.HEADS, 1, 1, 512, 4, LENT),
    "heads, lent, wide": (row_kernels.HEADS, 1, 2, 2560, 4, LENT),
    "heads, codes": (row_kernels.HEADS, 1, 1, 512, 4, APART, 128, True),
    "heads, codes, lent, two of v": (row_kernels.HEADS, 1, 2, 512, 4, LENT, 128, True),
    "heads, codes, lent": (row_kernels.HEADS, 1, 1, 1024, 8, LENT, 128, True),
    "channels, codes": (row_kernels.CHANNELS, 1, 1, 512, 4, LENT, 128, True),
    "channels": (row_kernels.CHANNELS, 1, 1, 512, 4, APART),
    "channels, turns of two kinds": (row_kernels.CHANNELS, 1, 1, 512, 8, APART),
    "channels, lent, two of v": (row_kernels.CHANNELS, 1, 2, 512, 2, LENT),
}
"""Name -> a decay, heads of k and of v, width of the stream, CTAs of a head of v, and a room; for heads of another
width than 64 that, and whether matrices are codes."""


def planned(name: str):
    """Arguments of the kernel with a plan of its own, and what it gives. With two heads of v to one of k there is no
    y, the convolution has a bias, beta is doubled, and matrices are bfloat16."""
    decay, H, HV, D, m, room, K, codes = (*LAYERS[name], 64, False)[:8]
    two = HV > H
    static = dict(
        decay=decay, HV=HV, bias=two, doubled=two, dtype="bfloat16" if two else "float32", codes=codes
    )
    (x, y, layer, gates, options), want = row_kernels.delta_layer(H, K, D, 0 if two else 3, **static)
    rule = Rule(fused_delta_layer.kernel_decay(layer, gates), gates.allow_neg_eigval, *options[1:])
    norm, inputs, convolution, A_log, dt_bias, state, output_norm, output, scales = layer
    results = (output if scales is None else scales.narrow).dtype
    plan = Plan(H, HV // H, K, D, D, m, output.dtype, results, rule.decay, room)
    assert plan.reason() is None
    arrays = x, None if y is None else y[:, 0], norm, inputs, convolution, state, output_norm, output
    known = dict(A_log=A_log, dt_bias=dt_bias, places=fused_delta_layer._places(layer, gates), rule=rule)
    known |= dict(scales=scales)
    return functools.partial(delta_layer.delta_layer, *arrays, **known, plan=plan, eps=options.eps), want


@pytest.mark.parametrize("name", harness.tiers(LAYERS, {"heads, lent"}))
def test_a_layer_of_a_token(name):
    """Both stages by themselves, with race detection: every plan gives what float64 formulas give."""
    call, want = planned(name)
    s, parts, *states = jax.jit(functools.partial(call, interpret=INTERPRET))()
    results = s, np.asarray(parts, np.float32).sum(0)[None], *states
    for part, expected, got, roundings in zip("sycS", want, results, (0, 2, 1, 1), strict=True):
        close(expected, got, part, roundings, 2 * row_kernels.IN_TURN, parts.dtype.name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["heads, lent", "channels, lent, two of v"])
def test_rows_come_to_a_slot_after_its_tiles(name, monkeypatch):
    """The interpreter has W_o elsewhere. With rows of W_in in its place every slot gets its own, without a race."""

    def first(gmem, smem, *, places, plan, eps):
        stage = Projections(gmem, smem, delta_layer._share(plan), places, plan, eps, Device(True))

        class Handed(Alone):
            def ask_rows(self, i):
                rows = pl.ds((stage.wg * STAGES + i) * ROWS, ROWS)
                copy_gmem_to_smem(gmem.weight.at[rows], smem.tiles.at[stage.wg, i], stage._barrier(i))

        stage.run(Handed())
        for slot in range(STAGES):
            barrier_wait(stage._barrier(slot))
            x = load(smem.tiles.at[stage.wg, slot, :, 0], stage.weights.layout)
            rows = (stage.wg * STAGES + slot) * ROWS
            store_any(gmem.handed.at[grid_index(), pl.ds(rows, ROWS)], x)

    call, _ = planned(name)
    weight, plan, launch = call.args[3], call.keywords["plan"], delta_layer.launch
    count = WARPGROUPS * STAGES * ROWS

    def with_rows(name, body, *, outputs, **options):
        if name == "projections":
            handed = jax.ShapeDtypeStruct((plan.ctas, count, WIDEST), weight.dtype)
            outputs = outputs | {"handed": handed}
        results = launch(name, body, outputs=outputs, **options)
        if name == "projections":
            for found in results.pop("handed"):
                np.testing.assert_array_equal(found, weight[:count, :WIDEST])
        return results

    monkeypatch.setattr(delta_layer, "_first", first)
    monkeypatch.setattr(delta_layer, "launch", with_rows)
    call(interpret=INTERPRET)


def test_what_a_layer_of_a_token_takes():
    """Reasons name what is refused; released sizes are taken with at least half of the multiprocessors."""

    def reason(H, HV, D, E=None, decay=None, K=128, **others):
        C, like = (2 * H + HV) * K, jax.ShapeDtypeStruct
        places = Places(0, H * K, 2 * H * K, C, C + HV, C + 2 * K)
        convolution = Convolution(like((1, C, 3), jnp.bfloat16), like((C, 4), jnp.bfloat16), None)
        arrays = dict(
            x=like((1, D), jnp.float32),
            weight=like((C + (2 + HV) * K, D), jnp.bfloat16),
            convolution=convolution,
            state=like((1, HV, K, K), jnp.float32),
            output=like((E or D, HV * K), jnp.bfloat16),
            places=places,
        )
        return delta_layer.check_supported(**arrays | others, decay=decay or HeadDecay())

    for sizes in ((8, 8, 1024), (16, 16, 1024), (16, 16, 2048), (16, 32, 2048), (16, 32, 2560)):
        assert reason(*sizes) is None, sizes
    assert reason(16, 16, 1536, decay=ChannelDecay(-5.0)) is None
    assert "multiple of 512" in reason(16, 16, 2304)
    assert "bytes of shared memory" in reason(16, 16, 4096)
    codes, results = jnp.dtype("float8_e4m3fn"), jnp.dtype("bfloat16")
    assert "at most 2560 numbers" in plan_of(16, 2, 128, 4096, 4096, (codes, results), HeadDecay())
    assert "32 CTAs" in reason(2, 2, 1024)
    assert "whole heads" in reason(6, 8, 1024)
    assert "whole shares" in reason(16, 16, 1024, 1020)
    state = jax.ShapeDtypeStruct((1, 30, 96, 192), jnp.float32)
    assert "one row's of 64 or 128" in reason(16, 16, 1024, state=state)


@pytest.mark.parametrize(
    ("step", "missing"),
    [
        ("read", "arrive"),
        ("token", "read, meet"),
        ("write", "meet, token"),
        ("multiply", "ask_rows, token"),
    ],
)
def test_steps_of_a_head_have_an_order(step, missing):
    """A state that is written before all have read it would be a race that no compiler sees."""
    head = object.__new__(Head)
    head._done = set()
    with pytest.raises(AssertionError, match=f"{step} before {missing}"):
        getattr(head, step)(*([jnp.zeros(1)] if step in ("token", "write") else []))
