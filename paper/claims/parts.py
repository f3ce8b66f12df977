"""Claims of several parts: one finding, made from those of the parts."""

from collections import Counter

from paper.claims.figures import in_words, share, words
from paper.claims.severity import heaviest
from paper.claims.verdicts import PRECEDENCE, Finding, Parts, Verdict

# The words for parts with another verdict than the whole: for one part, and for several. Never refuted, which comes
# first in the precedence.
_OTHERS = {
    Verdict.CONFIRMED: ("holds", "hold"),
    Verdict.CORRECTED: ("is corrected", "are corrected"),
    Verdict.CONDITIONAL: ("holds in part", "hold in part"),
    Verdict.UNTESTABLE: ("is untestable", "are untestable"),
    Verdict.INCONSISTENT: ("is inconsistent", "are inconsistent"),
}

_ROOM = 30  # a sentence with more words than this leaves out the other parts; its scope counts them


def all_of(parts: Parts) -> Finding:
    """The finding of a claim of several parts, given by label.

    The verdict is the first in `PRECEDENCE` that any part has; the severity is the heaviest that any part has, or None
    if the whole is untestable. The clause describes the heaviest part with that verdict first.
    """
    if not parts:
        raise ValueError("parts: expected at least one finding, got none")
    verdict = min((finding.verdict for finding in parts.values()), key=PRECEDENCE.index)
    mixed = any(finding.verdict != verdict for finding in parts.values())
    source = "; ".join(f"{label}: {finding.source}" for label, finding in parts.items())
    ours = "; ".join(
        f"{label}: {finding.ours}" + (f" ({finding.verdict})" if mixed else "") for label, finding in parts.items()
    )
    names = dict.fromkeys(name for finding in parts.values() for name in finding.rule.split(", "))
    severity = None if verdict == Verdict.UNTESTABLE else heaviest(finding.severity for finding in parts.values())
    scope, clause = _in_short(parts, verdict)
    return Finding(verdict, source, ours, clause, severity, scope, ", ".join(names), tuple(parts.items()))


def _in_short(parts: Parts, verdict: Verdict) -> tuple[str, str]:
    """The scope, which names the parts with the verdict, and the clause: the heaviest of them, then the other parts."""
    deciding = {label: finding for label, finding in parts.items() if finding.verdict == verdict}
    heavy = heaviest(finding.severity for finding in deciding.values())
    label, first = next((label, finding) for label, finding in deciding.items() if finding.severity == heavy)
    named = label if len(deciding) == 1 else f"e.g. {label}"
    scope = f"in {share(len(deciding), len(parts), 'parts')} " if len(parts) > 1 else ""
    others = Counter(finding.verdict for finding in parts.values() if finding.verdict != verdict)
    rest = _of_others([(v, others[v]) for v in reversed(PRECEDENCE) if others[v]])
    return f"{scope}({named})", first.clause + (rest if words(f"{named} {first.clause}") <= _ROOM else "")


def _of_others(counts: list[tuple[Verdict, int]]) -> str:
    said = [f"{in_words(count)} {_OTHERS[verdict][count > 1]}" for verdict, count in counts]
    if len(said) == 1:
        return f"; the other {said[0].removeprefix('one ')}"
    return f"; of the others {', '.join(said[:-1])} and {said[-1]}" if said else ""
