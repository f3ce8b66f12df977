"""The ledger: every claim of the sources with the verdict that its chapter derives.

A cell of the chapter hands a finding to `judge`, which shows the verdict and leaves it in the cell's output; the ledger
gathers these from the executed notebooks (`gathered`). Claims that no chapter judges in this way have evidence in
`paper/claims/evidence/`.

Evidence is a function without arguments. It returns a `Finding`, or the findings of the claim's parts by label, which
`all_of` combines. It is entered under the claim's id and the chapter that derives it. The functions live in one module
per topic (`paper/claims/evidence/`), imported when first needed.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, overload

from paper.claims import gathered
from paper.claims.catalogue import Catalogue, Claim, LedgerError, load
from paper.claims.parts import all_of
from paper.claims.verdicts import Finding, Parts
from paper.experiments.engine.records import NoRecordsError

AWAITING = "awaiting"
# What a cell's output has of an entry; the rest is in the catalogue, or says where the cell is.
_JUDGED = ("verdict", "severity", "sentence", "source", "ours", "rule", "parts", "remark", "records")

Evidence = Callable[[], Finding]
Written = Callable[[], Finding | Parts]  # evidence as it is written


@dataclass(frozen=True)
class Entry:
    """A row of the ledger. `verdict` is a verdict's name, or 'awaiting', with the part of the book that it awaits.

    `chapter` is the notebook's name without suffix, `cell` the anchor in it; both are empty while awaiting, as are
    the finding in a sentence, its severity, the source's figure, ours, and the rules that compared them. `severity` is
    also empty for a claim that is confirmed or untestable. If a claim has several parts, `parts` has the label, the
    verdict, the source's figure and ours of each. `remark` stands after our figure. `records` names the experiments
    whose records were read; `code` is the id of the code cell that judged.
    """

    id: str
    document: str
    kind: str
    claim: str
    where: str
    quote: str
    verdict: str
    awaits: str = ""
    chapter: str = ""
    cell: str = ""
    severity: str = ""
    sentence: str = ""
    source: str = ""
    ours: str = ""
    rule: str = ""
    parts: tuple[tuple[str, str, str, str], ...] = ()
    remark: str = ""
    note: str = ""
    records: tuple[str, ...] = ()
    code: str = ""

    def _repr_markdown_(self) -> str:
        from paper.claims.report import entry_markdown

        return entry_markdown(self)

    def __repr__(self) -> str:
        from paper.claims.report import entry_text

        return entry_text(self)


class UnjudgedError(LedgerError):
    """Claims that were not judged, because records that they need are missing; `entries` are those of the others."""

    def __init__(self, claims: list[str], entries: tuple[Entry, ...], reason: NoRecordsError) -> None:
        super().__init__(f"claims that need records were not judged ({', '.join(claims)}): {reason}")
        self.entries = entries


class Ledger:
    """Claims, and evidence entered under their ids.

    `package` holds the evidence modules; without it, none are imported.
    """

    def __init__(self, catalogue: Catalogue, package: str = "") -> None:
        self.catalogue = catalogue
        self._package = package
        self._imported = not package
        self._evidence: dict[str, tuple[Evidence, str]] = {}
        self._findings: dict[str, Finding] = {}

    def evidence(self, claim_id: str, *, chapter: str) -> Callable[[Written], Evidence]:
        """Decorator that enters a function as the evidence for a claim, derived in a chapter ('01-the-layer').

        Raises LedgerError for an unknown id, an id that has evidence already, or a chapter that is not a notebook's
        name.
        """
        self._claim(claim_id)
        if not re.fullmatch(r"\d\d-[a-z0-9]+(-[a-z0-9]+)*", chapter):
            raise LedgerError(f"chapter: expected a notebook's name like '01-the-layer', got {chapter!r}")

        def enter(function: Written) -> Evidence:
            @wraps(function)
            def found() -> Finding:
                result = function()
                return all_of(result) if isinstance(result, Mapping) else result

            if claim_id in self._evidence:
                other = self._evidence[claim_id][0]
                raise LedgerError(
                    f"claim {claim_id}: expected one evidence function, got {_name(found)} beside {_name(other)}"
                )
            self._evidence[claim_id] = (found, chapter)
            return found

        return enter

    def judge(self, claim_id: str) -> Entry:
        """The entry of one claim; its evidence runs the first time. LedgerError for an unknown id."""
        claim = self._claim(claim_id)
        self._import()
        if claim_id not in self._evidence:
            rows = from_chapters() if self._package else {}
            return rows.get(claim_id, _entry(claim, verdict=AWAITING, awaits=claim.part))
        function, chapter = self._evidence[claim_id]
        if claim_id not in self._findings:
            finding = function()
            if not isinstance(finding, Finding):
                raise TypeError(f"{_name(function)}: expected to return a Finding of a rule, got {finding!r}")
            self._findings[claim_id] = finding
        return _entry(claim, chapter=chapter, **_row(self._findings[claim_id]))

    def entries(self, document: str | None = None) -> tuple[Entry, ...]:
        """All entries in the order of the catalogue, or one document's; raises as `judge_all` does, and LedgerError for
        an unknown document."""
        if document is not None and document not in self.catalogue.documents:
            known = ", ".join(self.catalogue.documents)
            raise LedgerError(f"document: expected one of {known}, got {document!r}")
        chosen: Iterable[Claim] = self.catalogue.claims.values()
        return self.judge_all(claim.id for claim in chosen if document in (None, claim.document))

    def judge_all(self, claim_ids: Iterable[str]) -> tuple[Entry, ...]:
        """The entries of some claims. UnjudgedError if some need records and there are none at all: the verdict would
        be "untestable", although nobody has looked."""
        entries, lost = [], {}
        for claim_id in claim_ids:
            try:
                entries.append(self.judge(claim_id))
            except NoRecordsError as error:
                lost[claim_id] = error
        if lost:
            raise UnjudgedError(list(lost), tuple(entries), next(iter(lost.values())))
        return tuple(entries)

    def evident(self) -> list[str]:
        """The claims with evidence that is entered here, in the order of the catalogue."""
        self._import()
        return [claim_id for claim_id in self.catalogue.claims if claim_id in self._evidence]

    def _claim(self, claim_id: str) -> Claim:
        if claim_id not in self.catalogue.claims:
            raise LedgerError(f"claim: expected an id of the catalogue, such as 'S0.1.1a', got {claim_id!r}")
        return self.catalogue.claims[claim_id]

    def _import(self) -> None:
        if self._imported:
            return
        package = import_module(self._package)
        for module in sorted(found.name for found in iter_modules(package.__path__)):
            before = dict(self._evidence)
            try:
                import_module(f"{self._package}.{module}")
            except BaseException:
                # So that a second attempt meets the module's own error again, not its evidence entered twice.
                self._evidence = before
                raise
        self._imported = True


def _name(function: Evidence) -> str:
    return f"{function.__module__}.{function.__qualname__}"


@cache
def _ledger() -> Ledger:
    return Ledger(load(), package=f"{__package__}.evidence")


def catalogue() -> Catalogue:
    """The sources' claims, documents and the parts of the book."""
    return _ledger().catalogue


def evidence(claim_id: str, *, chapter: str) -> Callable[[Written], Evidence]:
    """`Ledger.evidence` of the project's ledger."""
    return _ledger().evidence(claim_id, chapter=chapter)


def evidence_table(chapter: str, rows: Mapping[str, Written]) -> None:
    """Enter evidence for several claims of a chapter, one per row: comparisons of a few formulas need no names."""
    for claim_id, function in rows.items():
        _ledger().evidence(claim_id, chapter=chapter)(function)


@overload
def judge(claim_id: str) -> Entry: ...


@overload
def judge(claim_id: str, finding: Finding | Parts, *, records: Iterable[str] = ()) -> "Judged": ...


def judge(claim_id: str, finding: Finding | Parts | None = None, *, records: Iterable[str] = ()) -> "Entry | Judged":
    """Judge a claim by a finding of a rule, or by the findings of its parts by label. To be the last line of a cell.

    The cell shows the verdict in one line, and its output holds the row of the ledger. `records` names the experiments
    whose records the finding rests on. Without a finding: the entry of a claim as the ledger has it. Raises LedgerError
    for an unknown id, TypeError for a finding that is not a rule's.
    """
    return _ledger().judge(claim_id) if finding is None else Judged((_judged(claim_id, finding, records),))


def judge_each(findings: Mapping[str, Finding | Parts]) -> "Judged":
    """Judge several claims, given by id, as `judge` does: a table with a row for each."""
    return Judged(tuple(_judged(claim_id, finding) for claim_id, finding in findings.items()))


@dataclass(frozen=True, repr=False)
class Judged:
    """What a cell judged: shown as a line, or as a table with a row for each of several claims."""

    entries: tuple[Entry, ...]

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        from paper.claims.report import judged_markdown

        rows = [{"id": entry.id} | {name: getattr(entry, name) for name in _JUDGED} for entry in self.entries]
        return {
            "text/plain": repr(self),
            "text/markdown": judged_markdown(self.entries),
            gathered.MIME: json.loads(json.dumps(rows)),
        }

    def __repr__(self) -> str:
        return "\n".join(f"{entry.id}: {entry.sentence}" for entry in self.entries)


def judge_all(claim_ids: Iterable[str]) -> tuple[Entry, ...]:
    """`Ledger.judge_all` of the project's ledger."""
    return _ledger().judge_all(claim_ids)


def ledger(document: str | None = None) -> tuple[Entry, ...]:
    """`Ledger.entries` of the project's ledger."""
    return _ledger().entries(document)


def stored(path: Path) -> dict[str, tuple[Entry, tuple[str, ...]]]:
    """Claim -> its entry, and the experiments whose records its evidence read: no evidence is run.

    The file has the claims that no chapter judges; `tools/verdicts.py` writes it. Raises LedgerError if it is missing
    or damaged, or if its claims and those that chapters judge are not those of the catalogue.
    """
    claims = catalogue().claims
    try:
        rows = gathered.verdicts() | json.loads(path.read_text(encoding="utf-8"))
        if others := sorted(rows.keys() ^ claims.keys()):
            raise LedgerError(f"{path}: expected the claims of the catalogue, got {others} in one of the two alone")
        return {name: _stored_row(claim, **rows[name]) for name, claim in claims.items()}
    except (OSError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise LedgerError(f"{path}: expected the verdicts that `python -m tools.verdicts` writes: {error}") from error


def from_chapters() -> dict[str, Entry]:
    """Claim -> its entry, of the claims that chapters judge, as their executed notebooks have it."""
    claims = catalogue().claims
    rows = gathered.verdicts()
    if unknown := rows.keys() - claims.keys():
        raise LedgerError(f"{rows[min(unknown)]['chapter']}: expected claims of the catalogue, got {min(unknown)!r}")
    return {name: _stored_row(claims[name], **row)[0] for name, row in rows.items()}


def judged_anew(claim_id: str, cells: Iterable[Any], chapter: str) -> Entry:
    """The entry of a claim by the cells of its chapter, which were executed anew. LedgerError if none judges it."""
    for code, row in gathered.judged_in(cells):
        if row["id"] == claim_id:
            return _stored_row(catalogue().claims[claim_id], **row, chapter=chapter, code=code)[0]
    raise LedgerError(f"claim {claim_id}: expected a cell of {chapter} that judges it, found none")


def _stored_row(
    claim: Claim, *, records: list[str], parts: Iterable[list[str]] = (), **row: str
) -> tuple[Entry, tuple[str, ...]]:
    of_chapter = row.pop("id", None) is not None
    read = tuple(records)
    return _entry(claim, parts=tuple(map(tuple, parts)), records=read if of_chapter else (), **row), read


def _judged(claim_id: str, finding: Finding | Parts, records: Iterable[str] = ()) -> Entry:
    claim = _ledger()._claim(claim_id)
    found = all_of(finding) if isinstance(finding, Mapping) else finding
    if not (isinstance(found, Finding) and found.rule):
        raise TypeError(f"finding: expected what a rule returns, or that of each part by label, got {finding!r}")
    return _entry(claim, records=tuple(records), **_row(found))


def _row(found: Finding) -> dict[str, Any]:
    return {
        "verdict": str(found.verdict),
        "severity": str(found.severity or ""),
        "sentence": found.sentence,
        "source": found.source,
        "ours": found.ours,
        "rule": found.rule,
        "parts": tuple((label, str(part.verdict), part.source, part.ours) for label, part in found.parts),
        "remark": found.remark,
    }


def _entry(claim: Claim, **row: Any) -> Entry:
    row = {"cell": "" if row.get("awaits") else claim.id} | row
    return Entry(claim.id, claim.document, claim.kind, claim.text, claim.where, claim.quote, note=claim.note, **row)
