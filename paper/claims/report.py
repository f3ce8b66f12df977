"""Tables and verdicts as notebooks show them: Markdown for the page, plain text elsewhere; alike on every machine."""

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from paper.claims import figures
from paper.claims.ledger import AWAITING, Entry, catalogue, judge
from paper.claims.verdicts import MEANINGS, RULES

_WIDTH = 100
_SPECIAL = re.compile(r"([\\`*_\[\]<>$~^{}])")  # what Markdown reads as more than itself
_NUMBER = re.compile(r"([+\-]?\d[\d,]*(\.\d+)?( ?%)?)?")  # as a string, or nothing
_FORMULA = re.compile(r"(?<!\\)\$[^$]+\$")


@dataclass(frozen=True, repr=False)
class Shown:
    """Something to look at, as IPython asks for it."""

    markdown: str
    text: str

    def _repr_markdown_(self) -> str:
        return self.markdown

    def __repr__(self) -> str:
        return self.text


def table(rows: Iterable[Sequence[Any]], headers: Sequence[str], *, shared: str | None = None) -> Shown:
    """A table. Cells are strings (Markdown, as they are), numbers, formulas (set as mathematics) or None (a dash).

    Integers are written in full, other numbers to four digits: format what needs another precision. Columns of numbers,
    formatted or not, are set flush right. A column with the header `shared` is left out if all rows have the same in
    it; the first header then names that. Raises ValueError for a row that is not as long as the headers, and for a
    `shared` that is none of them, and for NaN.
    """
    rows = list(rows)
    for number, row in enumerate(rows):
        if len(row) != len(headers):
            raise ValueError(f"row {number}: expected {len(headers)} cells like the headers, got {len(row)}: {row!r}")
    if shared is not None:
        rows, headers = _without_shared(rows, headers, shared)
    cells = []
    numeric = [True] * len(headers)
    for row in rows:
        numeric = [right and _is_number(cell) for right, cell in zip(numeric, row, strict=True)]
        cells.append([_cell(cell) for cell in row])
    lines = [list(headers), ["---:" if right else "---" for right in numeric], *cells]
    markdown = "\n".join(f"| {' | '.join(_piped(cell) for cell in line)} |" for line in lines)
    return Shown(markdown, _aligned([list(headers), *cells], numeric))


def show(*claim_ids: str) -> Shown:
    """The entries of some claims, one box each."""
    entries = [judge(claim_id) for claim_id in claim_ids]
    return Shown("\n\n".join(map(entry_markdown, entries)), "\n".join(map(entry_text, entries)))


def ledger_table(entries: Sequence[Entry]) -> Shown:
    """Some claims of the ledger: a row each, linked to the cell that derives it."""

    def row(entry: Entry) -> tuple[str, str]:
        name = f"[{entry.id}](#{entry.cell})" if entry.cell else entry.id
        evidence = [f"*{part}:* {value}" for part, value in _evidence(entry)]
        claim = [escape(entry.claim), f"*said:* {_quotation(entry)}"]
        return f"{name}<br>**{_status(entry, brief=True)}**", "<br>".join([*claim, *evidence])

    text = "\n".join(f"{entry.id:9} {_status(entry)}" for entry in entries)
    return Shown(table(map(row, entries), ("claim", "evidence")).markdown, text)


def counts_table(entries: Sequence[Entry]) -> Shown:
    """How many claims of each document have which verdict."""
    documents = [*catalogue().documents, "all"]

    def row(name: str, verdicts: Sequence[str]) -> Sequence[Any]:
        chosen = [entry.document for entry in entries if entry.verdict in verdicts]
        return name, *(len(chosen) if document == "all" else chosen.count(document) for document in documents)

    verdicts = [*map(str, MEANINGS), AWAITING]
    return table([*(row(verdict, [verdict]) for verdict in verdicts), row("claims", verdicts)], ("", *documents))


def rules_table() -> Shown:
    """The rules by which evidence is judged."""
    return table(sorted(RULES.items()), ("rule", "what it compares"))


def entry_markdown(entry: Entry) -> str:
    """The box of one claim as Markdown."""
    said = ("said", _quotation(entry))
    lines = [(entry.id, _status(entry)), ("---", "---"), ("claim", escape(entry.claim)), said, *_evidence(entry)]
    return "\n".join(f"| {name} | {_piped(value)} |" for name, value in lines)


def entry_text(entry: Entry) -> str:
    """The box of one claim as plain text."""
    body = [
        textwrap.fill(f"  {name:7} {value}", _WIDTH, subsequent_indent=" " * 10, break_on_hyphens=False)
        for name, value in (("claim", entry.claim), ("said", entry.where), *_evidence(entry))
    ]
    body[2:2] = [" " * 10 + line for line in entry.quote.splitlines()]
    return "\n".join([f"{entry.id} ({entry.kind}): {_status(entry)}", *body])


def escape(text: str) -> str:
    """Plain words as Markdown that shows them as they are, but for the commonest exponents, which are raised."""
    text = re.sub(r"\^([23T])\b", lambda match: "²³ᵀ"["23T".index(match[1])], text)
    return _SPECIAL.sub(r"\\\1", text)


def _without_shared(rows: list[Sequence[Any]], headers: Sequence[str], shared: str) -> tuple[Any, Sequence[str]]:
    if shared not in headers:
        raise ValueError(f"shared: expected one of the headers {list(headers)}, got {shared!r}")
    at = headers.index(shared)
    if len(alike := {row[at] for row in rows}) != 1:
        return rows, headers
    first, *others = (header for header in headers if header != shared)
    named = ", ".join(filter(None, (first, *(_cell(value) for value in alike if value is not None))))
    return [(*row[:at], *row[at + 1 :]) for row in rows], [named, *others]


def _quotation(entry: Entry) -> str:
    """Where a claim stands in its source, and its words there, letter by letter."""
    lines = _SPECIAL.sub(r"\\\1", entry.quote).splitlines()
    words = "<br>".join(re.sub(r"^ +", lambda indent: "\u00a0" * len(indent[0]), line) for line in lines)
    return f'{escape(entry.where)}:<br><q lang="zh">{words}</q>'


def _evidence(entry: Entry) -> list[tuple[str, str]]:
    """What was compared, and by which rules; nothing while the claim awaits its chapter."""
    found = [(name, value) for name in ("source", "ours", "rule") if (value := getattr(entry, name))]
    return [*found, ("note", escape(entry.note))] if entry.note else found


def _status(entry: Entry, *, brief: bool = False) -> str:
    """The verdict, or what it awaits; with the part's title unless brief."""
    if not entry.awaits:
        return entry.verdict
    return f"{entry.verdict} part {entry.awaits}" + ("" if brief else f", {catalogue().parts[entry.awaits]}")


def _cell(value: Any) -> str:
    if value is None:
        return "\u2013"
    return value if isinstance(value, str) else figures.show(value)


def _is_number(cell: Any) -> bool:
    return not isinstance(cell, str) or bool(_NUMBER.fullmatch(cell))


def _piped(cell: str) -> str:
    """A cell's text within a row: a pipe would end the cell, a line break the row."""
    cell = _FORMULA.sub(lambda formula: figures.in_formula(formula[0]), cell)
    return re.sub(r"(?<!\\)\|", r"\\|", cell).replace("\n", " ")


def _aligned(lines: list[list[str]], numeric: list[bool]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    )
