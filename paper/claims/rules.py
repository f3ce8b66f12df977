r"""The rules that turn evidence into a verdict.

Every verdict comes from a rule: evidence functions hand over what the source says and what was computed, and the rule
decides, by the criterion in its docstring. It also sets the severity, and writes the clause that a reader sees first.
Strings are Markdown, with formulas between dollars.

Mappings go from a label (a setting, a part of the claim) to a figure; source and ours must have the same labels.
"""

from collections.abc import Collection, Mapping
from fractions import Fraction
from math import inf
from typing import Any

from ortho.cost import orders
from ortho.cost.orders import Formula
from paper.claims import figures
from paper.claims.figures import Interval, Number, Printed, bracketed, in_words, share
from paper.claims.growth import CONFIGURATION, compare, growth, growth_where
from paper.claims.parts import all_of
from paper.claims.settings import agrees, effect, improves
from paper.claims.severity import FACTOR, Severity, apart, heaviest
from paper.claims.verdicts import Finding, Verdict, rule

__all__ = [
    "CONFIGURATION",
    "MARKED",
    "NOT_MARKED",
    "agrees",
    "all_of",
    "bound",
    "contradiction",
    "counted",
    "effect",
    "growth",
    "growth_where",
    "holds",
    "improves",
    "mended",
    "printed",
    "region",
    "untestable",
]


MARGIN = 0.05  # relative: printed figures this near are off by a constant

# Ratios that a source calls far larger, far better or marked (远大于, 远优于, 显著) without a figure, and those that it
# calls not marked. Figures that are nearer differ by a constant only, which is the severity `constant`.
MARKED, NOT_MARKED = (FACTOR, inf), (0, FACTOR)


@rule
def printed(source: Mapping[str, str], ours: Mapping[str, Number], *, unit: str = "") -> Finding:
    """Printed figures against recomputed ones, to the last printed digit.

    `source` holds the figures as they are printed ('2,359,296', '15.30'; '~80' says that trailing zeros are not
    digits), `ours` the exact ones in `unit`.

    confirmed: all of ours give the printed figures when rounded to the last printed digit, or all do when cut off
    there. corrected, `constant`: they agree in this way after one common factor (a known slip of `unit`, see
    `figures.SLIPS`: MiB called MB, multiply-adds called FLOPs; or any factor, if two or more figures are different); or
    all are within `MARGIN`. refuted: otherwise; the severity is how far `apart` those that differ are.
    """
    figures.check(source, ours, "source", "ours")
    read = {label: figures.read(text) for label, text in source.items()}
    exact = {label: figures.exact(label, value) for label, value in ours.items()}
    said = figures.listing({label: f"{text}{unit}" for label, text in source.items()})
    have = figures.listing({label: figures.show(value, unit) for label, value in ours.items()})
    off = {label: figures.deviation(read[label].value, exact[label]) for label in read}
    worst = max(off, key=lambda label: off[label])
    there = f"{source[worst]}{unit} printed, {figures.show(ours[worst], unit)} computed"
    if how := figures.agreement(read, exact):
        agree = there + bracketed(worst)
        if len(read) > 1:
            agree = f"{share(len(read), len(read), 'printed figures')} equal those computed here"
        clause = f"{agree}, {how.replace('rounded', 'rounded to').replace('off', 'off at')} the last printed digit"
        return Finding(Verdict.CONFIRMED, said, f"{have} ({how})", clause)
    why = _slip(read, exact, unit)
    if not why and off[worst] <= MARGIN:
        why = f"off by at most {figures.percent(off[worst])}, at {worst}"
    if not why and (common := figures.common_factor(read, exact)) is not None:
        why = f"ours are {figures.show(common)} times the source's throughout"
    if why:
        return Finding(Verdict.CORRECTED, said, f"{have}: {why}", f"{why}: {there}", Severity.CONSTANT)
    wrong = [label for label in read if not figures.agreement({label: read[label]}, {label: exact[label]})]
    differ = f"{len(wrong)} of {len(read)} figures differ"
    severity = apart((read[label].value, exact[label]) for label in wrong)
    clause = there + bracketed(worst)
    if len(read) > 1:
        clause = f"{share(len(wrong), len(read), 'figures', 'differs', 'differ')}; the worst: {clause}"
    return Finding(Verdict.REFUTED, said, f"{differ}; worst {worst}: {there}", clause, severity)


@rule
def counted(source: Mapping[str, Any], ours: Mapping[str, Any], *, unit: str = "") -> Finding:
    """Exact counts or closed forms, compared for equality.

    Values are integers or formulas (sympy's, or strings as in `orders.parse`). confirmed: all equal. corrected,
    `constant`: one constant factor makes all equal, and it is that of a known slip of `unit`, or at least two different
    counts or a formula show it. refuted: otherwise; `constant` if those that differ have the same order of growth
    (numbers: by `apart`), else `substance`.
    """
    import sympy

    figures.check(source, ours, "source", "ours")
    claimed = {label: figures.show(value, unit) for label, value in source.items()}
    found = {label: figures.show(value, unit) for label, value in ours.items()}
    said, have = figures.listing(claimed), figures.listing(found)
    pairs = {label: (orders.parse(source[label]), orders.parse(ours[label])) for label in source}
    wrong = [label for label, (a, b) in pairs.items() if sympy.simplify(a - b) != 0]
    if not wrong:
        counts, alike = share(len(found), len(found), "counts"), set(found.values())
        clause = f"{counts} are as claimed: {figures.few(found)}"
        if len(alike) == 1:
            clause = f"{f'{counts} are ' if len(found) > 1 else ''}{alike.pop()}, as claimed"
        return Finding(Verdict.CONFIRMED, said, have, clause)
    first = f"{claimed[wrong[0]]} claimed, {found[wrong[0]]} counted{bracketed(wrong[0])}"
    if why := _factor(list(pairs.values()), unit):
        return Finding(Verdict.CORRECTED, said, f"{have}: {why}", f"{why}: {first}", Severity.CONSTANT)
    severity = heaviest(_counts_apart(*pairs[label]) for label in wrong)
    clause = f"{share(len(wrong), len(pairs), 'counts', 'differs', 'differ')}: {first}" if len(pairs) > 1 else first
    where = f"; differs: {', '.join(wrong)}" if len(pairs) > 1 else ""
    return Finding(Verdict.REFUTED, said, f"{have}{where}", clause, severity)


@rule
def bound(claimed: Mapping[str, Number], limit: Mapping[str, Number], *, unit: str = "") -> Finding:
    """Claimed gains against a proven upper limit.

    confirmed: none is above its limit, so that the limit allows the claim. refuted: all are above. conditional: some
    are; the settings that are allowed are named. The severity of the last two is how far `apart` gain and limit are.
    """
    figures.check(claimed, limit, "claimed", "limit")
    said = figures.listing({label: figures.show(value, unit) for label, value in claimed.items()})
    both = {
        label: f"{figures.show(claimed[label], unit)} claimed, at most {figures.show(limit[label], unit)} possible"
        for label in claimed
    }
    above = [label for label in claimed if figures.above(claimed[label], limit[label])]
    if not above:
        limits = figures.listing({label: f"at most {figures.show(limit[label], unit)}" for label in claimed})
        return Finding(Verdict.CONFIRMED, said, limits, f"the limit allows it: {figures.few(both)}")
    worst = max(above, key=lambda label: claimed[label] - limit[label])
    have = f"{len(above)} of {len(claimed)} above the bound; worst {worst}: {both[worst]}"
    clause = both[worst] + bracketed(worst)
    if len(claimed) > 1:
        clause = f"{share(len(above), len(claimed), 'gains', 'exceeds', 'exceed')} the limit; the worst: {clause}"
    severity = apart((claimed[label], limit[label]) for label in above)
    if len(above) == len(claimed):
        return Finding(Verdict.REFUTED, said, have, clause, severity)
    allowed = f"{have}; allowed at {figures.some(_rest(claimed, above))}"
    return Finding(Verdict.CONDITIONAL, said, allowed, clause, severity)


@rule
def holds(statement: str, error: Number, tolerance: Number, *, at: str = "") -> Finding:
    """A property, by the residual that would be zero if it held exactly.

    confirmed: the residual is within the tolerance, which the caller derives (rounding, a stated error rate).
    refuted, `substance`: it is above; `at` names the input, which is then the counter-example.
    """
    if not tolerance > 0:
        raise ValueError(f"tolerance: expected a positive number, got {tolerance}")
    if not error >= 0:
        raise ValueError(f"error: expected a residual of at least 0, got {error}")
    where = f" at {at}" if at else ""
    limit = figures.show(tolerance)
    if error <= tolerance:
        # The residual itself is rounding noise, and differs from one processor to the next.
        return Finding(
            Verdict.CONFIRMED, statement, f"holds to {limit}{where}", f"{statement}, to within {limit}{where}"
        )
    have = f"counter-example{where}: off by {float(error):.2g}, tolerance {limit}"
    clause = f'"{statement}" is off by {_short(error)}{where}; at most {limit} is allowed'
    return Finding(Verdict.REFUTED, statement, have, clause, Severity.SUBSTANCE)


@rule
def mended(statement: str, printed: Number, right: Mapping[str, Number], tolerance: Number, *, at: str = "") -> Finding:
    """A printed formula, by its residual as it is printed, and with one term put right.

    `right` maps a change, a term added or replaced, to the residual with it. confirmed: the printed formula's residual
    is within the tolerance. corrected, `wording`: one of `right` is. refuted, `substance`: none is.
    """
    as_it_is = holds(statement, printed, tolerance, at=at)
    if as_it_is.verdict == Verdict.CONFIRMED:
        return as_it_is
    for change, error in right.items():
        if holds(statement, error, tolerance).verdict == Verdict.CONFIRMED:
            clause = f"it holds {change}; as printed it is off by {_short(printed)}{f' at {at}' if at else ''}"
            return Finding(
                Verdict.CORRECTED, statement, f"{as_it_is.ours}; it holds {change}", clause, Severity.WORDING
            )
    tried = "".join(f"; still off by {_short(error)} {change}" for change, error in right.items())
    return Finding(
        Verdict.REFUTED, statement, f"{as_it_is.ours}{tried}", f"{as_it_is.clause}{tried}", Severity.SUBSTANCE
    )


@rule
def contradiction(
    first: tuple[str, Number | Interval], second: tuple[str, Number | Interval], *, unit: str = ""
) -> Finding:
    """Two statements of one source about the same quantity, each a quotation with its value or (low, high).

    confirmed: the two have a value in common. inconsistent: they have none; the severity is how far `apart` their
    nearest ends are.
    """
    quotes = f'"{first[0]}" and "{second[0]}"'
    one, other = figures.interval(first[1], "first"), figures.interval(second[1], "second")
    sides = f"{figures.span(one, unit)} and {figures.span(other, unit)}"
    near = figures.nearest(one[0], other)
    if one[0] <= near <= one[1]:
        return Finding(Verdict.CONFIRMED, quotes, f"{sides} agree", f"{quotes} agree")
    severity = apart([(figures.nearest(near, one), near)])
    return Finding(
        Verdict.INCONSISTENT, quotes, f"{sides} exclude each other", f"{quotes} exclude each other", severity
    )


@rule
def region(claimed: Interval | Mapping[str, Interval], measured: Mapping[str, Number], *, unit: str = "") -> Finding:
    """A range that is claimed, against what was computed or measured on a grid of settings.

    `claimed` is (low, high), ends included, for the whole grid or for each setting. confirmed: inside everywhere.
    refuted: nowhere. conditional: in part; both regions are named. The severity of the last two is how far `apart` the
    figures outside and the nearest ends of their ranges are.
    """
    ranges = claimed if isinstance(claimed, Mapping) else dict.fromkeys(measured, claimed)
    figures.check(ranges, measured, "claimed", "measured")
    texts = {label: figures.span(figures.interval(ends, "claimed"), unit) for label, ends in ranges.items()}
    said = figures.listing(texts) if isinstance(claimed, Mapping) else next(iter(texts.values()))
    have = {label: figures.show(value, unit) for label, value in measured.items()}
    ends = {label: figures.nearest(measured[label], ranges[label]) for label in measured}
    outside = [
        label
        for label, end in ends.items()
        if figures.above(measured[label], end) or figures.above(end, measured[label])
    ]
    inside = _rest(ranges, outside)
    if not outside:
        needed = texts if isinstance(claimed, Mapping) else {"": said}
        clause = f"{figures.few(have)} found; the claim needs {figures.few(needed)}"
        return Finding(Verdict.CONFIRMED, said, figures.listing(have), clause)
    worst = figures.furthest({label: figures.distance(measured[label], ends[label]) for label in outside})
    clause = f"{have[worst]} found{bracketed(worst)}; the claim needs {texts[worst]}"
    if len(have) > 1:
        fits = f"{share(len(outside), len(have), 'figures', 'does', 'do')} not fit"
        if not inside:
            fits = "neither figure fits" if len(have) == 2 else f"none of {in_words(len(have))} figures fits"
        clause = f"{fits}; the furthest: {clause}"
    severity = apart((ends[label], measured[label]) for label in outside)
    if not inside:
        return Finding(Verdict.REFUTED, said, f"{figures.listing(have)}: outside everywhere", clause, severity)
    failing = figures.listing({label: have[label] for label in outside})
    parted = f"holds at {figures.some(inside)}; not at {failing}"
    return Finding(Verdict.CONDITIONAL, said, parted, clause, severity)


@rule
def untestable(statement: str, needs: Mapping[str, Any], *, lack: str = "the source does not define") -> Finding:
    """A statement whose test needs what is not there: as a rule, quantities that the source does not define.

    `needs` maps each thing that the test needs to its value, or to None if it is missing; `lack` says in what way it is
    missing. Raises ValueError if nothing is missing, as there is then something to test.
    """
    missing = [name for name, defined in needs.items() if defined is None]
    if not missing:
        raise ValueError(f"needs: expected a quantity that the source does not define, got {dict(needs)}")
    return Finding(Verdict.UNTESTABLE, statement, f"{lack} {', '.join(missing)}", f"{lack} {', '.join(missing)}")


def _short(residual: Number) -> str:
    return figures.show(float(f"{float(residual):.2g}"))


def _slip(read: Mapping[str, Printed], exact: Mapping[str, Fraction], unit: str) -> str:
    """The unit that is meant, in words, if the figures agree once the unit is taken for another; else ''."""
    if unit.strip() not in figures.SLIPS:
        return ""
    meant, factor = figures.SLIPS[unit.strip()]
    agree = figures.agreement(read, {label: value / factor for label, value in exact.items()})
    return f"the source's figures are {meant}" if agree else ""


def _factor(pairs: list[tuple[Formula, Formula]], unit: str) -> str:
    """The factor from the first to the second of each pair, in words, if one factor makes all equal: a known slip of
    the unit, or any factor that two different counts or a formula show; else ''."""
    import sympy

    ratios = {sympy.simplify(b / a) if a != 0 else sympy.nan for a, b in pairs}
    ratio = ratios.pop()
    if ratios or not ratio.is_number or not ratio.is_finite or ratio == 0:
        return ""
    meant, factor = figures.SLIPS.get(unit.strip(), ("", None))
    if factor is not None and ratio == sympy.Rational(factor.numerator, factor.denominator):
        return f"the source's figures are {meant}"
    shown = len({a for a, _ in pairs}) > 1 or any(a.free_symbols for a, _ in pairs)
    return f"ours are {figures.show(ratio)} times the source's" if shown else ""


def _counts_apart(claimed: Formula, found: Formula) -> Severity:
    """How severe it is that two formulas differ: `constant` if they have one order of growth, up to constants of the
    configuration, else `substance`; numbers by `apart`."""
    import sympy

    if not (claimed.free_symbols | found.free_symbols):
        return apart([(float(claimed), float(found))])
    try:
        over, under = sympy.fraction(sympy.together(claimed / found))
        same = compare(over, under, CONFIGURATION) == ([], [])
    except ValueError:  # not a sum of products: there is no order to compare
        same = False
    return Severity.CONSTANT if same else Severity.SUBSTANCE


def _rest(labels: Collection[str], taken: Collection[str]) -> list[str]:
    return [label for label in labels if label not in taken]
