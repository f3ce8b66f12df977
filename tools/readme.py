"""Keep the answers and the picture of the two READMEs equal to those of the pages, in English and in Chinese.

    python tools/readme.py

The cell `answers` of the landing page and of the Chinese page prints the three answers, which are copied between the
two markers of its README, with links relative to it. The cell `headline` of the page of results draws the picture,
which is copied to `book/_static/headline.svg`. A test compares them.
"""

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

import nbformat

ROOT = Path(__file__).resolve().parent.parent
PAGE = "book/index.ipynb"
RESULTS = "book/results.ipynb"
PICTURE = "book/_static/headline.svg"
READMES = {"README.md": PAGE, "README.zh.md": "book/zh.ipynb"}  # and the pages that they follow
START, END = "<!-- from the landing page, by tools/readme.py -->", "<!-- end of what the landing page says -->"


class ReadmeError(Exception):
    """The page or the README lacks what this tool looks for; the message names it."""


def cell(root: Path, page: str, name: str, kind: str) -> tuple[dict[str, Any], Any]:
    """A cell's metadata and its output of one MIME type. Raises ReadmeError if there is no such cell or output."""
    for found in nbformat.reads(read(root, page), as_version=4).cells:
        if found.get("id") == name:
            for output in found.get("outputs", []):
                if kind in output.get("data", {}):
                    return found.metadata, output["data"][kind]
    raise ReadmeError(f"{page}: expected a cell {name!r} with an output of type {kind}, found none: execute the page")


def moved(text: str) -> str:
    """The page's Markdown with its relative links as seen from the README."""
    folder = posixpath.dirname(PAGE)

    def link(match: re.Match[str]) -> str:
        return f"]({posixpath.normpath(posixpath.join(folder, match[1]))})"

    return re.sub(r"\]\(((?![a-z]+:|#)[^)]+)\)", link, text)


def read(root: Path, name: str) -> str:
    """The text of a file. Raises ReadmeError if it cannot be read."""
    try:
        return (root / name).read_text(encoding="utf-8")
    except OSError as error:
        raise ReadmeError(f"{name}: expected a file that can be read ({error.strerror})") from error


def described(metadata: dict[str, Any]) -> str:
    """The picture's description in words, from its cell's metadata. Raises ReadmeError if there is none."""
    try:
        return str(metadata["mystnb"]["image"]["alt"])
    except KeyError as error:
        raise ReadmeError(
            f"{RESULTS}: expected mystnb.image.alt in the metadata of the cell 'headline', found no {error}"
        ) from error


def wanted(root: Path = ROOT) -> dict[str, str]:
    """The texts that the picture and the READMEs should have, by path. ReadmeError if something is missing."""
    metadata, picture = cell(root, RESULTS, "headline", "image/svg+xml")
    texts = {PICTURE: picture.strip() + "\n"}
    for name, page in READMES.items():
        answers = moved(cell(root, page, "answers", "text/markdown")[1]).strip()
        before, start, rest = read(root, name).partition(START)
        _, end, after = rest.partition(END)
        if not (start and end):
            raise ReadmeError(f"{name}: expected the lines {START!r} and {END!r}")
        shown = f"![{described(metadata)}]({PICTURE})\n\n" if page == PAGE else ""
        texts[name] = f"{before}{start}\n\n{answers}\n\n{shown}{end}{after}"
    return texts


def stale(root: Path = ROOT) -> dict[str, str]:
    """The wanted texts, by path, of files that are missing or differ."""
    return {name: text for name, text in wanted(root).items() if not (root / name).exists() or read(root, name) != text}


def main(root: Path = ROOT) -> int:
    try:
        texts = stale(root)
    except ReadmeError as error:
        print(error, file=sys.stderr)
        return 1
    for name, text in texts.items():
        (root / name).write_text(text, encoding="utf-8")
        print(f"{name} is current again")
    return 0


if __name__ == "__main__":
    sys.exit(main())
