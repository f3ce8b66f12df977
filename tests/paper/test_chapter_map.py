"""The map of the chapters is drawn from their own lines."""

import json
import re

import pytest

from paper.interactive import chapter_map
from paper.interactive.chapter_map import LINE, LINK, Chapter, chapters

NOTHING = "nothing before it."


@pytest.mark.parametrize("chapter", chapters(), ids=lambda chapter: chapter.name)
def test_every_chapter_says_what_it_builds_on(chapter):
    """It builds on nothing, or on earlier chapters, and its links lead to them."""
    links = LINK.findall(chapter.line)
    assert links or chapter.line == LINE + NOTHING
    assert all(number < chapter.number for number in chapter.builds_on)
    assert [link for _, link in links] == [f"{chapters()[number - 1].name}.ipynb" for number in chapter.builds_on]


@pytest.mark.parametrize("texts", [["# One"], ["# One", f"{LINE}{NOTHING}", f"{LINE}[chapter 1](01-a.ipynb)."]])
def test_a_chapter_without_one_such_line_is_refused(tmp_path, monkeypatch, texts):
    monkeypatch.setattr(chapter_map, "ROOT", tmp_path)
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": t} for t in texts]}))
    with pytest.raises(
        ValueError, match=rf"a: expected one line that begins with \*\*Builds on\*\*, found {len(texts) - 1}"
    ):
        chapter_map._chapter(1, "I", "a")


def test_chapters_are_those_of_the_contents():
    assert [chapter.number for chapter in chapters()] == list(range(1, len(chapters()) + 1))
    first = chapters()[0]
    assert (first.name, first.builds_on) == ("01-the-standard-layer", ())
    assert chapters()[1].builds_on == (1,)


def test_a_curve_is_left_out_where_others_lead_the_same_way(monkeypatch):
    lines = ("", "[chapter 1](a)", "[chapter 2](b)", "[chapter 1](a), [chapter 3](c)")
    row = [Chapter(n, f"{n}", f"{n}", "I", line) for n, line in enumerate(lines, 1)]
    monkeypatch.setattr(chapter_map, "chapters", lambda: row)
    assert list(map(chapter_map.nearest, row)) == [[], [1], [2], [3]]


def test_the_map_has_a_link_for_each_chapter_and_a_curve_for_what_it_builds_on():
    page = chapter_map.chapter_map()
    assert re.findall(r'href="\.\./notebooks/([^"]+)\.html"', page) == [chapter.name for chapter in chapters()]
    assert page.count("<path ") == sum(len(chapter_map.nearest(chapter)) for chapter in chapters())
