"""What a sweep's finished runs give: the learning rate that is chosen, the table, the figure."""

import numpy as np
import pytest
from matplotlib.figure import Figure
from tiny_sweeps import options

from gdn_jax.inspect.plots import COLORS, STYLES, retrieval_curves, style_of
from gdn_jax.sweeps import figure as figure_lib
from gdn_jax.sweeps import grid, report, summary
from gdn_jax.sweeps import options as sweep_options
from gdn_jax.training import options as options_lib
from gdn_jax.training.mixers import MIXERS
from gdn_jax.training.tasks.state_tracking import ParityOptions
from gdn_jax.training.tasks.table import make_task


def test_one_seed_has_no_spread(tmp_path):
    """The table of a sweep with one seed says neither mean nor deviation."""
    task = make_task(ParityOptions(), 4)
    runs = [line("mamba2", 0.1, 0, 0.1, 0.5) | {"parameters": 9, "wall": {"seconds": 1.0}}]
    stored = options_lib.to_json(options(seeds=1, lrs=(0.1,), mixers=("mamba2",)))
    config = {
        "task": "sweep parity",
        "options": stored,
        "command": "gdn",
        "versions": {"device": "a", "jax": "b"},
    }
    sizes = {1: options().model}
    rows = summary.rows(runs, ["mamba2"])
    table = report.best_rates(rows, runs, config, summary.About.of(task), sizes)
    assert "in %, of one seed, at the learning rate of [0.1] with the lowest validation loss" in table
    assert "| Mamba2's decay with unit keys | 0.1 | 1 of 1 | 50.0 | 25.0 |" in table
    assert not {"±", "mean", "seeds"} & set(table.split())


def test_table_of_several_scales():
    """Every scale has a row with its size and the learning rate that is best for it."""
    task = make_task(ParityOptions(), 4)
    o = options(seeds=2, lrs=(0.1, 0.2), mixers=("mamba2",), scales=(1, 3), scaled="depth")
    runs = [
        line("mamba2", lr, seed, abs(lr - 0.1 * (1 + (scale == 3))), 0.1 * scale + 0.2 * seed)
        | {"scale": scale, "parameters": 9 * scale, "wall": {"seconds": 1.0}}
        for scale in (1, 3)
        for lr in (0.1, 0.2)
        for seed in (0, 1)
    ]
    config = {"task": "sweep parity", "options": options_lib.to_json(o), "command": "gdn"}
    config["versions"] = {"device": "a", "jax": "b"}
    sizes = {scale: sweep_options.scaled_model(o, scale) for scale in (1, 3)}
    rows = summary.rows(runs, ["mamba2"], [1, 3])
    table = report.best_rates(rows, runs, config, summary.About.of(task), sizes)
    assert "| mixer | width | layers | state | learning rate | learned | 4 tokens | 8 tokens |" in table
    assert (
        "| Mamba2's decay with unit keys | 8 | 1 | 16 | 0.1 | 2 of 2 | 20.0 ± 127.1 | 10.0 ± 63.5 |" in table
    )
    assert (
        "| Mamba2's decay with unit keys | 8 | 3 | 48 | 0.2 | 2 of 2 | 40.0 ± 127.1 | 20.0 ± 63.5 |" in table
    )
    assert "9 and 27 parameters in every model; softmax" in table


def test_the_scores_of_runs_that_have_learned():
    """Others are counted, not averaged; a guess between two costs ln 2."""
    runs = [line("mamba2", 0.1, seed, loss, accuracy) for seed, loss, accuracy in
            ((0, 0.69, 0.5), (1, 0.3, 0.9), (2, None, 0.5), (3, 0.1, 1.0))]  # fmt: skip
    [row] = summary.rows(runs, ["mamba2"])
    learned = row.learned(2.0)
    assert row.learned(None) == row and learned.losses == (0.3, 0.1) and learned.scores[4] == [0.9, 1.0]
    nothing = row._replace(losses=(0.7,) * 4).learned(2.0)
    assert nothing.losses == () and nothing.scores[4] == []
    about = summary.About("accuracy", "accuracy", "tokens", "parity", {"a guess": 0.5}, 2.0)
    table = report.every_rate([[row], [row._replace(losses=(0.7,) * 4)]], about)
    assert "| 0.1 | 2 of 4 | 95.0 ± 63.5 | 47.5 ± 31.8 |" in table and "| 0.1 | 0 of 4 | - | - |" in table


def test_intervals():
    """Student's t of two and of nineteen degrees of freedom, from a printed table."""
    np.testing.assert_allclose(summary.interval([0.0, 1.0, 2.0]), 4.303 / 3**0.5, rtol=1e-4)
    many = np.arange(20.0)
    np.testing.assert_allclose(summary.interval(list(many)), 2.093 * many.std(ddof=1) / 20**0.5, rtol=1e-4)


def test_starts_and_curves():
    """Each start has its own best learning rate, and the steps after which half of the first kind is right."""
    o = options(lrs=(0.1, 0.2), seeds=1, write_starts=(0.5, 0.1), time_steps=(1.0, 0.1), mixers=("mamba2",))
    wanted = grid.wanted(o, "mamba2", 1, [], "accuracy")
    assert len(wanted) == o.sweep.runs() == 8 and [run.lr for run in wanted] == [0.1] * 4 + [0.2] * 4
    starts = grid.starts(o)
    assert starts == [(0.5, 1.0), (0.5, 0.1), (0.1, 1.0), (0.1, 0.1)]
    curve = {"steps": [10, 20, 30], "loss": {}, "accuracy": {"2": [0.1, 0.5, 0.4], "9": [0.9, 0.9, 0.9]}}
    runs = []
    for i, run in enumerate(wanted):
        record = run.record()
        assert grid.as_run(record) == run
        runs.append(line("mamba2", run.lr, 0, abs(i - 5) / 10, i / 10) | record | {"curve": curve})
    rows = summary.rows(runs, ["mamba2"], starts=starts)
    assert [(row.start, row.lr) for row in rows] == list(zip(starts, [0.2, 0.2, 0.2, 0.1], strict=True))
    assert rows[1].losses == (0.0,) and rows[1].halfway() == [20]
    short = [run | {"curve": {"steps": [], "loss": {}, "accuracy": {}}} for run in runs]
    assert not any(row.curves for row in summary.rows(short, ["mamba2"], starts=starts))
    about = summary.About("accuracy", "accuracy", "tokens", "parity", {"a guess": 0.5}, 2.0)
    table = report.every_rate(summary.rows_by_lr(runs, ["mamba2"], [1], "accuracy", starts), about)
    assert "| mixer | write start | time step | learning rate | learned | steps to half | 4" in table
    assert "| Mamba2's decay with unit keys | 0.5 | 0.1 | 0.2 | 1 of 1 | 20 | 50.0 | 25.0 |" in table


def test_a_run_without_starts_has_none():
    assert grid.Run("mamba2", 0.1, 0).record() == {"mixer": "mamba2", "lr": 0.1, "seed": 0, "scale": 1}


def line(mixer, lr, seed, loss, accuracy):
    return {"mixer": mixer, "lr": lr, "seed": seed, "scale": 1, "val_loss": loss, "val_accuracy": 0.0,
            "test_accuracy": {"4": accuracy, "8": accuracy / 2}}  # fmt: skip


def test_learning_rate_is_chosen_by_mean_validation_loss():
    runs = [line("mamba2", 0.1, s, loss, 0.9) for s, loss in enumerate([1.0, 3.0])]
    runs += [line("mamba2", 0.2, s, loss, acc) for s, (loss, acc) in enumerate([(1.5, 0.2), (1.6, 0.4)])]
    runs += [line("mamba2", 0.3, 0, 0.1, 1.0), line("mamba2", 0.3, 1, None, 0.0)]  # one diverged
    runs += [line("delta_net", 0.1, s, None, 0.5) for s in (0, 1)]
    mamba, delta = summary.rows(runs, ["mamba2", "delta_net"])
    assert mamba.mixer == "mamba2" and mamba.lr == 0.2 and delta.lr == 0.1
    assert mamba.scores == {4: [0.2, 0.4], 8: [0.1, 0.2]}


def test_other_seeds_run_at_the_best_learning_rate():
    """They wait until every learning rate was tried by the first seeds, and do not count for the choice."""
    o = options(seeds=3, lr_seeds=1, mixers=("mamba2",))
    assert o.sweep.runs() == 4
    tried = [line("mamba2", lr, 0, loss, 0.5) for lr, loss in ((0.01, 2.0), (0.03, 1.0))]
    assert grid.wanted(o, "mamba2", 1, tried[:1], "accuracy") == [
        grid.Run("mamba2", lr, 0) for lr in (0.01, 0.03)
    ]
    all_runs = grid.wanted(o, "mamba2", 1, tried, "accuracy")
    assert all_runs[2:] == [grid.Run("mamba2", 0.03, seed) for seed in (1, 2)]
    worse = [line("mamba2", 0.03, seed, 9.0, 0.25 * seed) for seed in (1, 2)]
    [row] = summary.rows(tried + worse, ["mamba2"])
    assert row.lr == 0.03 and row.scores[4] == [0.5, 0.25, 0.5]


def test_figure(tmp_path, monkeypatch):
    """A line is a seed, its points stand on their ticks; the legend has mixers first, with how many have learned."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, format: figures.append(figure))
    rows = [
        summary.Row("mamba2", 0.1, {4: [1.0, 1.0, 1.0], 16: [0.5, 0.9, 1.0]}, losses=(0.1, 0.1, 0.1)),
        summary.Row("delta_net", 0.1, {4: [0.2, 0.6, 0.7], 16: [0.1, 0.1, 0.4]}, losses=(1.4, 0.2, 0.1)),
    ]
    figure_lib.draw_sweep(
        tmp_path / "figure.png",
        rows[::-1],
        axis="tokens",
        label="accuracy",
        trained=8,
        chance={"a guess": 0.25},
        caption="a task",
        answers=4.0,
    )
    [figure] = figures
    [axes], [legend] = figure.axes, figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["Mamba2's decay with unit keys, 3 of 3 learned", "DeltaNet, 2 of 3 learned", "a guess"]
    assert legend.get_title().get_text() == "a task"
    ticks = [tick.get_text() for tick in axes.get_xticklabels()]
    assert ticks == ["4\n", "8\nlargest in training", "16\n"]
    *seeds, guess = axes.lines
    assert list(guess.get_ydata()) == [25, 25]
    np.testing.assert_array_equal([line.get_xdata() for line in seeds], [[4, 16]] * 6)
    values = [seed for row in rows for seed in zip(*row.scores.values(), strict=True)]
    np.testing.assert_allclose([line.get_ydata() for line in seeds], 100 * np.array(values))
    assert [line.get_color() for line in seeds] == [STYLES[row.mixer].color for row in rows for _ in range(3)]
    # without colour: marker, filling and line differ
    assert len({style[1:4] for style in STYLES.values()}) == len(STYLES)
    colors = [style.color for name, style in STYLES.items() if "product" not in name]
    assert len({*colors}) == len(colors)


def test_rules_look_alike_everywhere():
    """A label of a rule gets the look of its mixer, the most exact one; a notebook's curve, too."""
    assert all(style_of(MIXERS[name].label) is style for name, style in STYLES.items())
    assert style_of("delta rule, β = 1") is STYLES["delta_net"]
    assert style_of("the Gated delta rule") is STYLES["gated_delta_net"]
    assert style_of("a rule of thumb") is None
    x = np.arange(2.0)
    axes = retrieval_curves(x, {"anything": x, "delta rule": x}, ax=Figure().subplots())
    assert [line.get_color() for line in axes.lines[:2]] == [COLORS[0], STYLES["delta_net"].color]


@pytest.mark.parametrize("trigram", [1.5, 3.5])
def test_figure_of_losses(tmp_path, monkeypatch, trigram):
    """A simple method above every loss is in the caption alone, with its loss; one among them is a line.

    What runs start with has panels of its own.
    """
    figures, starts = [], [summary.Start(write_start=x) for x in (0.5, 0.06)]
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, format: figures.append(figure))
    figure_lib.draw_sweep(
        tmp_path / "figure.png",
        [summary.Row("mamba2", 0.1, {4: [2.0, 2.1], 16: [1.0, 1.1]}, start=x) for x in starts],
        axis="bytes",
        label="bits per byte",
        trained=8,
        chance={"bigram": 4.0, "trigram": trigram},
        caption="a text",
        percent=False,
    )
    [figure] = figures
    [axes, other], [legend] = figure.axes, figure.legends
    assert [x.get_title() for x in (axes, other)] == ["write start 0.5", "write start 0.06"]
    assert len(axes.lines) == len(other.lines)
    lines = [line.get_ydata()[0] for line in axes.lines if len({*line.get_ydata()}) == 1]
    said = legend.get_title().get_text()
    assert lines == ([1.5] if trigram == 1.5 else [])
    assert ("bigram 4.000" in said, "trigram 3.500" in said) == (True, trigram == 3.5)
    assert axes.get_ylim()[1] < 2.5
    assert axes.get_xlabel() == "place in a test sequence, up to (bytes)"


def test_figure_over_scales(tmp_path, monkeypatch):
    """A panel for each test, with what the scales mean along the axis, and the heading fits."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, format: figures.append(figure))
    rows = [summary.Row("mamba2", 0.1, {4: [0.1 * s, 0.2 * s], 8: [0.3, 0.4]}, s) for s in (1, 2)]
    size = dict(axis="pairs", label="accuracy", trained=8, chance={"a guess": 0.25}, caption="a task " * 25)
    figure_lib.draw_sweep(
        tmp_path / "figure.png", rows, **size, along=("numbers in the state", {1: 64, 2: 128})
    )
    [figure] = figures
    assert [axes.get_xlabel() for axes in figure.axes] == ["numbers in the state"] * 2
    assert [axes.get_title() for axes in figure.axes] == ["4 pairs", "8 pairs"]
    [legend] = figure.legends
    assert legend.get_window_extent().width < figure.bbox.width
    one, two, _ = figure.axes[0].lines
    np.testing.assert_allclose([one.get_xdata(), two.get_xdata()], [[64, 128]] * 2)
    np.testing.assert_allclose([one.get_ydata(), two.get_ydata()], [[10, 20], [20, 40]])


def test_figure_of_starts(tmp_path, monkeypatch):
    """A panel for each start, from the largest, with how many have learned, and the curve of every seed."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, format: figures.append(figure))
    curves = [
        {"steps": [10, 20], "accuracy": {"4": accuracy, "8": [0.0, 0.0]}}
        for accuracy in ([0.1, 0.6], [None, 0.4])
    ]
    rows = [
        summary.Row("delta_net", 0.1, {}, 1, summary.Start(start), (0.1, loss), tuple(curves))
        for start, loss in ((0.06, 0.2), (0.5, 0.69))
    ]
    figure_lib.draw_curves(tmp_path / "figure.png", rows, axis="pairs", label="accuracy", answers=2.0)
    [figure] = figures
    assert [axes.get_title() for axes in figure.axes] == [
        f"DeltaNet\nwrite start {start}\nlearning rate 0.1\n{learned} of 2 learned"
        for start, learned in ((0.5, 1), (0.06, 2))
    ]
    assert [axes.get_ylabel() for axes in figure.axes] == ["accuracy,\n4 pairs, %", ""]
    for axes in figure.axes:
        first, second = axes.lines
        np.testing.assert_allclose(first.get_ydata(), [10, 60])
        np.testing.assert_allclose(second.get_ydata(), [np.nan, 40])


def test_a_sweep_of_one_test_shows_every_learning_rate(tmp_path, monkeypatch):
    """One size has no curve along sizes: the figure has those of learning, a panel for each rate."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, format: figures.append(figure))
    about = summary.About.of(make_task(ParityOptions(), 4))
    o = options(seeds=1, lrs=(0.1, 0.2), mixers=("delta_net",))
    config = {
        "task": "sweep parity",
        "options": options_lib.to_json(o),
        "about": about._asdict(),
    }
    curve = {"steps": [10, 20], "accuracy": {"all": [0.5, 0.6]}}
    runs = [
        line("delta_net", lr, 0, loss, 0.5) | {"curve": curve, "test_accuracy": {"4": 0.5}}
        for lr, loss in ((0.1, 0.2), (0.2, 0.1))
    ]
    report.draw(tmp_path / "figure.png", config, runs)
    titles = [axes.get_title().splitlines() for axes in figures[0].axes]
    assert titles == [["DeltaNet", f"learning rate {lr:g}", "1 of 1 learned"] for lr in (0.1, 0.2)]


def test_the_middle_of_steps():
    """The median and the range; a seed that never comes there is later than all others."""
    assert report._middle([30, 10, 20]) == "20 (10 to 30)"
    assert report._middle([None, 10, 30]) == "30 (10 to -)"
    assert report._middle([7, 7]) == "7" and report._middle([None]) == "-"


def test_labels_and_captions_are_legible():
    """Labels of large sizes are short, and the last line of a caption is about as long as the others."""
    assert [figure_lib._tick(n) for n in (64, 512, 1000, 1024, 2048, 16384)] == [
        "64",
        "512",
        "1000",
        "1K",
        "2K",
        "16K",
    ]
    assert figure_lib._tick(0.0032) == "0.0032"
    text = "Python source as bytes, trained on rows of 2048, three seeds at the best of two rates. A line is one."
    for width in (30, 60, 100, 200):
        lines = figure_lib._balanced(text, width).splitlines()
        assert max(map(len, lines)) <= width and " ".join(lines) == text
        assert len(lines) == 1 or len(lines[-1]) > len(lines[0]) / 2
    assert figure_lib._balanced("", 30) == ""
