"""The ledger of the sources' claims: what each says, what was found here, and the verdict a rule gives.

    from paper.claims import judge, ledger
    judge("S0.1.2b").verdict

`verdicts` and `severity` define the possible results; `rules`, `settings` and `outcomes` hold the criteria; `parts`
combines the parts of a claim; `evidence` decides each claim, by topic; `report` makes the boxes and tables of the book.
"""

from paper.claims.catalogue import Catalogue, Claim, LedgerError
from paper.claims.ledger import (
    AWAITING,
    Entry,
    Ledger,
    UnjudgedError,
    catalogue,
    evidence,
    judge,
    judge_all,
    judge_each,
    ledger,
    stored,
)
from paper.claims.outcomes import loses_nothing, outperforms
from paper.claims.parts import all_of
from paper.claims.report import counts_table, counts_text, judged_here, ledger_table, rules_table, show, table
from paper.claims.severity import SEVERITIES, Severity
from paper.claims.verdicts import MEANINGS, PRECEDENCE, RULES, Finding, Verdict

__all__ = [
    "AWAITING",
    "MEANINGS",
    "PRECEDENCE",
    "RULES",
    "SEVERITIES",
    "Catalogue",
    "Claim",
    "Entry",
    "Finding",
    "Ledger",
    "LedgerError",
    "Severity",
    "UnjudgedError",
    "Verdict",
    "all_of",
    "catalogue",
    "counts_table",
    "counts_text",
    "evidence",
    "judge",
    "judge_all",
    "judge_each",
    "judged_here",
    "ledger",
    "ledger_table",
    "loses_nothing",
    "outperforms",
    "rules_table",
    "show",
    "stored",
    "table",
]
