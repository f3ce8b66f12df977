"""Refuse what the words of the book may not have: typed figures, and formulas with macros that MathJax does not know.

    python -m tools.words [--mend]

A figure that code can compute is glued into the text or printed. Figures that were typed before this was checked are
listed in `typed_figures.json`, page by page; the list may only shrink, and `--mend` takes off what is no longer there.
"""

import argparse
import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import nbformat
from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.amsmath import amsmath_plugin
from mdit_py_plugins.colon_fence import colon_fence_plugin
from mdit_py_plugins.deflist import deflist_plugin
from mdit_py_plugins.dollarmath import dollarmath_plugin
from mdit_py_plugins.myst_blocks import myst_block_plugin
from mdit_py_plugins.myst_role import myst_role_plugin

from tools.assertions import parsed
from tools.notebooks import ROOT, every_notebook, replace, title

TYPED = ROOT / "tools" / "typed_figures.json"
MATHJAX = ROOT / "book" / "_static" / "tex-svg-full.js"

# Numbers in digits. One that is part of a name (GPT-2, S0.1.3a, 1-norm) is none.
FIGURE = re.compile(r"(?<![\w.,–-])\d(?:[\d,]*\d)?(?:\.\d+)?(?![\w-])(?: ?%)?")
# Whole numbers up to twelve are words, whether spelled out or not. A share never is.
WORD = re.compile(r"\d|1[0-2]")
# Numbers that no code could compute: what a source says, in quotation marks; papers; years; places; versions.
EXEMPT = re.compile(
    r"""["“][^"”]*["”]|arXiv:\s*[\d.]+|(?<![\d,.])(?:19|20)\d\d(?![\d%]|,\d)"""
    r"|\b(?:chapter|section|part|appendix|table|figure|equation|line|version|Python)s?"
    r"\s+\d[\d.]*(?:(?:,|,? and|,? or| to|–)\s*\d[\d.]*)*",
    re.IGNORECASE,
)
OPTIONS = re.compile(r"\A(?::[\w-]+:.*\n)*")
DIRECTIVE = re.compile(r"\{([\w:-]+)\}\s*(.*)")
COMMAND = re.compile(r"\\(?:(begin|end)\s*\{([^{}]*)\}|([A-Za-z]+|.))", re.DOTALL)

MARKDOWN = MarkdownIt("commonmark").enable("table")
for plugin in (
    amsmath_plugin,
    colon_fence_plugin,
    deflist_plugin,
    dollarmath_plugin,
    myst_block_plugin,
    myst_role_plugin,
):
    MARKDOWN.use(plugin)


# ------------------------------------------------------------------------------------------------------ prose, formulas


def pages() -> list[Path]:
    return [*every_notebook(), *sorted((ROOT / "book").rglob("*.md"))]


def split(text: str) -> tuple[list[str], list[str]]:
    """The paragraphs of a text in Markdown, without code, roles and formulas; and its formulas."""
    prose: list[str] = []
    formulas: list[str] = []
    for token in MARKDOWN.parse(text):
        if token.type == "inline":
            prose.append(words(token.children or []))
            formulas += [child.content for child in token.children or [] if is_formula(child)]
        elif is_formula(token):
            formulas.append(token.content)
        elif token.type in ("fence", "colon_fence") and (directive := DIRECTIVE.match(token.info)):
            for part in (directive[2], OPTIONS.sub("", token.content)):
                inner = split(part)
                prose += inner[0]
                formulas += inner[1]
    return prose, formulas


def is_formula(token: Token) -> bool:
    info = token.info.strip()
    return (
        token.type.startswith("math")
        or token.type == "amsmath"
        or (token.type == "myst_role" and token.meta["name"] == "math")
        or (token.type in ("fence", "colon_fence") and info.startswith("{math}"))
    )


def words(tokens: list[Token]) -> str:
    """The words of a paragraph. What is left out leaves a mark; a link whose text is a number names a chapter."""
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
    """The parts of a page: each "text", "code" or "output", and what it says."""
    if path.suffix == ".md":
        yield "text", path.read_text(encoding="utf-8")
        return
    for cell in nbformat.read(path, as_version=4).cells:
        yield ("text" if cell.cell_type == "markdown" else "code"), cell.source
        for output in cell.get("outputs", []):
            yield "output", output.get("data", {}).get("text/markdown", "")


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


# -------------------------------------------------------------------------------------------------------------- figures


def typed(said: Iterable[tuple[str, str]]) -> list[str]:
    """The figures that are typed into a page's words and captions."""
    found = []
    for kind, text in said:
        for part in [text] if kind == "text" else sentences(text) if kind == "code" else []:
            found += [figure for paragraph in split(part)[0] for figure in figures(paragraph)]
    return found


def figures(paragraph: str) -> list[str]:
    return [figure for figure in FIGURE.findall(EXEMPT.sub("□", paragraph)) if not WORD.fullmatch(figure)]


# ------------------------------------------------------------------------------------------------------------- formulas


@cache
def known() -> tuple[frozenset[str], frozenset[str]]:
    """The macros and the environments of the MathJax that the book comes with, without those it does not load."""
    macros, environments = set[str](), set[str]()
    source = MATHJAX.read_text(encoding="utf-8")
    for table in re.finditer(r'new \w\.(Command|Character|Delimiter|Macro|Environment)Map\("([\w-]+)",[^{]*', source):
        if not table[2].startswith(("Physics", "colorv2")):
            (environments if table[1] == "Environment" else macros).update(keys(source, table.end()))
    return frozenset(macros), frozenset(environments)


def keys(source: str, start: int) -> Iterator[str]:
    """The keys of an object in JavaScript that begins there with its brace; macros without their backslash."""
    depth, is_key = 0, False
    for token in re.finditer(r'"((?:[^"\\]|\\.)*)"|([\w$]+)|([\[{(])|([\]})])|(,)', source[start:]):
        if token[3]:
            depth, is_key = depth + 1, depth == 0
        elif token[4]:
            depth -= 1
            if depth == 0:
                return
        elif token[5]:
            is_key = depth == 1
        elif is_key:
            yield token[2] or re.sub(r"\\(.)", r"\1", token[1]).removeprefix("\\")
            is_key = False


def unknown(formula: str) -> list[str]:
    """The macros and environments in a formula that MathJax does not know."""
    macros, environments = known()
    return [
        command[0]
        for command in COMMAND.finditer(formula)
        if (command[2] not in environments if command[1] else command[3].strip() and command[3] not in macros)
    ]


# -------------------------------------------------------------------------------------------------------------- command


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Refuse typed figures, and formulas that MathJax cannot set.")
    parser.add_argument("--mend", action="store_true", help="take figures off the list that are no longer there")
    options = parser.parse_args(arguments)

    listed = {page: Counter(found.split(", ")) for page, found in json.loads(TYPED.read_text(encoding="utf-8")).items()}
    faults, kept = [], {}
    for path in pages():
        page, said = title(path), list(texts(path))
        for formula in (formula for kind, text in said if kind != "code" for formula in split(text)[1]):
            faults += [f"{page} has a formula with {name}, which MathJax does not know" for name in unknown(formula)]
        found, before = Counter(typed(said)), listed.get(page, Counter())
        faults += [f"{page} has a typed figure: {figure}" for figure in (found - before).elements()]
        kept[page] = found & before
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
