"""The ledger: every claim of the sources with the verdict that a cell of its chapter derives.

The cell hands the finding of a rule to `judge`, which shows the verdict in one line and leaves a row in the cell's
output. `ledger` gathers these rows from the executed notebooks.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from paper.claims import gathered
from paper.claims.catalogue import Catalogue, LedgerError, load
from paper.claims.parts import all_of
from paper.claims.verdicts import Finding, Parts

# What a cell's output has of an entry; the rest is in the catalogue, or says where the cell is.
_JUDGED = ("verdict", "severity", "sentence", "source", "ours", "rule", "parts", "remark", "records")


@dataclass(frozen=True)
class Entry:
    """A row of the ledger: a claim, and what its chapter found.

    `severity` is empty for a claim that is confirmed or untestable. If a claim has several parts, `parts` has the
    label, the verdict, the source's figure and ours of each. `remark` stands after our figure. `records` names the
    experiments whose records were read. `chapter` is the notebook's name without suffix, `code` the id of the code cell
    that judged; both are empty before the notebook is stored.
    """

    id: str
    document: str
    kind: str
    claim: str
    where: str
    quote: str
    note: str
    verdict: str
    severity: str
    sentence: str
    source: str
    ours: str
    rule: str
    parts: tuple[tuple[str, str, str, str], ...] = ()
    remark: str = ""
    records: tuple[str, ...] = ()
    chapter: str = ""
    code: str = ""

    def __repr__(self) -> str:
        from paper.claims.report import entry_text

        return entry_text(self)


@dataclass(frozen=True, repr=False)
class Judged:
    """What a cell judged: shown as a line, or as a table with a row for each of several claims."""

    entries: tuple[Entry, ...]
    in_words: bool = False

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        from paper.claims.report import judged_markdown

        rows = [{"id": entry.id} | {name: getattr(entry, name) for name in _JUDGED} for entry in self.entries]
        return {
            "text/plain": repr(self),
            "text/markdown": judged_markdown(self.entries, in_words=self.in_words),
            gathered.MIME: json.loads(json.dumps(rows)),
        }

    def __repr__(self) -> str:
        return "\n".join(f"{entry.id}: {entry.sentence}" for entry in self.entries)


@cache
def catalogue() -> Catalogue:
    """The sources' claims, documents and the parts of the book."""
    return load()


def judge(claim_id: str, finding: Finding | Parts, *, records: Iterable[str] = ()) -> Judged:
    """Judge a claim by a finding of a rule, or by the findings of its parts by label. To be the last line of a cell.

    The cell shows the verdict in one line, and its output holds the row of the ledger. `records` names the experiments
    whose records the finding rests on. Raises LedgerError for an unknown id, TypeError for a finding that is not a
    rule's.
    """
    return Judged((_judged(claim_id, finding, records),))


def judge_each(
    findings: Mapping[str, Finding | Parts],
    *,
    in_words: bool = False,
    records: Mapping[str, Iterable[str]] | None = None,
) -> Judged:
    """Judge several claims, given by id, as `judge` does: a table with a row for each.

    `in_words` shows the claim and the sentence of the finding, for claims of several parts, in place of the figures.
    `records` names the experiments that a claim's finding rests on, by id.
    """
    rest = records or {}
    return Judged(tuple(_judged(one, finding, rest.get(one, ())) for one, finding in findings.items()), in_words)


def ledger(document: str | None = None) -> dict[str, Entry]:
    """Claim -> its entry, of all claims in the order of the catalogue, or of one document's.

    Raises LedgerError for an unknown document, for a chapter that cannot be read, and if the claims that the chapters
    judge are not those of the catalogue.
    """
    known = catalogue()
    if document is not None and document not in known.documents:
        raise LedgerError(f"document: expected one of {', '.join(known.documents)}, got {document!r}")
    rows = gathered.verdicts()
    if others := sorted(rows.keys() ^ known.claims.keys()):
        raise LedgerError(
            f"chapters: expected to judge the claims of the catalogue, got {others} in one of the two alone"
        )
    return {claim.id: _entry(**rows[claim.id]) for claim in known.claims.values() if document in (None, claim.document)}


def judged_anew(claim_id: str, cells: Iterable[Any], chapter: str) -> Entry:
    """The entry of a claim by the cells of its chapter, which were executed anew. LedgerError if none judges it."""
    for code, row in gathered.judged_in(cells):
        if row["id"] == claim_id:
            return _entry(**row, chapter=chapter, code=code)
    raise LedgerError(f"claim {claim_id}: expected a cell of {chapter} that judges it, found none")


def _judged(claim_id: str, finding: Finding | Parts, records: Iterable[str] = ()) -> Entry:
    found = all_of(finding) if isinstance(finding, Mapping) else finding
    if not (isinstance(found, Finding) and found.rule):
        raise TypeError(f"finding: expected what a rule returns, or that of each part by label, got {finding!r}")
    known = catalogue().claims.get(claim_id)
    plain = known.plain.get(found.verdict) if known else None  # the same claim may get another verdict one day
    return _entry(
        claim_id,
        verdict=str(found.verdict),
        severity=str(found.severity or ""),
        sentence=f"{found.verdict.capitalize()}: {plain}." if plain else found.sentence,
        source=found.source,
        ours=found.ours,
        rule=found.rule,
        parts=[(label, str(part.verdict), part.source, part.ours) for label, part in found.parts],
        remark=found.remark,
        records=records,
    )


def _entry(id: str, *, parts: Iterable[Iterable[str]], records: Iterable[str], **row: str) -> Entry:  # noqa: A002
    if id not in catalogue().claims:
        raise LedgerError(f"claim: expected an id of the catalogue, such as 'S0.1.1a', got {id!r}")
    claim = catalogue().claims[id]
    words = (claim.document, claim.kind, claim.text, claim.where, claim.quote, claim.note)
    told: Any = tuple(map(tuple, parts))
    return Entry(id, *words, parts=told, records=tuple(records), **row)
