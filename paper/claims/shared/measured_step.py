r"""S0, sections 4.1 and 4.3, measured: the parts of a training step, and inference; read from `results/`.

What counts as near is fixed before any record is read. The source prints 0.5, so "about 0.5" and "unchanged" leave open
half a unit of the last digit, 0.05. The tests of inference are those of the rule `effect`.
"""

from paper.claims.evidence.measured_step import NO_TIMES, provenance, provenance_table

__all__ = ["NO_TIMES", "provenance", "provenance_table"]
