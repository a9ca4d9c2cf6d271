"""Times of a call: spans and kernels of a profile, and the clock."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData

from gdn_jax.bench import measure, profiles


def profile(lines: dict[str, list[tuple[str, int, int]]], plane: str = "/device:GPU:0") -> ProfileData:
    """A profile with one plane; line name -> (event name, start in us, duration in us)."""
    names = sorted({name for events in lines.values() for name, *_ in events})
    ids = {name: i + 1 for i, name in enumerate(names)}
    text = f'planes {{ name: "{plane}"'
    for number, (line, events) in enumerate(lines.items()):
        text += f' lines {{ id: {number + 1} name: "{line}"'
        for name, start, duration in events:
            times = f"offset_ps: {start * 10**6} duration_ps: {duration * 10**6}"
            text += f" events {{ metadata_id: {ids[name]} {times} }}"
        text += " }"
    for name, i in ids.items():
        text += f' event_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}'
    return ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace(text + " }"))


CALLS = [(0, 10), (1000, 12), (2000, 17)]  # start and duration of the first kernel of each call, us


def kernels(names=("gates", "walk")):
    """Three calls of two kernels: the second lasts 30 us and starts 1 us after the first one's end."""
    first, second = names
    return [
        event
        for start, duration in CALLS
        for event in ((first, start, duration), (second, start + duration + 1, 30))
    ]


@pytest.fixture
def a_gpu(monkeypatch):
    """A machine whose profiles show the kernels that a test puts into the list."""
    lines: dict = {}
    monkeypatch.setattr(measure, "on_gpu", lambda: True)
    monkeypatch.setattr(profiles, "profile", lambda run, calls: profile(lines))
    return lines


def test_a_profile_gives_spans_and_kernels(a_gpu):
    """Spans from the first start to the last end: 10 + 1 + 30, 12 + 1 + 30 and 17 + 1 + 30 us."""
    a_gpu["Stream #13(Compute)"] = kernels()
    timing = measure.measure(lambda: None, 3)
    np.testing.assert_allclose(timing[:3], (0.043, 0.041, 0.048))
    assert [name for name, _ in timing.kernels] == ["gates", "walk"]
    np.testing.assert_allclose([ms for _, ms in timing.kernels], (0.012, 0.030))


def test_some_kernels_of_a_profile_are_summed(a_gpu):
    """Kernels whose names begin as asked are summed, call by call; a call with another number of them is refused."""
    runs = [("swiglu", 0, 2), ("nvjet", 2, 7), ("swiglu", 9, 1), ("swiglu", 20, 4), ("nvjet", 24, 1)]
    a_gpu["Stream #1"] = [*runs, ("swiglu", 25, 1)]
    timing = measure.by_device(lambda: None, 2, "swiglu")
    np.testing.assert_allclose(timing[:3], (0.004, 0.003, 0.005))
    assert [(name, round(ms, 6)) for name, ms in timing.kernels] == [("swiglu", 0.003), ("swiglu", 0.001)]
    assert measure.by_device(lambda: None, 2, "").slowest == pytest.approx(0.010)
    for names in ("cross_entropy", "swiglu"):
        a_gpu["Stream #1"].pop()
        with pytest.raises(ValueError, match="expected as many kernels in each"):
            measure.by_device(lambda: None, 2, names)


def test_a_profile_by_kernel_of_one_device():
    """Sums over the calls, by time; with the time between kernels, where one that runs at the same time is none."""
    streams = {"Stream #1": [("a", 0, 10), ("b", 12, 4), ("a", 20, 12)], "Stream #2": [("nccl", 11, 10)]}
    found = profiles.kernels(profile(streams), 0)
    assert not profiles.kernels(profile(streams), 1)
    times = [(name, launches, round(ms, 6)) for name, launches, ms in profiles.by_kernel(found, 2)]
    assert [round(profiles.busy_ms(found, pause), 6) for pause in (1e3, 2e3)] == [0.031, 0.032]
    assert times == [("a", 1, 0.011), ("nccl", 0.5, 0.005), ("b", 0.5, 0.002), ("between kernels", 0, 0.0005)]


def test_a_profile_counts_every_kernel_once(a_gpu):
    """Other lines and planes show the same work again; a second stream may end last."""
    a_gpu |= {
        "Stream #13(Compute)": kernels(),
        "Stream #14(MemcpyD2D)": [("copy", start + 5, 100) for start, _ in CALLS],
        "XLA Modules": [("jit_step", start - 1, 60) for start, _ in CALLS[1:]],
    }
    np.testing.assert_allclose(measure.measure(lambda: None, 3)[:3], (0.105, 0.105, 0.105))
    assert not profiles.kernels(profile({"Stream #1": kernels()}, plane="/host:CPU"))


def test_a_profile_of_unequal_calls_is_refused(a_gpu):
    with pytest.raises(ValueError, match="got 0 in all"):
        measure.measure(lambda: None, 3)
    a_gpu["Stream #13"] = kernels()[:-1]
    with pytest.raises(ValueError, match="expected as many kernels in each, got 5 in all"):
        measure.measure(lambda: None, 3)
    a_gpu["Stream #13"].append(("other", 2018, 30))
    with pytest.raises(ValueError, match="expected the same kernels in each"):
        measure.measure(lambda: None, 3)


def test_graph_options_exist(a_gpu):
    """XLA refuses names it does not know, so that a renamed option cannot silently bring the gaps back."""
    assert measure.compiled(lambda x: x + 1, jnp.ones(2))(jnp.ones(2)).tolist() == [2, 2]
    with pytest.raises(Exception, match="No such compile option"):
        jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options={"xla_gpu_no_such_option": 1})


def test_the_clock(monkeypatch):
    """Calls warm up, then each measurement is the mean of its calls, without what prepares it."""
    now, happened = [0.0], []

    def call():
        happened.append("call")
        now[0] += 0.001 * len(happened)

    def prepare():
        happened.append("prepare")
        now[0] += 1

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    timing = measure.by_clock(call, repeats=3, calls=2, prepare=prepare)
    assert happened == ["prepare", "call", "call"] * 5  # three calls warm up
    np.testing.assert_allclose(timing[:3], (11.5, 8.5, 14.5))
    assert timing.over(2)[:3] == (timing.ms / 2, timing.fastest / 2, timing.slowest / 2)
    happened.clear()
    assert measure.by_clock(call, repeats=2)[:3] == pytest.approx((4.5, 4, 5))
