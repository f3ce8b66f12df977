"""The slider over N/d has the figures of the closed forms that chapter 2 derives."""

import json
import re
from fractions import Fraction
from html import unescape

import pytest

from paper.interactive.cost_slider import FORMS, RATIOS, SHOWN, cost_slider, figures, saved

BACKWARD = {  # in units of N d^2, by r = N/d: theorem thm-freezing, and a fused kernel's 10 r
    ("learned", "reference"): lambda r: 16 + 8 * r,
    ("frozen", "reference"): lambda r: 12 + 8 * r,
    ("stopped", "reference"): lambda r: 8 + 2 * r,
    ("learned", "fast"): lambda r: 16 + 10 * r,
    ("frozen", "fast"): lambda r: 12 + 10 * r,
    ("stopped", "fast"): lambda r: 8 + 10 * r,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ratio", RATIOS)
def test_figures_are_those_of_the_theorem(form, ratio):
    at = figures(form, ratio)
    for variant in ("learned", "frozen", "stopped"):
        expected = [8 + 4 * ratio, BACKWARD[variant, form](ratio)]
        assert at["layer"][variant] == expected  # powers of two: no rounding
        # the feed-forward network of width 4 d has 8 d^2 weights: 16 forward, twice as much backward
        assert at["block"][variant] == [expected[0] + 16, expected[1] + 32]


def test_the_table_without_scripts_has_five_ratios_and_the_slider_all():
    page = cost_slider()
    data = json.loads(unescape(re.search(r'data-costs="([^"]*)"', page)[1]))
    assert [Fraction(text) for text in data["ratios"]] == RATIOS
    for form in FORMS:
        assert data["costs"][form][4] == [list(at.values()) for at in figures(form, RATIOS[4]).values()]
    rows = re.findall(r"<tr><td>(.*?)</tr>", page)
    assert len(rows) == len(SHOWN) == 5
    at = figures("reference", RATIOS[4])  # N = d: 36 units, of which freezing saves 4 and stopping 14
    assert saved(at["layer"], "frozen") == pytest.approx(100 * 4 / 36, rel=1e-12)
    assert saved(at["layer"], "stopped") == pytest.approx(100 * 14 / 36, rel=1e-12)
    assert rows[2].startswith("1</td><td>11.1 %</td><td>38.9 %</td>")
