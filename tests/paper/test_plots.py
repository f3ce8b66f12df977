"""The look of the figures: each name has its look, equal figures have equal bytes, and ticks are at the sizes."""

import io

import matplotlib as mpl
import pytest
from matplotlib import pyplot as plt

from paper import plots


@pytest.fixture(autouse=True)
def look():
    with mpl.rc_context():
        mpl.use("agg")
        plots.use()
        yield
        plt.close("all")


def drawing():
    fig, axis = plots.figure()
    axis.plot([128, 1024], [1, 2], **plots.style("frozen"))
    plots.powers_of_two(axis, [128, 1024])
    file = io.StringIO()
    fig.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return axis, file.getvalue()


def test_equal_figures_have_equal_bytes():
    assert drawing()[1] == drawing()[1]


def test_ticks_are_the_sizes():
    axis, _ = drawing()
    assert [text.get_text() for text in axis.get_xticklabels()] == ["128", "1,024"]


@pytest.mark.parametrize("rows", [1, 3])
def test_a_grid_has_rows_of_one_height(rows):
    figure, axes = plots.grid(rows, 2.5, columns=2, more=0.5, sharey="row")
    assert list(figure.get_size_inches()) == [7, 0.5 + 2.5 * rows]
    assert axes.shape == (rows, 2)
    assert all(left.get_shared_y_axes().joined(left, right) for left, right in axes)


@pytest.mark.parametrize(("sideways", "along"), [(False, 1), (True, 0)])
def test_bars_reach_from_the_low_end_to_the_high_end(sideways, along):
    axis = plots.figure()[1]
    plots.error_bars(axis, [10, 20], [(1, 2, 4), (5, 5, 8)], sideways=sideways, linestyle="none", label="both")
    (bars,) = axis.containers
    points, _, (lines,) = bars
    assert bars.get_label() == "both"
    assert list(points.get_xydata()[:, along]) == [2, 5]
    assert list(points.get_xydata()[:, 1 - along]) == [10, 20]
    assert [list(ends[:, along]) for ends in lines.get_segments()] == [[1, 4], [5, 8]]


def test_variants_are_told_apart_without_colour():
    variants = ("learned", "frozen", "stopped", "source")
    styles = [plots.style(name) for name in variants]
    assert len({(style["marker"], style["linestyle"]) for style in styles}) == len(variants)
    with pytest.raises(ValueError, match="name: expected one of 'learned'.*got 'thawed'"):
        plots.style("thawed")
