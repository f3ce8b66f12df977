"""Typeset the article, `_build/article.pdf`: book/article/article.typ, with values and figures of the executed book.

    python -m tools.article [PDF]

Its numbers are those of `paper.findings` and the counts of the ledger, its figures the outputs of chapters.
"""

import base64
import json
import re
import sys
from pathlib import Path
from typing import Any

import typst
import yaml

from paper.claims import ledger
from paper.claims.report import counts_table
from paper.claims.severity import Severity
from paper.findings import values
from tools import readme

ROOT = Path(__file__).resolve().parent.parent
TEXT = ROOT / "book" / "article" / "article.typ"
PICTURE = re.compile(r'#picture\("([\w-]+)/([\w-]+)"')
SUFFIXES = {"image/svg+xml": "svg", "image/png": "png"}


class ArticleError(Exception):
    """The article asks for something that does not exist; the message names it."""


def picture(chapter: str, cell: str) -> tuple[str, bytes]:
    """The suffix and the bytes of the image of a chapter's cell. ArticleError if no executed chapter has it."""
    for kind, suffix in SUFFIXES.items():
        try:
            data = readme.cell(f"notebooks/{chapter}.ipynb", cell, kind)[1]
        except (readme.ReadmeError, OSError):
            continue
        return suffix, data.encode() if suffix == "svg" else base64.b64decode(data)
    raise ArticleError(f"{TEXT.name}: expected a figure of an executed chapter, got {chapter}/{cell}: make execute")


def gathered() -> dict[str, Any]:
    """What the article prints, by name."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    entries = list(ledger().values())
    titles, _, *rows = counts_table(entries).markdown.splitlines()  # the second line is a rule
    return {
        **values(),
        "version": f"version {cited['version']}",
        "author": cited["authors"][0]["name"],
        "claims": str(len(entries)),
        "substance": str(sum(entry.severity == Severity.SUBSTANCE for entry in entries)),
        "ledger": [[cell.strip(" *") for cell in row.strip("|").split("|")] for row in (titles, *rows)],
    }


def main(arguments: list[str] | None = None) -> int:
    """Write the PDF; returns the exit status."""
    chosen = sys.argv[1:] if arguments is None else arguments
    target = Path(chosen[0]) if chosen else ROOT / "_build" / "article.pdf"
    text = TEXT.read_text(encoding="utf-8")
    folder = ROOT / "_build" / "article"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for chapter, cell in PICTURE.findall(text):
            suffix, data = picture(chapter, cell)
            (folder / f"{cell}.{suffix}").write_bytes(data)
            text = text.replace(f'#picture("{chapter}/{cell}"', f'#picture("{cell}.{suffix}"')
        source = folder / "article.typ"
        source.write_text(text, encoding="utf-8")
        inputs = {"values": json.dumps(gathered()), "figures": folder.relative_to(ROOT).as_posix()}
        target.parent.mkdir(parents=True, exist_ok=True)
        typst.compile(source, output=target, root=ROOT, sys_inputs=inputs)
    except (ArticleError, typst.TypstError) as error:
        print(f"no article: {error}", file=sys.stderr)
        return 1
    print(f"The article: {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
