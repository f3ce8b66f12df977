"""The book's pages of the story and of the systems, in the order of the table of contents."""

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml

__all__ = ["Page", "chapters", "link", "pages"]

ROOT = Path(__file__).resolve().parents[1]


class Page(NamedTuple):
    """A notebook of the book.

    number
        The chapter's number; None for a page of a system.
    name
        Its path below the repository's root, without ending.
    """

    number: int | None
    name: str
    title: str


@cache
def pages() -> list[Page]:
    """The chapters, and then the pages of systems."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    found, number = [], 0
    for part in toc["parts"]:
        for one in part["chapters"]:
            numbered = part.get("numbered", False)
            number += numbered
            if numbered or one["file"].startswith("notebooks/"):
                found.append(Page(number if numbered else None, one["file"], _title(one["file"])))
    return found


def chapters() -> list[Page]:
    """The numbered chapters; `chapters()[0]` is chapter 1."""
    return [page for page in pages() if page.number]


def link(name: str, words: str = "") -> str:
    """A link in Markdown, from a page in `book/` or `notebooks/`, to a page by the last part of its path.

    Parameters
    ----------
    name
        '08-one-projection-twice', or 'serving' for a page of a system.
    words
        What the link says: by default 'chapter 8', or the page's title.

    Raises
    ------
    ValueError
        if no page has this name
    """
    for page in pages():
        if page.name.rpartition("/")[2] == name:
            shown = words or (f"chapter {page.number}" if page.number else page.title)
            return f"[{shown}](../{page.name}.ipynb)"
    raise ValueError(f"name: expected the name of a page in _toc.yml, got {name!r}")


def _title(page: str) -> str:
    cells = json.loads((ROOT / f"{page}.ipynb").read_text(encoding="utf-8"))["cells"]
    first = "".join(next(cell for cell in cells if cell["cell_type"] == "markdown")["source"])
    return next(line for line in first.splitlines() if line.startswith("# "))[2:]
