"""The pictures of patterns, and the table of what they reach, hold what the definitions say."""

import json
from html.parser import HTMLParser

import pytest

from ortho.theory.reachability import reached
from paper.interactive.sparse_reach import LAYERS, PATTERNS, TOKENS, sparse_reach
from paper.plots import BLUE, ORANGE
from paper.schematics import patterns as pictures


class Page(HTMLParser):
    """Reads the table's rows as texts, and the data that the script gets."""

    def __init__(self, html):
        super().__init__()
        self.rows, self.layers = [], {}
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        if tag == "tr":
            self.rows.append([])
        self.layers = json.loads(dict(attributes).get("data-layers", "null")) or self.layers

    def handle_data(self, data):
        if self.rows:
            self.rows[-1].append(data)


def test_what_a_reader_can_set_is_what_layers_one_by_one_reach():
    page = Page(sparse_reach())
    assert [row[0] for row in page.rows[1:]] == list(PATTERNS) == list(page.layers)
    for row, (name, pattern) in zip(page.rows[1:], PATTERNS.items(), strict=True):
        mask = pattern.mask(TOKENS, is_causal=True)
        for count in range(1, LAYERS + 1):
            there = reached(*[mask] * count)[-1].tolist()
            assert [0 <= at <= count for at in page.layers[name]] == there
            assert row[count] == f"{100 * sum(there) / TOKENS:.0f}"


@pytest.mark.parametrize("name", [*pictures.PICTURES, pictures.SELECTED])
def test_cells_are_the_kept_pairs_and_near_ones_are_blue(name):
    mask = pictures.masks()[name]
    colours = pictures._colours(name, mask)
    assert [[colour is not None for colour in row] for row in colours] == [
        row[: i + 1] for i, row in enumerate(mask.tolist())
    ]
    assert not mask.triu(1).any()
    own = {colours[i][i] for i in range(pictures.TOKENS)}
    assert own == {BLUE} if name in pictures.PICTURES else own <= {ORANGE, None}


def test_every_picture_is_drawn():
    (axes,) = pictures.patterns().axes
    texts = [text.get_text() for text in axes.texts]
    assert texts[::2] == [*pictures.PICTURES, pictures.SELECTED]
    assert len(axes.patches) == len(pictures.masks()) * pictures.TOKENS * (pictures.TOKENS + 1) // 2
