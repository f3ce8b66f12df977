"""The map of the chapters is drawn from their own lines."""

import json
import re

import pytest

from paper.interactive import chapter_map
from paper.interactive.chapter_map import Chapter, chapters, faults

CHAPTER = Chapter(7, "07-linear-attention", "Linear attention", "II", ())


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("# Title\n\n**Builds on** nothing before it.", []),
        ("**Builds on** [chapter 1](01-the-standard-layer.ipynb),\n[chapter 2](02-what-freezing-removes.ipynb).", []),
        ("# Title", ["expected one line that begins with **Builds on**, found 0"]),
        ("**Builds on** [chapter 8](08-favor-unbiased.ipynb).", ["chapter 8 is not before it"]),
        (
            "**Builds on** [chapter 1](02-what-freezing-removes.ipynb).",
            ["02-what-freezing-removes.ipynb is not chapter 1"],
        ),
        ("**Builds on** much.", ["expected links to chapters or 'nothing before it.', found 'much.'"]),
    ],
)
def test_faults_of_a_line(line, wrong):
    assert faults(CHAPTER, line) == wrong


@pytest.mark.parametrize("chapter", chapters(), ids=lambda chapter: chapter.name)
def test_every_chapter_says_what_it_builds_on(chapter):
    cells = json.loads((chapter_map.ROOT / "notebooks" / f"{chapter.name}.ipynb").read_text(encoding="utf-8"))["cells"]
    text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    assert faults(chapter, text) == []
    assert chapter.builds_on is not None


def test_chapters_are_those_of_the_contents():
    assert [chapter.number for chapter in chapters()] == list(range(1, len(chapters()) + 1))
    first = chapters()[0]
    assert (first.name, first.builds_on) == ("01-the-standard-layer", ())
    assert chapters()[1].builds_on == (1,)


def test_a_curve_is_left_out_where_others_lead_the_same_way(monkeypatch):
    row = [Chapter(n, f"{n}", f"{n}", "I", before) for n, before in ((1, ()), (2, (1,)), (3, (2,)), (4, (1, 3)))]
    monkeypatch.setattr(chapter_map, "chapters", lambda: row)
    assert list(map(chapter_map.nearest, row)) == [[], [1], [2], [3]]


def test_the_map_has_a_link_for_each_chapter_and_a_curve_for_what_it_builds_on():
    page = chapter_map.chapter_map()
    assert re.findall(r'href="\.\./notebooks/([^"]+)\.html"', page) == [chapter.name for chapter in chapters()]
    assert page.count("<path ") == sum(len(chapter_map.nearest(chapter)) for chapter in chapters())
