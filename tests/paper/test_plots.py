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


def test_variants_are_told_apart_without_colour():
    variants = ("learned", "frozen", "stopped", "source")
    styles = [plots.style(name) for name in variants]
    assert len({(style["marker"], style["linestyle"]) for style in styles}) == len(variants)
    with pytest.raises(ValueError, match="name: expected one of 'learned'.*got 'thawed'"):
        plots.style("thawed")
