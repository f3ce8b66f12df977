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


def picture(chapter: str, cell: str) -> tuple[str, bytes]:
    """The suffix and the bytes of the image of a chapter's cell. LookupError if no executed chapter has it."""
    data = readme.cell(f"notebooks/{chapter}.ipynb", cell)[1]
    if "image/svg+xml" in data:
        return "svg", data["image/svg+xml"].encode()
    return "png", base64.b64decode(data["image/png"])


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


def typeset(target: Path) -> None:
    """Write the PDF. LookupError or TypstError if the article asks for something that does not exist."""
    text = TEXT.read_text(encoding="utf-8")
    folder = ROOT / "_build" / "article"
    folder.mkdir(parents=True, exist_ok=True)
    for chapter, cell in PICTURE.findall(text):
        suffix, data = picture(chapter, cell)
        (folder / f"{cell}.{suffix}").write_bytes(data)
        text = text.replace(f'#picture("{chapter}/{cell}"', f'#picture("{cell}.{suffix}"')
    source = folder / "article.typ"
    source.write_text(text, encoding="utf-8")
    inputs = {"values": json.dumps(gathered()), "figures": folder.relative_to(ROOT).as_posix()}
    target.parent.mkdir(parents=True, exist_ok=True)
    typst.compile(source, output=target, root=ROOT, sys_inputs=inputs)
    print(f"The article: {target}")


if __name__ == "__main__":
    typeset(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "_build" / "article.pdf")
