r"""The rules that turn evidence into a verdict.

A verdict comes out of a rule and from nowhere else: evidence functions hand over what the source says and what was
computed, and the rule decides, by the criterion in its docstring. Strings are Markdown, with formulas between dollars.

Mappings go from a label (a setting, a part of the claim) to a figure; source and ours must have the same labels.
"""

from collections.abc import Collection, Mapping
from typing import Any

from ortho.cost import orders
from ortho.cost.orders import Formula
from paper.claims import figures
from paper.claims.figures import Interval, Number
from paper.claims.verdicts import PRECEDENCE, Finding, Parts, Verdict, rule

# Symbols that configure a model and do not grow with the problem: an order without one lacks a constant, not a term.
CONFIGURATION = ("B", "H", "L")


@rule
def printed(
    source: Mapping[str, str], ours: Mapping[str, Number], *, unit: str = "", margin: Number = 0.05
) -> tuple[Verdict, str, str]:
    """Printed figures against recomputed ones, to the last printed digit.

    `source` holds the figures as they are printed ('2,359,296', '15.30'; '~80' says that trailing zeros are not
    digits), `ours` the exact ones in `unit`.

    confirmed: every one of ours, rounded to the last printed digit, gives the printed figure; or every one cut off
    there does. corrected: they agree so after one common factor: a known slip of `unit` (`figures.SLIPS`: MiB called
    MB, multiply-adds called FLOPs), or, for two or more different figures, any; or all are within the relative
    `margin`. refuted: otherwise.
    """
    figures.check(source, ours, "source", "ours")
    read = {label: figures.read(text) for label, text in source.items()}
    exact = {label: figures.exact(label, value) for label, value in ours.items()}
    said = figures.listing({label: f"{text}{unit}" for label, text in source.items()})
    have = figures.listing({label: figures.show(value, unit) for label, value in ours.items()})
    if how := figures.agreement(read, exact):
        return Verdict.CONFIRMED, said, f"{have} ({how})"
    if unit.strip() in figures.SLIPS:
        meant, factor = figures.SLIPS[unit.strip()]
        if figures.agreement(read, {label: value / factor for label, value in exact.items()}):
            return Verdict.CORRECTED, said, f"{have}: the source's are {meant}"
    off = {label: figures.deviation(read[label].value, exact[label]) for label in read}
    worst = max(off, key=lambda label: off[label])
    if off[worst] <= margin:
        return Verdict.CORRECTED, said, f"{have}: off by at most {figures.percent(off[worst])}, at {worst}"
    if (common := figures.common_factor(read, exact)) is not None:
        return Verdict.CORRECTED, said, f"{have}: {figures.show(common)} times the source's throughout"
    wrong = sum(not figures.agreement({label: read[label]}, {label: exact[label]}) for label in read)
    ours_there = f"{source[worst]}{unit} printed, {figures.show(ours[worst], unit)} computed"
    return Verdict.REFUTED, said, f"{wrong} of {len(read)} figures differ; worst {worst}: {ours_there}"


@rule
def counted(source: Mapping[str, Any], ours: Mapping[str, Any], *, unit: str = "") -> tuple[Verdict, str, str]:
    """Exact counts or closed forms, compared for equality.

    Values are integers or formulas (sympy's, or strings as in `orders.parse`). confirmed: all equal. corrected: one
    constant factor makes all equal, and it is that of a known slip of `unit`, or there are at least two different
    counts or a formula to show it. refuted: otherwise.
    """
    import sympy

    figures.check(source, ours, "source", "ours")
    said = figures.listing({label: figures.show(value, unit) for label, value in source.items()})
    have = figures.listing({label: figures.show(value, unit) for label, value in ours.items()})
    pairs = {label: (orders.parse(source[label]), orders.parse(ours[label])) for label in source}
    wrong = [label for label, (a, b) in pairs.items() if sympy.simplify(a - b) != 0]
    if not wrong:
        return Verdict.CONFIRMED, said, have
    ratios = {sympy.simplify(b / a) if a != 0 else sympy.nan for a, b in pairs.values()}
    ratio = ratios.pop()
    if not ratios and ratio.is_number and ratio.is_finite and ratio != 0:
        meant, factor = figures.SLIPS.get(unit.strip(), ("", None))
        if factor is not None and ratio == sympy.Rational(factor.numerator, factor.denominator):
            return Verdict.CORRECTED, said, f"{have}: the source's are {meant}"
        if len({a for a, _ in pairs.values()}) > 1 or any(a.free_symbols for a, _ in pairs.values()):
            return Verdict.CORRECTED, said, f"{have}: {figures.show(ratio)} times the source's"
    return Verdict.REFUTED, said, f"{have}; differs: {', '.join(wrong)}"


@rule
def growth(
    claimed: Formula, exact: Formula, *, held: Collection[str] = (), settings: Collection[str] = CONFIGURATION
) -> tuple[Verdict, str, str]:
    r"""A big-O claim against the exact closed form, all sizes growing independently.

    Terms are compared as in `ortho.cost.orders`; sizes in `held` are constants (to ask what dominates for N >> d,
    hold d). confirmed: each is within the order of the other. corrected: the claim is an upper bound but not a tight
    one; or it misses nothing but constants of the configuration (`settings`, such as the number of heads).
    refuted: the exact form has a term that grows faster than the whole claim, so that the claim is not an upper bound.
    """
    said = f"$O({figures.latex(orders.parse(claimed))})$"
    have = figures.show(exact) + (f" for constant ${', '.join(held)}$" if held else "")
    missing, loose = _compare(claimed, exact, held)
    because = []
    if missing:
        but_constants, loose = _compare(claimed, exact, (*held, *settings))
        if but_constants:
            return Verdict.REFUTED, said, f"{have}: the claim drops {_terms(but_constants)}"
        left_out = {symbol for term in missing for symbol in term.free_symbols if symbol.name in settings}
        because = [f"the claim leaves out {_terms(sorted(left_out, key=str))} in {_terms(missing)}"]
    if loose:
        because.append(f"nothing grows like {_terms(loose)}")
    if because:
        return Verdict.CORRECTED, said, f"{have}: {'; '.join(because)}"
    return Verdict.CONFIRMED, said, have


@rule
def growth_where(
    claimed: Formula, exact: Mapping[str, Formula], *, settings: Collection[str] = CONFIGURATION
) -> tuple[Verdict, str, str]:
    """A big-O claim against the exact closed forms of several settings, each compared as by `growth`.

    confirmed: `growth` confirms it in every setting. corrected: it refutes it in none. conditional: the claim is an
    upper bound, but for constants of the configuration, in some settings, which are named. refuted: in none.
    """
    if not exact:
        raise ValueError("exact: expected at least one setting, got none")
    found = {label: growth(claimed, formula, settings=settings) for label, formula in exact.items()}
    have = {label: finding.ours for label, finding in found.items()}
    said = next(iter(found.values())).source
    held = [label for label, finding in found.items() if finding.verdict != Verdict.REFUTED]
    verdict, said, ours = by_setting(said, have, held, (), how=("holds", "not"), nowhere="nowhere")
    if verdict != Verdict.CONFIRMED:
        return verdict, said, ours
    return min((finding.verdict for finding in found.values()), key=PRECEDENCE.index), said, ours


@rule
def bound(claimed: Mapping[str, Number], limit: Mapping[str, Number], *, unit: str = "") -> tuple[Verdict, str, str]:
    """Claimed gains against a proven upper limit.

    confirmed: none is above its limit, so that the limit allows the claim. refuted: all are above. conditional: some
    are; the settings that are allowed are named.
    """
    figures.check(claimed, limit, "claimed", "limit")
    said = figures.listing({label: figures.show(value, unit) for label, value in claimed.items()})
    above = [label for label in claimed if figures.above(claimed[label], limit[label])]
    if not above:
        limits = figures.listing({label: f"at most {figures.show(limit[label], unit)}" for label in claimed})
        return Verdict.CONFIRMED, said, limits
    worst = max(above, key=lambda label: claimed[label] - limit[label])
    have = (
        f"{len(above)} of {len(claimed)} above the bound; worst {worst}: "
        f"{figures.show(claimed[worst], unit)} claimed, at most {figures.show(limit[worst], unit)} possible"
    )
    if len(above) == len(claimed):
        return Verdict.REFUTED, said, have
    return Verdict.CONDITIONAL, said, f"{have}; allowed at {figures.some(_rest(claimed, above))}"


@rule
def holds(statement: str, error: Number, tolerance: Number, *, at: str = "") -> tuple[Verdict, str, str]:
    """A property, by the residual that would be zero if it held exactly.

    confirmed: the residual is within the tolerance, which the caller derives (rounding, a stated error rate).
    refuted: it is above; `at` names the input, which is then the counter-example.
    """
    if not tolerance > 0:
        raise ValueError(f"tolerance: expected a positive number, got {tolerance}")
    if not error >= 0:
        raise ValueError(f"error: expected a residual of at least 0, got {error}")
    where = f" at {at}" if at else ""
    if error <= tolerance:
        # The residual itself is rounding noise, and differs from one processor to the next.
        return Verdict.CONFIRMED, statement, f"holds to {figures.show(tolerance)}{where}"
    off = f"off by {float(error):.2g}, tolerance {figures.show(tolerance)}"
    return Verdict.REFUTED, statement, f"counter-example{where}: {off}"


@rule
def mended(
    statement: str, printed: Number, right: Mapping[str, Number], tolerance: Number, *, at: str = ""
) -> tuple[Verdict, str, str]:
    """A printed formula, by its residual as it is printed, and with one term put right.

    `right` is the residual with a term added or replaced, by what that is. confirmed: the printed formula's residual is
    within the tolerance. corrected: one of `right` is. refuted: none is.
    """
    if (as_it_is := holds(statement, printed, tolerance, at=at)).verdict == Verdict.CONFIRMED:
        return as_it_is.verdict, statement, as_it_is.ours
    for change, error in right.items():
        if holds(statement, error, tolerance).verdict == Verdict.CONFIRMED:
            return Verdict.CORRECTED, statement, f"{as_it_is.ours}; it holds {change}"
    tried = "".join(f"; off by {float(error):.2g} {change}" for change, error in right.items())
    return Verdict.REFUTED, statement, f"{as_it_is.ours}{tried}"


@rule
def contradiction(
    first: tuple[str, Number | Interval], second: tuple[str, Number | Interval], *, unit: str = ""
) -> tuple[Verdict, str, str]:
    """Two statements of one source about the same quantity, each a quotation with its value or (low, high).

    confirmed: the two have a value in common. inconsistent: they have none.
    """
    quotes = f'"{first[0]}" and "{second[0]}"'
    (low, high), (other_low, other_high) = figures.interval(first[1], "first"), figures.interval(second[1], "second")
    sides = f"{figures.span((low, high), unit)} and {figures.span((other_low, other_high), unit)}"
    if max(low, other_low) <= min(high, other_high):
        return Verdict.CONFIRMED, quotes, f"{sides} agree"
    return Verdict.INCONSISTENT, quotes, f"{sides} exclude each other"


@rule
def region(
    claimed: Interval | Mapping[str, Interval], measured: Mapping[str, Number], *, unit: str = ""
) -> tuple[Verdict, str, str]:
    """A range that is claimed, against what was computed or measured on a grid of settings.

    `claimed` is (low, high), ends included, for the whole grid or for each setting. confirmed: inside everywhere.
    refuted: nowhere. conditional: in part; both regions are named.
    """
    ranges = claimed if isinstance(claimed, Mapping) else dict.fromkeys(measured, claimed)
    figures.check(ranges, measured, "claimed", "measured")
    texts = {label: figures.span(figures.interval(ends, "claimed"), unit) for label, ends in ranges.items()}
    said = figures.listing(texts) if isinstance(claimed, Mapping) else next(iter(texts.values()))
    have = {label: figures.show(value, unit) for label, value in measured.items()}
    inside = [
        label
        for label, (low, high) in ranges.items()
        if not (figures.above(measured[label], high) or figures.above(low, measured[label]))
    ]
    outside = _rest(ranges, inside)
    if not outside:
        return Verdict.CONFIRMED, said, figures.listing(have)
    if not inside:
        return Verdict.REFUTED, said, f"{figures.listing(have)}: outside everywhere"
    failing = figures.listing({label: have[label] for label in outside})
    return Verdict.CONDITIONAL, said, f"holds at {figures.some(inside)}; not at {failing}"


@rule
def agrees(claimed: Interval, measured: Mapping[str, Interval], *, unit: str = "") -> tuple[Verdict, str, str]:
    """A range that is claimed, which may contain 0, against measured confidence intervals.

    confirmed: each interval has a value in common with the range. conditional: some have; the settings are named.
    refuted: none has.
    """
    if not measured:
        raise ValueError("measured: expected at least one setting, got none")
    least, most = figures.interval(claimed, "claimed")
    ends = {label: figures.interval(found, "measured") for label, found in measured.items()}
    have = {label: figures.span(found, unit) for label, found in ends.items()}
    common = [label for label, (low, high) in ends.items() if low <= most and high >= least]
    return by_setting(figures.span((least, most), unit), have, common, (), how=("holds", "not"), nowhere="nowhere")


@rule
def effect(
    claimed: Interval, measured: Mapping[str, Interval], control: Mapping[str, Interval], *, unit: str = ""
) -> tuple[Verdict, str, str]:
    """A claimed gain against measured intervals, beside those of a control that compares like with like.

    `claimed` is the range of the gain, with finite ends; `measured` and `control` are confidence intervals by setting.
    A gain shows where its interval lies wholly above the control's. It is excluded where none shows and the interval
    lies below the middle of the claimed range, so that most of what is claimed would have shown. confirmed: a gain
    within the claimed range shows everywhere. conditional: in some settings, which are named. refuted: in none, and
    everywhere it is excluded or outside the range. untestable: in none, and somewhere the noise could hide it.
    """
    figures.check(measured, control, "measured", "control")
    least, most = figures.interval(claimed, "claimed", finite=True)
    within, hidden, have = [], [], {}
    for label in measured:
        low, high = figures.interval(measured[label], "measured")
        noise_low, noise = figures.interval(control[label], "control")
        have[label] = f"{figures.span((low, high), unit)} (control {figures.span((noise_low, noise), unit)})"
        if low > noise and low <= most and high >= least:
            within.append(label)
        elif low <= noise and high >= (least + most) / 2:
            hidden.append(label)
    said = figures.span((least, most), unit)
    return by_setting(
        said, have, within, hidden, unclear="the noise at {} could hide it", nowhere="no such gain shows anywhere"
    )


@rule
def improves(statement: str, gains: Mapping[str, Interval], *, unit: str = "") -> tuple[Verdict, str, str]:
    """A gain whose size the source does not state, by measured intervals of it.

    `gains` are confidence intervals of the gain itself, by setting, that hold all at once: with several settings the
    caller makes each so much wider. A gain shows where its interval lies above 0; there is none where the interval
    ends at 0 or below. confirmed: a gain shows everywhere. conditional: in some settings, which are named. refuted:
    there is none anywhere. untestable: none shows, and somewhere the interval does not decide.
    """
    if not gains:
        raise ValueError("gains: expected at least one setting, got none")
    ends = {label: figures.interval(gain, "gains") for label, gain in gains.items()}
    have = {label: figures.span(gain, unit) for label, gain in ends.items()}
    shown = [label for label, (low, _) in ends.items() if low > 0]
    undecided = [label for label, (low, high) in ends.items() if low <= 0 < high]
    return by_setting(statement, have, shown, undecided, nowhere="no gain anywhere")


@rule
def untestable(
    statement: str, needs: Mapping[str, Any], *, lack: str = "the source does not define"
) -> tuple[Verdict, str, str]:
    """A statement whose test needs what is not there: as a rule, quantities that the source does not define.

    `needs` maps each thing that the test needs to what there is of it, None where there is nothing; `lack` says how it
    is missing. If none is, there is something to test, and ValueError is raised.
    """
    missing = [name for name, defined in needs.items() if defined is None]
    if not missing:
        raise ValueError(f"needs: expected a quantity that the source does not define, got {dict(needs)}")
    return Verdict.UNTESTABLE, statement, f"{lack} {', '.join(missing)}"


def all_of(parts: Parts) -> Finding:
    """A claim of several parts, by label: the verdict is the first in `PRECEDENCE` that a part has."""
    if not parts:
        raise ValueError("parts: expected at least one finding, got none")
    verdict = min((finding.verdict for finding in parts.values()), key=PRECEDENCE.index)
    mixed = any(finding.verdict != verdict for finding in parts.values())
    source = "; ".join(f"{label}: {finding.source}" for label, finding in parts.items())
    ours = "; ".join(
        f"{label}: {finding.ours}" + (f" ({finding.verdict})" if mixed else "") for label, finding in parts.items()
    )
    names = dict.fromkeys(name for finding in parts.values() for name in finding.rule.split(", "))
    return Finding(verdict, source, ours, ", ".join(names))


def by_setting(
    said: str,
    have: Mapping[str, str],
    shown: Collection[str],
    undecided: Collection[str],
    *,
    how: tuple[str, str] = ("shows", "not"),
    unclear: str = "undecided at {}",
    nowhere: str,
) -> tuple[Verdict, str, str]:
    """What rules say that look for something in each setting: `shown` everywhere, in some, or in none; and if in none,
    whether it is `undecided` somewhere, or nowhere. `have` is what was found, in words."""
    listed = figures.listing(have, undecided)
    if len(shown) == len(have):
        return Verdict.CONFIRMED, said, listed
    if shown:
        rest = figures.listing({label: have[label] for label in _rest(have, shown)})
        return Verdict.CONDITIONAL, said, f"{how[0]} at {figures.some(shown)}; {how[1]} at {rest}"
    if undecided:
        return Verdict.UNTESTABLE, said, f"{listed}: {unclear.format(figures.some(undecided))}"
    return Verdict.REFUTED, said, f"{listed}: {nowhere}"


def _compare(claimed: Formula, exact: Formula, held: Collection[str]) -> tuple[list[Formula], list[Formula]]:
    """Terms of the exact form that outgrow the claim, and terms of the claim that outgrow the exact form."""
    upper, truth = orders.monomials(claimed, held), orders.monomials(exact, held)
    return orders.excess(truth, upper), orders.excess(upper, truth)


def _rest(labels: Collection[str], taken: Collection[str]) -> list[str]:
    return [label for label in labels if label not in taken]


def _terms(terms: Collection[Formula]) -> str:
    return f"${', '.join(figures.latex(term) for term in terms)}$"
