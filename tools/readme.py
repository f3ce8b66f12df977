"""Keep the answers and the picture of the two READMEs equal to those of the pages, in English and in Chinese.

    python tools/readme.py

The cell `answers` of the landing page and of the Chinese page prints the three answers, which are copied between the
two markers of its README, with links relative to it. The picture is a figure of chapter 4,
which is copied to `book/_static/headline.svg`. A test compares them.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

import nbformat

ROOT = Path(__file__).resolve().parent.parent
PAGE = "book/index.ipynb"
CHAPTER, FIGURE = "notebooks/04-on-the-clock.ipynb", "figure-speed-up"
PICTURE = "book/_static/headline.svg"
READMES = {"README.md": PAGE, "README.zh.md": "book/zh.ipynb"}  # and the pages that they follow
START, END = "<!-- from the landing page, by tools/readme.py -->", "<!-- end of what the landing page says -->"


def cell(page: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A cell's metadata and its output by MIME type. Raises LookupError if there is no such cell or output."""
    for found in nbformat.read(ROOT / page, as_version=4).cells:
        if found.get("id") == name:
            for output in found.get("outputs", []):
                if "data" in output:
                    return found.metadata, output["data"]
    raise LookupError(f"{page}: expected a cell {name!r} with an output, found none: execute the page")


def moved(text: str) -> str:
    """The page's Markdown with its relative links as seen from the README."""

    def link(match: re.Match[str]) -> str:
        return f"]({posixpath.normpath(posixpath.join(posixpath.dirname(PAGE), match[1]))})"

    return re.sub(r"\]\(((?![a-z]+:|#)[^)]+)\)", link, text)


def wanted() -> dict[str, str]:
    """The texts that the picture and the READMEs should have, by path. LookupError if something is missing."""
    metadata, picture = cell(CHAPTER, FIGURE)
    texts = {PICTURE: picture["image/svg+xml"].strip() + "\n"}
    for name, page in READMES.items():
        answers = moved(cell(page, "answers")[1]["text/markdown"]).strip()
        before, start, rest = (ROOT / name).read_text(encoding="utf-8").partition(START)
        _, end, after = rest.partition(END)
        if not (start and end):
            raise LookupError(f"{name}: expected the lines {START!r} and {END!r}")
        shown = f"![{metadata['mystnb']['image']['alt']}]({PICTURE})\n\n" if page == PAGE else ""
        texts[name] = f"{before}{start}\n\n{answers}\n\n{shown}{end}{after}"
    return texts


if __name__ == "__main__":
    for path, text in wanted().items():
        (ROOT / path).write_text(text, encoding="utf-8")
