"""Refuse typed figures in the words of the book.

    python -m tools.words [--mend]

A figure that code can compute is glued into the text or printed. Figures that were typed before this check existed are
listed in `typed_figures.json`, page by page. The list may only shrink: `--mend` removes figures that are gone from the
pages.
"""

import argparse
import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import nbformat
import yaml
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from myst_parser.config.main import MdParserConfig
from myst_parser.parsers.mdit import create_md_parser

from tools.assertions import parsed
from tools.notebooks import ROOT, every_notebook, replace, title

TYPED = ROOT / "tools" / "typed_figures.json"

# Numbers in digits. One that is part of a name (GPT-2, S0.1.3a, 1-norm) does not count.
FIGURE = re.compile(r"(?<![\w.,–-])\d(?:[\d,]*\d)?(?:\.\d+)?(?![\w-])(?: ?%)?")
# Whole numbers up to twelve count as words, spelled out or not; percentages never do.
WORD = re.compile(r"\d|1[0-2]")
# Numbers that no code could compute: what a source says, in quotation marks; papers; years; places; versions.
EXEMPT = re.compile(
    r"""["“][^"”]*["”]|arXiv:\s*[\d.]+|(?<![\d,.])(?:19|20)\d\d(?![\d%]|,\d)"""
    r"|\b(?:chapter|section|part|appendix|table|figure|equation|line|version|Python)s?"
    r"\s+\d[\d.]*(?:(?:,|,? and|,? or| to|–)\s*\d[\d.]*)*",
    re.IGNORECASE,
)
OPTIONS = re.compile(r"\A(?::[\w-]+:.*\n)*")
DIRECTIVE = re.compile(r"\{(?!math\})([\w:-]+)\}\s*(.*)")

CONFIG = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
MARKDOWN = create_md_parser(MdParserConfig(enable_extensions=CONFIG["parse"]["myst_enable_extensions"]), RendererHTML)


def pages() -> list[Path]:
    return [*every_notebook(), *sorted((ROOT / "book").rglob("*.md"))]


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a text in Markdown, without code, roles and formulas."""
    found: list[str] = []
    for token in MARKDOWN.parse(text):
        if token.type == "inline":
            found.append(words(token.children or []))
        elif token.type in ("fence", "colon_fence") and (directive := DIRECTIVE.match(token.info)):
            found += paragraphs(directive[2]) + paragraphs(OPTIONS.sub("", token.content))
    return found


def words(tokens: list[Token]) -> str:
    """The words of a paragraph, with a mark in place of each part that is left out.

    A link whose text is a number is left out, too, since the number names a chapter.
    """
    text, begun = "", 0
    for token in tokens:
        if token.type == "link_open":
            begun = len(text)
        elif token.type == "link_close" and re.fullmatch(r"[\d.]+", text[begun:].strip()):
            text = text[:begun] + "□"
        elif token.type in ("softbreak", "hardbreak"):
            text += " "
        elif token.type in ("text", "image"):
            text += token.content
        elif not token.nesting and token.type != "html_inline":
            text += "□"
    return text


def texts(path: Path) -> Iterator[tuple[str, str]]:
    """The parts of a page: each "text" or "code", and what it says."""
    if path.suffix == ".md":
        yield "text", path.read_text(encoding="utf-8")
        return
    for cell in nbformat.read(path, as_version=4).cells:
        yield ("text" if cell.cell_type == "markdown" else "code"), cell.source


def sentences(source: str) -> Iterator[str]:
    """The strings in code that are sentences or captions: those of three words and more."""
    nodes = list(ast.walk(parsed(source)))
    parts = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in (node for node in nodes if node not in parts):
        match node:
            case ast.JoinedStr(values=values):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "□" for part in values)
            case ast.Constant(value=str(text)):
                pass
            case _:
                continue
        if len(re.findall(r"[^\W\d_]{2,}", text)) > 2:
            yield text


def typed(said: Iterable[tuple[str, str]]) -> list[str]:
    """The figures that are typed into a page's words and captions."""
    found = []
    for kind, text in said:
        for part in [text] if kind == "text" else sentences(text):
            found += [figure for paragraph in paragraphs(part) for figure in figures(paragraph)]
    return found


def figures(paragraph: str) -> list[str]:
    return [figure for figure in FIGURE.findall(EXEMPT.sub("□", paragraph)) if not WORD.fullmatch(figure)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Refuse typed figures.")
    parser.add_argument("--mend", action="store_true", help="take figures off the list that are no longer there")
    options = parser.parse_args(arguments)

    listed = {page: Counter(found.split(", ")) for page, found in json.loads(TYPED.read_text(encoding="utf-8")).items()}
    typed_now = {title(path): Counter(typed(texts(path))) for path in pages()}
    kept = {page: found & listed.get(page, Counter()) for page, found in typed_now.items()}
    faults = [
        f"{page} has a typed figure: {figure}"
        for page, found in typed_now.items()
        for figure in (found - kept[page]).elements()
    ]
    if options.mend:
        lines = {page: ", ".join(sorted(found.elements())) for page, found in kept.items() if found}
        replace(TYPED, json.dumps(lines, indent=1, sort_keys=True) + "\n")
    else:
        mended = ((page, before - kept.get(page, Counter())) for page, before in listed.items())
        faults += [
            f"{page} no longer has {', '.join(gone)}: python -m tools.words --mend" for page, gone in mended if gone
        ]
    print(*faults, sep="\n", end="\n" if faults else "", file=sys.stderr)
    print(f"{sum(found.total() for found in kept.values())} typed figures are left")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
