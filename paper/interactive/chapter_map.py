"""A map of the chapters, each a link to its page: which builds on which, read from the chapters' own lines."""

import json
import re
import textwrap
from functools import cache
from html import escape
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[2]
LINE = "**Builds on** "
LINK = re.compile(r"\[chapter (\d+)\]\(([^)]+)\)")
WIDTH, BOX, HEIGHT, STEP = 720, (104, 58), 94, 119  # sizes of the picture, of a chapter's box, of a row, of a column


class Chapter(NamedTuple):
    """A chapter: number, file without ending, title, part, and the line that says which chapters it builds on."""

    number: int
    name: str
    title: str
    part: str
    line: str

    @property
    def builds_on(self) -> tuple[int, ...]:
        return tuple(int(number) for number, _ in LINK.findall(self.line))


@cache
def chapters() -> list[Chapter]:
    """All numbered chapters, in their order."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    pages = [(p["caption"], one["file"]) for p in toc["parts"] if p.get("numbered") for one in p["chapters"]]
    return [_chapter(number, part, page) for number, (part, page) in enumerate(pages, 1)]


def _chapter(number: int, part: str, page: str) -> Chapter:
    cells = json.loads((ROOT / f"{page}.ipynb").read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    title = next(line for line in texts[0].splitlines() if line.startswith("# "))[2:]
    paragraphs = "\n\n".join(texts).split("\n\n")
    lines = [" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.lstrip().startswith(LINE)]
    if len(lines) != 1:
        raise ValueError(f"{page}: expected one line that begins with {LINE.strip()}, found {len(lines)}")
    return Chapter(number, page.rpartition("/")[2], title, part, lines[0])


def nearest(chapter: Chapter) -> list[int]:
    """The chapters it builds on, without those that another of them builds on, directly or through further chapters."""
    before = {one.number: set[int]() for one in chapters()}
    for one in chapters():
        before[one.number].update(*({n} | before[n] for n in one.builds_on))
    named = chapter.builds_on
    return [number for number in named if not any(number in before[other] for other in named)]


def chapter_map(folder: str = "../notebooks") -> str:
    """The map as HTML, a row for each part; links lead to pages in `folder`."""
    parts = list(dict.fromkeys(chapter.part for chapter in chapters()))
    rows = {part: [chapter for chapter in chapters() if chapter.part == part] for part in parts}
    places = {
        chapter.number: (_left(row) + column * STEP + BOX[0] / 2, row * HEIGHT + 32 + BOX[1] / 2)
        for row, part in enumerate(parts)
        for column, chapter in enumerate(rows[part])
    }
    captions = "".join(
        f'<text class="part" x="1" y="{row * HEIGHT + 24}">{escape(part)}</text>' for row, part in enumerate(parts)
    )
    edges = "".join(_edge(places[n], places[one.number]) for one in chapters() for n in nearest(one))
    boxes = "".join(_box(one, places[one.number], f"{folder}/{one.name}.html") for one in chapters())
    return (
        f'<div class="chapter-map"><svg viewBox="0 0 {WIDTH} {len(parts) * HEIGHT + 4}" role="group" '
        f'aria-label="Which chapter builds on which; the head of each chapter says the same">'
        f"{edges}{captions}{boxes}</svg></div>"
    )


def _left(row: int) -> float:
    """Where a row begins: every other one is half a column further, so that curves pass between its boxes."""
    return 1 + row % 2 * STEP / 2


def _edge(start: tuple[float, float], end: tuple[float, float]) -> str:
    """A curve from a box's lower edge to the upper edge of a box below; within a row, over the boxes between two."""
    (x, y), (u, v), half = start, end, BOX[1] / 2
    if y == v:
        bend = f"C {x} {y - half - 14}, {u} {v - half - 14}, {u} {v - half}"
        return f'<path d="M {x} {y - half} {bend}"/>'
    return f'<path d="M {x} {y + half} C {x} {y + half + 40}, {u} {v - half - 40}, {u} {v - half}"/>'


def _box(chapter: Chapter, centre: tuple[float, float], address: str) -> str:
    (x, y), (width, height) = centre, BOX
    lines = textwrap.wrap(
        f"{chapter.number} {chapter.title}", 18, max_lines=3, placeholder=" …", break_long_words=False
    )
    before = ", ".join(map(str, chapter.builds_on))
    lines += [f"\N{LEFTWARDS ARROW} {before}"] if before else []
    first = y - 6 * (len(lines) - 1) + 3.5
    words = "".join(f'<tspan x="{x}" y="{first + 12 * i}">{escape(line)}</tspan>' for i, line in enumerate(lines))
    return (
        f'<a href="{address}"><title>{chapter.number} {escape(chapter.title)}; builds on '
        f"{before or 'nothing before it'}</title>"
        f'<rect x="{x - width / 2}" y="{y - height / 2}" width="{width}" height="{height}" rx="5"/>'
        f"<text>{words}</text></a>"
    )
