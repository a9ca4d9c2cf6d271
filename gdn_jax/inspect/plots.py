"""Figures of `gdn_jax.inspect.analysis`: one function per figure, arrays in, matplotlib Axes out.

Every function draws on `ax`, or on a new figure where that is None, and returns the Axes. matplotlib comes with the
extra `gdn-jax[experiments]` and is imported by the first figure. A rule looks alike in every figure of the project:
`STYLES` says how, and in which order rules stand.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from gdn_jax.inspect.analysis import apply_householder, effective_rank, layer_half_lives
from gdn_jax.styles import COLORS, Style
from gdn_jax.training.mixers import MIXERS

LINE_STYLES = ("-", "--", "-.", ":")
STYLES: dict[str, Style] = {name: mixer.style for name, mixer in MIXERS.items()}
"""Looks of the models that are compared, by name, in the order in which figures and tables have them."""


def style_of(label: str) -> Style | None:
    """Returns the look of the rule that a label names, or None where it names none."""
    said = label.lower()
    words = [(word, style) for style in STYLES.values() for word in (style.label.lower(), *style.words)]
    named = [(len(word), style) for word, style in words if word in said]
    return max(named, key=lambda found: found[0])[1] if named else None


TOKEN_SIZE = 9
"""Points of the names of tokens. They need about 0.15 inches a token."""


def attention_map(
    M: ArrayLike,
    *,
    labels: Sequence[str] | None = None,
    largest: float | None = None,
    bar: bool = True,
    ax: Any = None,
) -> Any:
    """Effective attention map of one head, blue for positive and red for negative weights, white for the future.

    The colour bar begins at 0 where no weight is negative, as in softmax attention. A weight has the same colour in
    either case.

    Args:
      M: [T, T], see `analysis.effective_attention`.
      labels: names of the tokens; a new figure is made large enough for them, `ax` should be 0.15 inches a token.
      largest: weight of the darkest colours, the largest of M by default; give it where maps are compared.
      bar: False leaves out the colour bar, when the map next to this one has it.
      ax: Axes to draw on.
    """
    from matplotlib.colors import TwoSlopeNorm

    M = _array("M", M, 2)
    side = max(3.4, 0.15 * len(labels or ()))
    ax = _axes(ax, (side + 1.0, side + 0.4))
    largest = largest or float(np.abs(M).max()) or 1.0
    past = np.where(np.tril(np.ones_like(M, bool)), M, np.nan)
    image = ax.imshow(past, cmap="RdBu", norm=TwoSlopeNorm(0, -largest, largest), interpolation="nearest")
    if bar:
        scale = _color_bar(image, ax, "weight of the value").ax
        if np.nanmin(past) >= 0:
            scale.set_ylim(0, largest)
    ax.set_xlabel("written at token")
    ax.set_ylabel("read at token")
    if labels is not None:
        _name_tokens(ax.xaxis, labels)
        _name_tokens(ax.yaxis, labels)
    ax.tick_params(length=0)
    return ax


def half_lives(layers: Sequence[ArrayLike], *, ax: Any = None) -> Any:
    """Half-lives of all heads: the median over tokens as a dot, percentiles 10 to 90 as a line, longest on the right.

    Args:
      layers: g [B, T, HO] of each layer.
      ax: Axes to draw on.
    """
    ax = _axes(ax, (5.2, 0.9 + 0.24 * sum(np.shape(g)[-1] for g in layers)))
    row, ticks = 0, []
    for i, g in enumerate(layers):
        lives = [np.asarray(x) for x in layer_half_lives(jnp.asarray(g))]
        order = np.argsort(lives[2])
        for head in order:
            _, p10, median, p90 = (x[head] for x in lives)
            color = COLORS[i % len(COLORS)]
            ax.plot([p10, p90], [row, row], color=color, lw=2, solid_capstyle="round", alpha=0.55)
            ax.plot(median, row, "o", color=color, ms=5)
            ticks.append((row, f"layer {i + 1} head {head + 1}"))
            row += 1
        row += 0.6
    ax.set_xscale("log")
    ax.set_yticks(*zip(*ticks, strict=True))
    ax.set_ylim(row - 0.1, -0.8)
    ax.set_xlabel("half-life (tokens)")
    ax.grid(axis="x", alpha=0.3)
    return ax


def gate_over_tokens(
    gate: ArrayLike, *, name: str, labels: Sequence[str] | None = None, ax: Any = None
) -> Any:
    """A gate in [0, 1] or [0, 2] for one row of tokens, a line of cells per head; dark is large.

    Args:
      gate: [T, HO], alpha or beta.
      name: what it is, with its symbol, for the colour bar.
      labels: names of the tokens.
      ax: Axes to draw on.
    """
    gate = _array("gate", gate, 2)
    T, heads = gate.shape
    ax = _axes(ax, (0.9 + 0.2 * T, 0.9 + 0.25 * heads))
    top = 1.0 if gate.max() <= 1 else 2.0
    image = ax.imshow(gate.T, cmap="Blues", vmin=0, vmax=top, aspect="auto", interpolation="nearest")
    _color_bar(image, ax, name)
    ax.set_yticks(range(heads), [str(i + 1) for i in range(heads)])
    ax.set_ylabel("head")
    ax.set_xlabel("token")
    if labels is not None:
        _name_tokens(ax.xaxis, labels)
    ax.tick_params(length=0)
    return ax


def gate_by_kind(means: ArrayLike, kinds: Sequence[str], *, name: str, ax: Any = None) -> Any:
    """Mean gate per kind of token: one dot per head, a bar at the mean of all heads.

    Args:
      means: [kinds, heads], see `analysis.mean_by_kind`.
      kinds: their names.
      name: what the gate is, with its symbol, for the axis.
      ax: Axes to draw on.
    """
    means = _array("means", means, 2)
    ax = _axes(ax, (0.9 + 0.85 * len(kinds), 2.8))
    heads = means.shape[1]
    spread = np.linspace(-0.22, 0.22, heads) if heads > 1 else np.zeros(1)
    for i, row in enumerate(means):
        ax.plot([i - 0.33, i + 0.33], [row.mean()] * 2, color="black", lw=1.5)
        ax.plot(i + spread, row, "o", color=COLORS[0], ms=5, alpha=0.8)
    ax.set_xticks(range(len(kinds)), kinds)
    ax.set_xlabel("kind of token")
    ax.set_ylabel(name)
    ax.set_ylim(-0.05, 1.05 if means.max() <= 1 else 2.05)
    ax.grid(axis="y", alpha=0.3)
    return ax


def retrieval_curves(load: ArrayLike, errors: Mapping[str, ArrayLike], *, ax: Any = None) -> Any:
    """Mean retrieval error of stored pairs against load; a rule that `STYLES` knows has its look.

    Args:
      load: [n] pairs per dimension of the key.
      errors: [n] relative errors by the name of the rule.
      ax: Axes to draw on.
    """
    ax = _axes(ax, (4.8, 3.2))
    for i, (label, error) in enumerate(errors.items()):
        color, line = COLORS[i % len(COLORS)], LINE_STYLES[i % len(LINE_STYLES)]
        if (style := style_of(label)) is not None:
            color, line = style.color, style.line
        ax.plot(load, error, ls=line, color=color, lw=1.8, label=label)
    ax.axvline(1, color="grey", lw=0.8)
    ax.set_xlabel("load (stored pairs / key dimension K)")
    ax.set_ylabel("relative error of a stored value")
    ax.set_xlim(0, float(np.max(load)))
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False)
    return ax


def spectrum_over_time(singular_values: ArrayLike, tokens: ArrayLike, *, ax: Any = None) -> Any:
    """Singular values of one head's state over time, with the effective rank as a thick line on the right axis.

    Args:
      singular_values: [L, R], see `analysis.state_spectrum`.
      tokens: [L] tokens seen at each of these states.
      ax: Axes to draw on.
    """
    values = _array("singular_values", singular_values, 2)
    ax = _axes(ax, (5.2, 3.2))
    floor = values.max() * 1e-4  # below it: rounding, and the state before the first token
    for i in range(values.shape[1]):
        drawn = np.where(values[:, i] > floor, values[:, i], np.nan)
        ax.plot(tokens, drawn, color=COLORS[0], lw=0.8, alpha=0.6)
    ax.set_yscale("log")
    ax.set_xlabel("tokens seen")
    ax.set_ylabel("singular values of the state", color=COLORS[0])
    right = ax.twinx()
    right.plot(tokens, effective_rank(jnp.asarray(values)), color=COLORS[1], lw=2.2)
    right.set_ylim(0, values.shape[1] * 1.05)
    right.set_ylabel("effective rank", color=COLORS[1])
    right.spines["right"].set(visible=True, color=COLORS[1])
    right.spines[["top", "left"]].set_visible(False)
    right.tick_params(axis="y", colors=COLORS[1])
    return ax


def householder_plane(angle: float, x: tuple[float, float], beta: float, *, ax: Any = None) -> Any:
    """Draws how H = I - beta k k^T moves a vector in the plane; the dashed line is orthogonal to k.

    Args:
      angle: of the unit key k, in degrees from the first axis.
      x: the vector.
      beta: write strength, 0 (identity) to 2 (reflection).
      ax: Axes to draw on.
    """
    ax = _axes(ax, (3.6, 3.6))
    k = np.array([math.cos(math.radians(angle)), math.sin(math.radians(angle))])
    start = np.asarray(x, float)
    end = np.asarray(apply_householder(jnp.asarray(k), jnp.asarray(beta, float), jnp.asarray(start)))
    across = np.array([-k[1], k[0]])
    ax.plot(*np.stack([-4 * across, 4 * across], 1), color="grey", lw=1, ls="--", zorder=1)
    ax.plot(*np.stack([start, end], 1), color="grey", lw=1, ls=":", zorder=1)
    for tip, color, label, side in (
        (k, "black", "$k$", 0),
        (start, COLORS[0], "$x$", 1),
        (end, COLORS[1], "$Hx$", -1),
    ):
        arrow = dict(arrowstyle="-|>", color=color, lw=2, shrinkA=0, shrinkB=0, mutation_scale=14)
        ax.annotate("", tip, (0, 0), arrowprops=arrow)
        away = tip / max(float(np.linalg.norm(tip)), 1e-6)
        at = (
            tip + 0.22 * away + 0.16 * side * np.array([-away[1], away[0]])
        )  # x and Hx on two sides: they may coincide
        ax.text(*at, label, color=color, ha="center", va="center", fontsize=12)
    limit = 1.25 * max(1.2, float(np.linalg.norm(start)))
    ax.set(xlim=(-limit, limit), ylim=(-limit, limit), aspect="equal", xticks=[], yticks=[])
    names = {0.0: "identity", 1.0: "projection", 2.0: "reflection"}
    name = names.get(round(float(beta), 6))
    ax.set_title(rf"$\beta$ = {beta:.2f}" + (f": {name}" if name else ""), fontsize=11)
    ax.spines[:].set_visible(False)
    return ax


def _axes(ax: Any, size: tuple[float, float]) -> Any:
    """ax, or the Axes of a new figure of that size in inches; without the two spines that say nothing."""
    if ax is None:
        from matplotlib import pyplot

        _, ax = pyplot.subplots(figsize=size, layout="constrained")
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def _name_tokens(axis: Any, labels: Sequence[str]) -> None:
    """Names of tokens on an axis: letters below it on one line, longer names upright, where they would meet."""
    style: dict[str, Any] = dict(fontsize=TOKEN_SIZE)
    if axis.axis_name == "x" and max(map(len, labels)) > 1:
        style["rotation"] = 90
    elif axis.axis_name == "x":
        style["verticalalignment"] = "baseline"
        axis.set_tick_params(pad=TOKEN_SIZE + 2)
    axis.set_ticks(range(len(labels)), labels, **style)


def _color_bar(image: Any, ax: Any, label: str) -> Any:
    bar = ax.figure.colorbar(image, ax=ax, fraction=0.046, pad=0.02)
    bar.set_label(label)
    bar.outline.set_visible(False)
    return bar


def _array(name: str, x: ArrayLike, ndim: int) -> np.ndarray:
    x = np.asarray(x)
    if x.ndim != ndim:
        raise ValueError(f"{name}: expected {ndim} dimensions, got shape {list(x.shape)}")
    return x
