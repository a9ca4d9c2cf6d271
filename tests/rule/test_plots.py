"""The plots of analyses: on the axes they are given, of what came, and errors of wrong shapes."""

import functools
import inspect

import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax
from gdn_jax.checks import cases
from gdn_jax.inspect import analysis, plots


@pytest.fixture
def pyplot():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


@functools.cache
def figures():
    """Every function of `plots` with arguments of a real run."""
    case = cases.Case("figure", T=24, B=1, heads=(2, 2, 2), K=8, V=8, initial_state=False)
    x = cases.inputs(case)
    q, k, v, g, beta = (jnp.asarray(y) for y in x[:5])
    h = gdn_jax.chunk_states(k, v, g, beta, chunk_size=16)[0, :, 0]
    errors = jnp.nanmean(analysis.retrieval_by_load(k, v)[0, 0], axis=-1)
    return {
        "attention_map": dict(M=analysis.effective_attention(q, k, g, beta)[0, 0]),
        "half_lives": dict(layers=[g, 2 * g]),
        "gate_over_tokens": dict(gate=beta[0], name="write strength β", labels=["a"] * 24),
        "gate_by_kind": dict(means=np.array([[0.2, 0.4], [0.6, 0.8]]), kinds=["key", "value"], name="β"),
        "retrieval_curves": dict(load=np.arange(1, 25) / 8, errors={"delta rule": errors}),
        "spectrum_over_time": dict(singular_values=analysis.state_spectrum(h), tokens=np.array([0, 16])),
        "householder_plane": dict(angle=30.0, x=(1.0, 0.5), beta=2.0),
    }


PUBLIC_PLOTS = sorted(
    name
    for name, f in vars(plots).items()
    if getattr(f, "__module__", "") == plots.__name__
    and name[0] != "_"
    and "ax" in inspect.signature(f).parameters
)


@pytest.mark.parametrize("name", PUBLIC_PLOTS)
def test_figures_draw_on_the_axes_they_are_given(name, pyplot):
    """And make their own otherwise; both have labels and something drawn. A plot without a case here fails."""
    arguments = figures()[name]
    _, given = pyplot.subplots()
    assert getattr(plots, name)(**arguments, ax=given) is given
    own = getattr(plots, name)(**arguments)
    assert own is not given and own.figure is not given.figure
    for ax in (given, own):
        assert ax.lines or ax.images
        heads_named = all(label.get_text().startswith("layer") for label in ax.get_yticklabels())
        assert ax.get_title() or (ax.get_xlabel() and (ax.get_ylabel() or heads_named))
        ax.figure.canvas.draw()


def test_half_lives_are_drawn_by_their_median(pyplot):
    """The head with the longer median lies on the right, though the other one's longest is far longer."""
    lives = np.array([[1.0, 1, 2, 1000, 1000], [3.0, 3, 4, 5, 5]])  # medians 2 and 4
    g = -np.log(2) / lives.T[None]
    ax = plots.half_lives([g])
    dots = [line for line in ax.lines if line.get_marker() == "o"]
    np.testing.assert_allclose([line.get_xdata()[0] for line in dots], [2, 4], rtol=1e-5)
    assert [line.get_ydata()[0] for line in dots] == [0, 1]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["layer 1 head 1", "layer 1 head 2"]
    spans = [line.get_xdata() for line in ax.lines if line.get_marker() != "o"]
    np.testing.assert_allclose(spans, [[1, 1000], [3, 5]], rtol=1e-5)


def test_what_is_drawn_is_what_came(pyplot):
    """The data of the other figures: cells, dots, lines, in their order."""
    shown = figures()
    attention = shown["attention_map"]["M"]
    drawn = plots.attention_map(attention).images[0].get_array()
    np.testing.assert_allclose(np.tril(drawn.filled(0)), np.tril(attention), rtol=1e-6)
    assert drawn.mask[0, 1] and not drawn.mask[1, 0]
    gate = shown["gate_over_tokens"]["gate"]
    np.testing.assert_allclose(
        plots.gate_over_tokens(gate, name="β").images[0].get_array(), np.asarray(gate).T
    )
    means = shown["gate_by_kind"]["means"]
    bar, dots = plots.gate_by_kind(means, ["key", "value"], name="β").lines[2:]
    np.testing.assert_allclose(bar.get_ydata(), means[1].mean())
    np.testing.assert_allclose(dots.get_ydata(), means[1])
    curve = plots.retrieval_curves(**shown["retrieval_curves"]).lines[0]
    np.testing.assert_allclose(curve.get_ydata(), shown["retrieval_curves"]["errors"]["delta rule"])
    np.testing.assert_allclose(curve.get_xdata(), shown["retrieval_curves"]["load"])
    values = np.array([[4.0, 2.0], [1.0, 1.0]])
    ax = plots.spectrum_over_time(values, np.array([0, 16]))
    np.testing.assert_allclose([line.get_ydata() for line in ax.lines], values.T)
    right = next(other for other in ax.figure.axes if other is not ax).lines[0]
    np.testing.assert_allclose(right.get_ydata(), analysis.effective_rank(jnp.asarray(values)))


def test_bars_and_axes_show_what_there_is(pyplot):
    """Weights without a negative one have a bar from 0, in the colours of other maps; a second axis has its line."""
    signed, positive = np.tril([[1.0, 0.0], [-0.5, 0.5]]), np.tril([[1.0, 0.0], [0.25, 0.75]])
    for M, ends in ((signed, (-1, 1)), (positive, (0, 1))):
        image = plots.attention_map(M).images[0]
        assert image.colorbar.ax.get_ylim() == ends and image.norm.vmin == -1
    ax = plots.spectrum_over_time(np.array([[4.0, 2.0], [1.0, 1.0]]), np.array([0, 16]))
    right = next(other for other in ax.figure.axes if other is not ax)
    assert right.spines["right"].get_visible() and not right.spines["top"].get_visible()


def test_the_plane_shows_the_transformed_vector(pyplot):
    ax = plots.householder_plane(90.0, (1.0, 1.0), 2.0)
    tips = [text.xy for text in ax.texts if hasattr(text, "xy") and text.arrow_patch is not None]
    np.testing.assert_allclose(tips, [(0, 1), (1, 1), (1, -1)], atol=1e-6)
    assert ax.get_title() == r"$\beta$ = 2.00: reflection"


def test_plots_import_matplotlib_only_when_they_draw():
    import subprocess
    import sys

    program = (
        "import sys, gdn_jax.inspect.plots; assert not [m for m in sys.modules if m.startswith('matplotlib')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_plot_of_a_wrong_shape_says_so():
    with pytest.raises(ValueError, match="M: expected 2 dimensions"):
        plots.attention_map(np.zeros((1, 2, 2)))
