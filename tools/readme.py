"""Keep the README's picture and findings as the landing page has them.

    python tools/readme.py [--check]

The landing page's cell `headline` draws the picture, which is copied to `book/_static/headline.svg`, and its cell
`findings` prints the findings, which are copied between the README's two markers, their links made relative to the
README. With `--check` nothing is written, and the exit status says whether both are current.
"""

import argparse
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

import nbformat

ROOT = Path(__file__).resolve().parent.parent
PAGE = "book/index.ipynb"
PICTURE = "book/_static/headline.svg"
README = "README.md"
START, END = "<!-- from the landing page, by tools/readme.py -->", "<!-- end of what the landing page says -->"


class ReadmeError(Exception):
    """The page or the README lacks what this tool looks for; the message names it."""


def cell(nb: Any, name: str, kind: str) -> tuple[dict[str, Any], str]:
    """A cell's metadata and its output of one MIME type. Raises ReadmeError where there is no such cell or output."""
    for found in nb.cells:
        if found.get("id") == name:
            for output in found.get("outputs", []):
                if kind in output.get("data", {}):
                    return found.metadata, output["data"][kind]
    raise ReadmeError(f"{PAGE}: expected a cell {name!r} with an output of type {kind}, found none: execute the page")


def moved(text: str) -> str:
    """The page's Markdown with its relative links as seen from the README."""
    folder = posixpath.dirname(PAGE)

    def link(match: re.Match[str]) -> str:
        return f"]({posixpath.normpath(posixpath.join(folder, match[1]))})"

    return re.sub(r"\]\(((?![a-z]+:|#)[^)]+)\)", link, text)


def read(root: Path, name: str) -> str:
    """The text of a file. Raises ReadmeError where there is none."""
    try:
        return (root / name).read_text(encoding="utf-8")
    except OSError as error:
        raise ReadmeError(f"{name}: expected a file that can be read ({error.strerror})") from error


def described(metadata: dict[str, Any]) -> str:
    """What the picture's cell says of it in words. Raises ReadmeError where it says nothing."""
    try:
        return str(metadata["mystnb"]["image"]["alt"])
    except KeyError as error:
        raise ReadmeError(
            f"{PAGE}: expected mystnb.image.alt in the metadata of the cell 'headline', found no {error}"
        ) from error


def wanted(root: Path = ROOT) -> dict[str, str]:
    """The texts of the picture and of the README as they should be, by path. Raises ReadmeError for what is missing."""
    nb = nbformat.reads(read(root, PAGE), as_version=4)
    metadata, picture = cell(nb, "headline", "image/svg+xml")
    findings = cell(nb, "findings", "text/markdown")[1]
    alt = described(metadata)
    readme = read(root, README)
    before, start, rest = readme.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ReadmeError(f"{README}: expected the lines {START!r} and {END!r}")
    new = f"\n\n![{alt}]({PICTURE})\n\n{moved(findings).strip()}\n\n"
    return {PICTURE: picture.strip() + "\n", README: before + start + new + end + after}


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Copy picture and findings from the landing page to the README.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something is not current")
    check = parser.parse_args(arguments).check
    try:
        texts = wanted(root)
    except ReadmeError as error:
        print(error, file=sys.stderr)
        return 1
    stale = [
        name
        for name, text in texts.items()
        if not (root / name).exists() or (root / name).read_text(encoding="utf-8") != text
    ]
    for name in stale:
        if check:
            print(f"{name} is not what {PAGE} says: run python tools/readme.py", file=sys.stderr)
        else:
            (root / name).write_text(texts[name], encoding="utf-8")
            print(f"{name} is current again")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
