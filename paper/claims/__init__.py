"""The ledger of the sources' claims: what each says, what was found here, and the verdict a rule gives.

    from paper.claims import judge, ledger
    judge("S0.4.2d", printed(SAID, ours))  # in a cell of the chapter that derives it
    ledger()["S0.4.2d"].verdict

`verdicts` and `severity` define the possible results; `rules`, `settings` and `outcomes` hold the criteria; `parts`
combines the parts of a claim; `gathered` reads what the chapters judged; `report` makes the boxes and tables of the
book; `shared` has what cells of several chapters compute with.
"""

from paper.claims.catalogue import LedgerError
from paper.claims.ledger import Entry, catalogue, judge, judge_each, ledger
from paper.claims.outcomes import loses_nothing, outperforms
from paper.claims.parts import all_of
from paper.claims.report import (
    counts_table,
    counts_text,
    judged_here,
    ledger_table,
    not_judged_table,
    rules_table,
    table,
)
from paper.claims.severity import SEVERITIES, Severity
from paper.claims.verdicts import MEANINGS, PRECEDENCE, RULES, Verdict

__all__ = [
    "MEANINGS",
    "PRECEDENCE",
    "RULES",
    "SEVERITIES",
    "Entry",
    "LedgerError",
    "Severity",
    "Verdict",
    "all_of",
    "catalogue",
    "counts_table",
    "counts_text",
    "judge",
    "judge_each",
    "judged_here",
    "ledger",
    "ledger_table",
    "loses_nothing",
    "not_judged_table",
    "outperforms",
    "rules_table",
    "table",
]
