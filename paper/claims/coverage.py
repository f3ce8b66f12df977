"""How much of each source is judged: the sections of `coverage.toml`, checked against the claims when read."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from paper.claims.catalogue import Catalogue, LedgerError, expect_one_of, read_toml
from paper.claims.report import Shown, escape, table

_LINES = re.compile(r".*\(lines? (\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*)\)", re.DOTALL)


@dataclass(frozen=True)
class Section:
    """A section of a source: its heading and first and last line, how many of its statements could be checked, the
    claims that judge them, and the statements that no claim judges, each with the reason."""

    document: str
    where: str
    checkable: int
    claims: tuple[str, ...]
    left: tuple[str, ...]

    @property
    def lines(self) -> range:
        found = lines_of(self.where)
        return range(min(found), max(found) + 1)

    @property
    def covered(self) -> int:
        return self.checkable - len(self.left)


def lines_of(where: str) -> list[int]:
    """The lines that a place names: 'heading (lines 3, 5-6)' -> 3, 5, 6. LedgerError if it names none."""
    match = _LINES.fullmatch(where)
    if not match:
        raise LedgerError(f"where: expected a heading and its lines, '1.1 Cost (lines 3, 5-6)', got {where!r}")
    spans = (map(int, (span.split("-") * 2)[:2]) for span in match[1].split(", "))
    found = [line for first, last in spans for line in range(first, last + 1)]
    if found != sorted(set(found)):
        raise LedgerError(f"where: expected lines in order, got {where!r}")
    return found


def load_coverage(catalogue: Catalogue, path: Path | None = None) -> tuple[Section, ...]:
    """The sections in `path`, by default the ones that come with the package.

    Raises LedgerError, naming the file and the section, for a file that is missing or is not TOML; an entry with a
    missing, unknown or ill-typed field; sections of a document that leave out or repeat a line; a section that judges
    more statements than it has, or fewer than it has claims; and a claim with a line that is in no section that names
    it. A document without any section is left out.
    """
    source = files(__package__) / "coverage.toml" if path is None else path
    raw = read_toml(source)
    try:
        if raw.keys() - {"sections"}:
            raise LedgerError(f"top level: expected [[sections]], got {min(raw.keys() - {'sections'})!r} besides")
        sections = tuple(_section(number, entry, catalogue) for number, entry in enumerate(raw.get("sections", []), 1))
        for document in dict.fromkeys(section.document for section in sections):
            _expect_whole(catalogue, [section for section in sections if section.document == document])
    except LedgerError as error:
        raise LedgerError(f"{source}: {error}") from None
    return sections


def coverage_table(catalogue: Catalogue, sections: Iterable[Section]) -> Shown:
    """How many statements of each document could be checked, and how many a claim judges."""
    sections = list(sections)

    def row(name: str, chosen: list[Section]) -> tuple[str, int, int, int]:
        counts = [(section.checkable, section.covered, len(section.left)) for section in chosen]
        checkable, covered, left = map(sum, zip((0, 0, 0), *counts, strict=True))
        return name, checkable, covered, left

    rows = [row(name, [one for one in sections if one.document == name]) for name in catalogue.documents]
    return table([*rows, row("all", sections)], ("document", "checkable statements", "judged", "not judged"))


def left_table(sections: Iterable[Section]) -> Shown:
    """The statements that no claim judges, and why."""
    rows = [(section.document, escape(section.where), escape(text)) for section in sections for text in section.left]
    return table(rows, ("document", "section", "not judged"))


def _section(number: int, entry: Any, catalogue: Catalogue) -> Section:
    where = f"section {number}"
    fields = {"document": str, "where": str, "checkable": int, "claims": list, "left": list}
    if not isinstance(entry, dict) or (unknown := entry.keys() - fields):
        got = repr(entry) if not isinstance(entry, dict) else f"{min(unknown)!r} besides"
        raise LedgerError(f"{where}: expected the fields {', '.join(fields)}, got {got}")
    entry = {"left": [], **entry}
    for field, kind in fields.items():
        if not isinstance(entry.get(field), kind) or isinstance(entry[field], bool):
            raise LedgerError(f"{where}: {field}: expected {kind.__name__}, got {entry.get(field)!r}")
    section = Section(**entry | {"claims": tuple(entry["claims"]), "left": tuple(entry["left"])})
    where += f" ({section.document}, {section.where})"
    expect_one_of(where, "document", section.document, catalogue.documents)
    known = [claim.id for claim in catalogue.claims.values() if claim.document == section.document]
    for claim_id in section.claims:
        expect_one_of(where, "claims", claim_id, known)
    for text in section.left:
        if not isinstance(text, str) or not text.strip():
            raise LedgerError(f"{where}: left: expected a statement with the reason, got {text!r}")
    if not len(section.claims) <= section.covered or bool(section.claims) != bool(section.covered):
        raise LedgerError(
            f"{where}: expected checkable to be the statements left, {len(section.left)}, and one or more for each of "
            f"{len(section.claims)} claims, got {section.checkable}"
        )
    return section


def _expect_whole(catalogue: Catalogue, sections: list[Section]) -> None:
    """Check that a document's sections have each line once, in order, and each of its claims where it stands."""
    document, end = sections[0].document, 0
    for section in sections:
        if section.lines.start != end + 1:
            raise LedgerError(f"{document}, {section.where}: expected to begin with line {end + 1}")
        end = section.lines[-1]
    for claim in catalogue.claims.values():
        if claim.document == document:
            naming = [section for section in sections if claim.id in section.claims]
            stands = set(lines_of(claim.where))
            for section in naming:
                if not stands & {*section.lines}:
                    raise LedgerError(f"{document}, {section.where}: {claim.id} does not stand here: {claim.where}")
            if missed := stands - {line for section in naming for line in section.lines}:
                raise LedgerError(f"{document}: {claim.id}: expected a section that names it, with line {min(missed)}")
