"""The figure of the landing page has the chances of the capacity law, and those of guessing."""

import json
import re
from html import unescape

import pytest

from ortho.theory.retrieval import capacity, found_chance
from paper.interactive import lookup


def test_figures_are_those_of_the_law_and_of_guessing():
    page = lookup.lookup_chance()
    data = json.loads(unescape(re.search(r'data-figures="([^"]*)"', page)[1]))
    width, tokens = (data[name][at] for name, at in zip(("widths", "tokens"), data["start"], strict=True))
    chance = data["chances"][data["start"][0]][data["start"][1]]
    assert chance == pytest.approx(found_chance(tokens - 1, width, lookup.D_MODEL), abs=1e-5)  # as it is rounded
    assert data["two"][:3] == ["50 %", "25 %", "12 %"]
    for width, row in zip(data["widths"], data["chances"], strict=True):
        found = sum(at - 1 <= capacity(width, lookup.D_MODEL) for at in data["tokens"])
        assert sum(chance >= 0.5 for chance in row) == found
    assert page.count("<polyline") == len(lookup.WIDTHS) + 1
    assert page.count('<th scope="row">') == len(lookup.WIDTHS) + 1
