"""Tables and verdicts as notebooks show them: Markdown for the page, plain text elsewhere; alike on every machine."""

import os
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from paper.claims import figures
from paper.claims.catalogue import read_toml
from paper.claims.gathered import ROOT
from paper.claims.ledger import Entry, catalogue
from paper.claims.severity import SEVERITIES
from paper.claims.verdicts import MEANINGS, RULES, Verdict

_WIDTH = 100
_SPECIAL = re.compile(r"([\\`*_\[\]<>$~^{}])")  # characters that are markup in Markdown
# a number as a string, perhaps bold and with a unit, or an empty string
_NUMBER = re.compile(r"((\*\*)?[+\-\u2212]?\d[\d,]*(\.\d+)?( ?(%|[kMG]i?B|[mµ]?s|h|min))?(\*\*)?)?")
_FORMULA = re.compile(r"(?<!\\)\$[^$]+\$")


@dataclass(frozen=True, repr=False)
class Shown:
    """Something to look at, in the forms that IPython asks for."""

    markdown: str
    text: str

    def _repr_markdown_(self) -> str:
        return self.markdown

    def __repr__(self) -> str:
        return self.text


def table(rows: Iterable[Sequence[Any]], headers: Sequence[str], *, shared: str | None = None) -> Shown:
    """A table. Cells are strings (Markdown, as they are), numbers, formulas (set as mathematics) or None (a dash).

    Numbers are written by `figures.show`: integers, and other whole numbers below 1e15, in full; numbers below 1e-9 to
    one digit; others to four. Format what needs another precision. Columns of numbers, formatted or not, are set flush
    right. A column with the header `shared` is left out if all its cells are the same; the first header then names
    their value. Raises ValueError for a row that is not as long as the headers, for a `shared` that is not among them,
    and for NaN.
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


def judged_here(*claim_ids: str) -> Shown:
    """A line at the head of a chapter: the claims that it judges, each linked to its derivation."""
    linked = ", ".join(f"[{claim_id}](#{claim_id})" for claim_id in claim_ids)
    return Shown(f"**Claims judged here:** {linked}.", ", ".join(claim_ids))


def judged_markdown(entries: Sequence[Entry], *, in_words: bool = False) -> str:
    """What a cell judged, a row a claim: in sentences, or several claims also in figures. Each links to its card in the
    ledger."""
    if in_words or len(entries) == 1:
        told = [(_to_ledger(entry), escape(entry.claim), _in_words(entry)) for entry in entries]
        return table(told, ("claim", "the source says", "found here")).markdown
    rows = [(_to_ledger(entry), entry.source, entry.ours, f"**{_status(entry)}**") for entry in entries]
    return table(rows, ("claim", "the source says", "computed here", "verdict")).markdown


def _to_ledger(entry: Entry) -> str:
    """A claim's id, linked to its card: its words, the quotation, all figures, the rule."""
    book = Path(os.path.relpath(ROOT / "book")).as_posix()  # a notebook runs in its own folder
    return f'<a class="verdict" href="{book}/ledger.html#ledger-{entry.id}">{entry.id}</a>'


def _in_words(entry: Entry) -> str:
    """The finding in a sentence; its severity stands in the ledger, which says what it means."""
    return f"**{entry.verdict.capitalize()}**{entry.sentence[len(entry.verdict) :]}"


def ledger_table(entries: Sequence[Entry]) -> Shown:
    """Some claims of the ledger: a row each, linked to the cell that derives it; the evidence is folded.

    The source's words have the class `said`: in print, only the cell shows them.
    """

    def row(entry: Entry) -> tuple[str, str]:
        name = f'<span id="ledger-{entry.id}"></span>[{entry.id}](#{entry.id})'
        severity = f"<br>*{entry.severity}*" if entry.severity else ""
        told = [f"*claim:* {escape(entry.claim)}", f"*found:* {_found(entry)}"]
        told.append(f'<span class="said">*said:* {_quotation(entry)}</span>')
        told += [f"*note:* {escape(entry.note)}"] if entry.note else []
        title = "Evidence: the source's figures, ours, and the rule that compared them"
        evidence = "<br>".join(f"*{part}:* {value}" for part, value in _evidence(entry))
        folded = f'<details class="evidence"><summary>{title}</summary>{evidence}</details>'
        return f"{name}<br>**{_status(entry, brief=True)}**{severity}", "<br>".join(told) + folded

    text = "\n".join(f"{entry.id:9} {_status(entry)}" for entry in entries)
    return Shown(table(map(row, entries), ("claim", "what was found")).markdown, text)


def counts_table(entries: Sequence[Entry]) -> Shown:
    """Counts of claims for each document: by verdict, in all, and by severity (in italics)."""
    documents = catalogue().documents

    def row(name: str, chosen: Sequence[Entry]) -> Sequence[Any]:
        return name, *(sum(entry.document == document for entry in chosen) for document in documents), len(chosen)

    verdicts = [row(str(name), [e for e in entries if e.verdict == name]) for name in MEANINGS]
    severities = [row(f"*{name}*", [e for e in entries if e.severity == name]) for name in SEVERITIES]
    return table([*verdicts, row("claims", entries), *severities], ("", *documents, "all"))


def counts_text(entries: Iterable[Entry]) -> str:
    """The claims by verdict and by severity in words: '54 confirmed, ..., 27 refuted; severity: 5 wording, ...'."""

    def counted(names: Iterable[str]) -> str:
        return ", ".join(f"{found[name]} {name}" for name in names if found[name])

    found = Counter(name for entry in entries for name in (entry.verdict, entry.severity))
    return "; severity: ".join(filter(None, (counted(MEANINGS), counted(SEVERITIES))))


def not_judged_table() -> Shown:
    """The statements of the sources that no claim judges, and why."""
    statements = read_toml(files(__package__) / "not_judged.toml")["statements"]
    rows = [(one["document"], escape(one["where"]), escape(one["left"])) for one in statements]
    return table(rows, ("document", "section", "not judged"))


def rules_table() -> Shown:
    """The rules by which evidence is judged."""
    return table(sorted(RULES.items()), ("rule", "what it compares"))


def entry_text(entry: Entry) -> str:
    """The box of one claim as plain text."""

    def filled(name: str, value: str) -> str:
        return textwrap.fill(f"  {name:7} {value}", _WIDTH, subsequent_indent=" " * 10, break_on_hyphens=False)

    told = {"claim": entry.claim, "found": _found(entry), "said": entry.where, "note": entry.note}
    lines = [filled(name, value) for name, value in told.items() if value]
    quoted = [" " * 10 + line for line in _plain(entry.quote).splitlines()]
    at = lines.index(filled("said", entry.where)) + 1
    evidence = [filled(f"{name}:", value) for name, value in _evidence(entry)]
    if entry.code:
        evidence.append(filled("judged:", f"notebooks/{entry.chapter}.ipynb, cell {entry.code}"))
    return "\n".join([f"{entry.id} ({entry.kind}): {_status(entry)}", *lines[:at], *quoted, *lines[at:], *evidence])


def escape(text: str) -> str:
    """Plain words as Markdown that shows them unchanged, except that the commonest exponents are raised."""
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
    """Where a claim stands in its source, and its words there, letter by letter except for marks of bold type."""
    lines = _SPECIAL.sub(r"\\\1", _plain(entry.quote)).splitlines()
    words = "<br>".join(re.sub(r"^ +", lambda indent: "\u00a0" * len(indent[0]), line) for line in lines)
    return f'{escape(entry.where)}:<br><q lang="zh">{words}</q>'


def _plain(quote: str) -> str:
    return quote.replace("**", "")


def _evidence(entry: Entry) -> list[tuple[str, str]]:
    """What was compared, part by part, and by which rules."""
    whole = [("source", entry.source), ("ours", entry.ours)]
    parts = [(label, f"{verdict}; source: {source}; ours: {ours}") for label, verdict, source, ours in entry.parts]
    found = [*parts, ("remark", entry.remark)] if parts else whole
    return [(name, value) for name, value in (*found, ("rule", entry.rule)) if value]


def _status(entry: Entry, *, brief: bool = False) -> str:
    """The verdict and its severity; if brief, the verdict alone. An open question is not refuted but answered."""
    verdict = "answered: no" if _is_answered_no(entry) else entry.verdict
    return f"{verdict}, {entry.severity}" if entry.severity and not brief else verdict


def _found(entry: Entry) -> str:
    """The finding in a sentence; that of an open question begins with the answer."""
    return f"Answered with no{entry.sentence[len(entry.verdict) :]}" if _is_answered_no(entry) else entry.sentence


def _is_answered_no(entry: Entry) -> bool:
    """Whether the source asks, and what was found is no: the verdict is counted among the refuted."""
    return (entry.kind, entry.verdict) == ("open", Verdict.REFUTED)


def _cell(value: Any) -> str:
    if value is None:
        return "\u2013"
    return value if isinstance(value, str) else figures.show(value)


def _is_number(cell: Any) -> bool:
    return not isinstance(cell, str) or bool(_NUMBER.fullmatch(cell))


def _set(text: str) -> str:
    """Markdown with the thousands of its formulas set without a gap."""
    return _FORMULA.sub(lambda formula: figures.in_formula(formula[0]), text)


def _piped(cell: str) -> str:
    """A cell's text within a row: a pipe would end the cell, a line break the row."""
    return re.sub(r"(?<!\\)\|", r"\\|", _set(cell)).replace("\n", " ")


def _aligned(lines: list[list[str]], numeric: list[bool]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    )
