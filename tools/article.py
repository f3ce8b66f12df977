"""Typeset the article, `_build/article.pdf`: book/article/article.typ, with values and figures of the executed book.

    python -m tools.article [PDF]

Its numbers come from the page of results and the counts of the ledger, its figures from the outputs of pages. TeX
formulas are translated to Typst.
"""

import base64
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import typst
import yaml

from paper.claims import MEANINGS, Entry, ledger
from paper.claims.severity import SEVERITIES, Severity
from tools import readme

ROOT = Path(__file__).resolve().parent.parent
TEXT = ROOT / "book" / "article" / "article.typ"
PICTURE = re.compile(r'#picture\("([\w-]+)"')
SUFFIXES = {"image/svg+xml": "svg", "image/png": "png"}


class ArticleError(Exception):
    """The article asks for something that does not exist; the message names it."""


# Commands that have another name in Typst; all others only lose their backslash.
SYMBOLS = {
    "left": "", "right": "", ",": " ", "lvert": "|", "rvert": "|", "gg": ">>", "ll": "<<", "ge": ">=", "le": "<=",
    "mathbb": "bb", "mathbf": "bold",
}  # fmt: skip
# Replacements for innermost braces (those that hold no others): of fractions, names and powers, and the rest.
BRACES = (
    (r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"(\1) / (\2)"),
    (r"\\operatorname\{([^{}]*)\}", r'op("\1")'),
    (r"([\^_])\{([^{}]*)\}", r"\1(\2)"),
    (r"(?<!\\frac)(?<!\})\{([^{}]*)\}", r" \1"),
)


def typst_math(tex: str) -> str:
    """A formula of TeX as Typst has it: fractions, powers, names, groups of digits."""
    text, before = tex.replace("{,}", ","), ""
    while text != before:
        before = text
        for braces, instead in BRACES:
            text = re.sub(braces, instead, text)
    text = re.sub(r"\\([A-Za-z]+|.)", lambda command: f" {SYMBOLS.get(command[1], command[1])} ", text)
    return re.sub(r"(?<=[(^_]) | (?=\))", "", " ".join(text.split()))


def pieces(text: str) -> list[list[str]]:
    """A text with formulas between dollars, as pieces with their kinds: ["text", ...] or ["math", ...]."""
    parts = text.replace("`", "").split("$")
    kinds = [("text", words)] + [("math", typst_math), ("text", words)] * (len(parts) // 2)
    return [[kind, made(part)] for (kind, made), part in zip(kinds, parts, strict=True) if part]


def words(text: str) -> str:
    """A value's text without Markdown's marks."""
    return text.replace("`", "").replace("{,}", ",")


def ledger_table(entries: list[Entry]) -> list[list[str]]:
    """Counts of claims by document and by severity: a row of titles, one for each verdict, and one of sums."""
    documents = list(dict.fromkeys(entry.document for entry in entries))

    def row(name: str, chosen: list[Entry]) -> list[str]:
        by_document = Counter(entry.document for entry in chosen)
        by_severity = Counter(entry.severity for entry in chosen)
        counts = [*(by_document[one] for one in documents), len(chosen), *(by_severity[one] for one in SEVERITIES)]
        return [name, *map(str, counts)]

    rows = [row(verdict, [entry for entry in entries if entry.verdict == verdict]) for verdict in MEANINGS]
    return [["verdict", *documents, "all", *SEVERITIES], *rows, row("claims", entries)]


def refuted_table(entries: list[Entry]) -> list[list[Any]]:
    """A row for each claim that is wrong in substance: its id, its words, and what was found."""
    wrong = [entry for entry in entries if entry.severity == Severity.SUBSTANCE]
    return [[entry.id, pieces(entry.claim), pieces(entry.sentence)] for entry in wrong]


def picture(name: str) -> tuple[str, bytes]:
    """The suffix and the bytes of a figure: NN-CELL is the image of that cell of chapter NN.

    Raises ArticleError if no executed page has it.
    """
    chapter, _, cell = name.partition("-")
    for path in sorted((ROOT / "notebooks").glob(f"{chapter}-*.ipynb")):
        for kind, suffix in SUFFIXES.items():
            try:
                data = readme.cell(path.relative_to(ROOT).as_posix(), cell, kind)[1]
            except readme.ReadmeError:
                continue
            return suffix, data.encode() if suffix == "svg" else base64.b64decode(data)
    raise ArticleError(f"{TEXT.name}: expected figures of executed pages, got {name!r}: make execute")


def gathered() -> dict[str, Any]:
    """What the article prints, by name."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    entries = list(ledger().values())
    counts = ledger_table(entries)
    values = readme.cell(readme.RESULTS, "values", "application/json")[1]
    known = {name: words(typst_math(text) if _is_formula(text) else text) for name, text in values.items()}
    about = {
        "version": f"version {cited['version']}",
        "author": cited["authors"][0]["name"],
        "claims": counts[-1][counts[0].index("all")],
        "substance": counts[-1][counts[0].index(Severity.SUBSTANCE)],
    }
    return {**known, **about, "ledger": counts, "refuted": refuted_table(entries)}


def _is_formula(text: str) -> bool:
    return "$" not in text and re.search(r"[\\^{]", text) is not None


def main(arguments: list[str] | None = None) -> int:
    """Write the PDF; returns the exit status."""
    chosen = sys.argv[1:] if arguments is None else arguments
    target = Path(chosen[0]) if chosen else ROOT / "_build" / "article.pdf"
    text = TEXT.read_text(encoding="utf-8")
    folder = ROOT / "_build" / "article"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for name in PICTURE.findall(text):
            suffix, data = picture(name)
            (folder / f"{name}.{suffix}").write_bytes(data)
            text = text.replace(f'#picture("{name}"', f'#picture("{name}.{suffix}"')
        source = folder / "article.typ"
        source.write_text(text, encoding="utf-8")
        inputs = {"values": json.dumps(gathered()), "figures": folder.relative_to(ROOT).as_posix()}
        target.parent.mkdir(parents=True, exist_ok=True)
        typst.compile(source, output=target, root=ROOT, sys_inputs=inputs)
    except (ArticleError, readme.ReadmeError, typst.TypstError) as error:
        print(f"no article: {error}", file=sys.stderr)
        return 1
    print(f"The article: {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
