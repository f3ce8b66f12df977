"""Figures and tables of runs say what the runs say."""

import pytest
from matplotlib import pyplot as plt

from paper import plots, run_plots
from paper.experiments.learning.analysis import Runs, judged
from paper.experiments.statistics import Decision

RULE = Decision(margin=0.05, level=0.05, higher_is_better=False)


def arm(name, *values):
    seeds = tuple(range(1, len(values) + 1))
    return Runs(name, RULE.settings(), seeds, {"bits": values}, ((),) * len(values), 10, 0)


LEARNED = arm("learned", 2.0, 2.1, 2.2, 2.3, 2.4)
WORSE = arm("frozen", 2.5, 2.6, 2.7, 2.8, 2.9)
LIKE = arm("tied", 2.01, 2.1, 2.2, 2.3, 2.4)


@pytest.fixture
def ax():
    figure, axes = plt.subplots()
    yield axes
    plt.close(figure)


def test_every_run_is_a_point_and_its_mean_a_bar(ax):
    run_plots.points(ax, {one.arm: one.values["bits"] for one in (LEARNED, WORSE)}, beside="learned")
    runs, mean, others, other_mean, line = ax.lines
    assert tuple(runs.get_xdata()) == LEARNED.values["bits"] and set(runs.get_ydata()) == {0}
    assert tuple(others.get_xdata()) == WORSE.values["bits"] and set(others.get_ydata()) == {1}
    assert mean.get_xdata() == pytest.approx([2.2]) and other_mean.get_xdata() == pytest.approx([2.7])
    assert line.get_xdata() == pytest.approx([2.2, 2.2])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["learned", "frozen"]
    assert ax.yaxis_inverted()


def test_differences_are_marked_by_what_the_rule_says(ax):
    found = {one.arm: judged(one, LEARNED, "bits") for one in (WORSE, LIKE)}
    run_plots.differences(ax, found, RULE)
    assert {bars.get_label(): list(bars.lines[0].get_xdata()) for bars in ax.containers} == {
        "worse": pytest.approx([0.5]),
        "equivalent": pytest.approx([0.002]),
    }
    band = ax.patches[0].get_extents().transformed(ax.transData.inverted())
    assert (band.x0, band.x1) == pytest.approx((-0.05, 0.05))


def test_each_outcome_has_a_look_of_its_own():
    assert len(set(run_plots.OUTCOMES.values())) == len({marker for _, marker in run_plots.OUTCOMES.values()}) == 6


def test_curves_go_through_the_means_and_show_the_runs(ax):
    run_plots.curves(ax, "frozen", [1, 4], [(3.0, 3.2), (2.0, 2.4)])
    line, *runs = ax.lines
    assert list(line.get_ydata()) == pytest.approx([3.1, 2.2]) and line.get_label() == "frozen"
    assert [tuple(some.get_ydata()) for some in runs] == [(3.0, 3.2), (2.0, 2.4)]
    assert {some.get_color() for some in (line, *runs)} == {plots.style("frozen")["color"]}
    with pytest.raises(ValueError, match="name: expected one of"):
        run_plots.curves(ax, "unknown", [1], [(1.0,)])


def test_a_table_has_means_ranges_differences_and_outcomes():
    rows = run_plots.table_rows((LEARNED, WORSE, arm("lone", 1.0)), LEARNED, "bits", digits=2)
    assert rows == [
        ("learned", "2.20 (2.00 to 2.40)", "", ""),
        ("frozen", "2.70 (2.50 to 2.90)", "+0.50 (+0.50 to +0.50)", "worse"),
        ("lone", "1.00 (1.00 to 1.00)", "", ""),
    ]
    assert run_plots.table_rows((LIKE,), LEARNED, "bits", scale=100, digits=1)[0][1] == "220.2 (201.0 to 240.0)"


def test_undominated_are_the_points_that_nothing_beats():
    points = {"slow": (3.0, 1.0), "slower": (4.0, 1.0), "fast": (1.0, 3.0), "worse": (1.0, 3.5), "middle": (2.0, 2.0)}
    assert run_plots.undominated(points) == ["fast", "middle", "slow"]
    assert run_plots.undominated(points | {"twin": (2.0, 2.0)}) == ["fast", "middle", "twin", "slow"]
    assert run_plots.undominated(points | {"all": (1.0, 1.0)}) == ["all"]


def test_a_frontier_names_what_nothing_beats_and_shows_its_runs(ax):
    arms = {"fast": (1.0, (3.0, 3.0, 3.3)), "slow": (2.0, (1.0, 2.0, 3.0)), "beaten": (2.5, (2.5, 2.5, 2.5))}
    assert run_plots.frontier(ax, arms, named=("beaten", "slow", "absent")) == ["fast", "slow"]
    drawn = [(list(line.get_xdata()), list(line.get_ydata())) for line in ax.lines]
    assert drawn[:2] == [([arms[name][0]] * 3, list(arms[name][1])) for name in ("fast", "slow")]
    others, joined, fast, slow, beaten = ax.lines[2:]
    assert [text.get_text() for text in ax.texts] == ["beaten"] and list(beaten.get_xdata()) == [2.5]
    assert others.get_label() == "other arms" and list(others.get_xdata()) == [2.5]
    assert list(joined.get_xdata()) == [1.0, 2.0] and list(joined.get_ydata()) == pytest.approx([3.1, 2.0])
    assert [line.get_label() for line in (fast, slow)] == ["fast", "slow"]
    assert fast.get_xdata() == [1.0] and fast.get_ydata() == pytest.approx([3.1])
    assert (fast.get_color(), fast.get_marker()) != (slow.get_color(), slow.get_marker())


def test_a_frontier_of_one_arm_has_no_others(ax):
    assert run_plots.frontier(ax, {"lone": (1.0, (2.0,))}) == ["lone"]
    assert "other arms" not in [line.get_label() for line in ax.lines]
