"""Figures: reading printed ones, comparing them, and setting ours as text that is the same on every machine."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, inf, isclose, isfinite, isinf, isnan
from typing import Any

Number = int | float | Fraction
Interval = tuple[Number, Number]

# Units that are often confused with another: the unit that is meant, and how many of the named unit it is.
SLIPS: dict[str, tuple[str, Fraction]] = {
    "kB": ("in KiB, not kB", Fraction(2**10, 10**3)),
    "MB": ("in MiB, not MB", Fraction(2**20, 10**6)),
    "GB": ("in GiB, not GB", Fraction(2**30, 10**9)),
    "FLOPs": ("in multiply-adds, not FLOPs", Fraction(2)),
}

_PRINTED = re.compile(r"(~?)(-?)((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.(\d+))?)")
_NOISE = Fraction(1, 10**9)  # of a unit of the last digit: what rounding in float64 can do to an exact tie
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_ROUNDING = 1e-9  # anything smaller is the rounding of a computation, or a bound on it
_SHOWN = 6  # figures listed in full; of a longer list the first are shown
_WORDS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_FEW = 2  # figures that a sentence names


@dataclass(frozen=True)
class Printed:
    """A printed figure and the weight of its last digit."""

    value: Fraction
    unit: Fraction


def read(text: str) -> Printed:
    """'15.30' -> 15.3 to 0.01; '2,359,296' -> to 1; '~80' -> to 10. ValueError for anything else."""
    match = _PRINTED.fullmatch(text.strip())
    if not match:
        raise ValueError(f"source: expected a printed figure such as '15.30', '2,359,296' or '~80', got {text!r}")
    about, sign, digits, decimals = match.groups()
    digits = digits.replace(",", "")
    unit = Fraction(1, 10 ** len(decimals)) if decimals else Fraction(1)
    if about and not decimals:
        unit = Fraction(10 ** (len(digits) - len(digits.rstrip("0") or digits)))
    return Printed(Fraction(sign + digits), unit)


def exact(label: str, value: Number) -> Fraction:
    """The figure as a fraction; ValueError, naming the label, if it is not finite."""
    if not isfinite(value):
        raise ValueError(f"ours: expected a finite figure at {label}, got {value}")
    return Fraction(value)


def check(one: Mapping[str, Any], other: Mapping[str, Any], first: str, second: str) -> None:
    """ValueError, naming the argument, unless both sides have the same labels and no figure is NaN."""
    if not other:
        raise ValueError(f"{second}: expected at least one label, got none")
    if one.keys() != other.keys():
        raise ValueError(f"{second}: expected the labels of {first}, {list(one)}, got {list(other)}")
    for name, side in ((first, one), (second, other)):
        for label, value in side.items():
            if isinstance(value, float) and isnan(value):
                raise ValueError(f"{name}: expected a number at {label}, got {value}")


def above(value: Number, limit: Number) -> bool:
    """Whether the value is above the limit by more than rounding in float64 can part two equal figures."""
    return value > limit and not isclose(value, limit, rel_tol=1e-9, abs_tol=1e-12)


def agreement(source: Mapping[str, Printed], ours: Mapping[str, Fraction]) -> str:
    """How all of ours become the printed figures: 'rounded' or 'cut off', or '' if they do not."""
    noise = {label: figure.unit * _NOISE for label, figure in source.items()}
    if all(abs(ours[label] - figure.value) <= figure.unit / 2 + noise[label] for label, figure in source.items()):
        return "rounded"
    tails = {
        label: ours[label] - figure.value if figure.value >= 0 else figure.value - ours[label]
        for label, figure in source.items()
    }
    if all(-noise[label] <= tails[label] < figure.unit for label, figure in source.items()):
        return "cut off"
    return ""


def deviation(source: Fraction, ours: Fraction) -> float:
    """The difference relative to ours; infinite if ours is zero and the source's is not."""
    if source == ours:
        return 0.0
    return float(abs(source - ours) / abs(ours)) if ours else inf


def common_factor(source: Mapping[str, Printed], ours: Mapping[str, Fraction]) -> float | None:
    """The roundest factor from printed figures to ours that agrees with every printed digit; None if there is none.

    A factor always fits one figure, or equal ones: at least two different figures are needed.
    """
    if len({figure.value for figure in source.values()}) < 2:
        return None
    low, high = Fraction(0), None
    for label, figure in source.items():
        if not (figure.value > figure.unit / 2 and ours[label] > 0):
            return None
        low = max(low, ours[label] / (figure.value + figure.unit / 2))
        above = ours[label] / (figure.value - figure.unit / 2)
        high = above if high is None else min(high, above)
    if high is None or low > high:
        return None
    middle = float((low + high) / 2)
    rounder = (float(f"{middle:.{digits}g}") for digits in range(1, 16))
    return next((factor for factor in rounder if low <= factor <= high), middle)


def interval(value: Number | Interval, name: str, *, finite: bool = False) -> Interval:
    """(low, high) of a range or of a single figure. ValueError, naming the argument, unless low <= high and, if
    `finite`, both ends are finite."""
    low, high = value if isinstance(value, tuple) else (value, value)
    if not low <= high:
        raise ValueError(f"{name}: expected (low, high) with low <= high, got {value}")
    if finite and (isinf(low) or isinf(high)):
        raise ValueError(f"{name}: expected finite ends, got {value}")
    return low, high


def outward(ends: Interval) -> Interval:
    """The ends rounded outwards to one decimal; rounding errors of float64 do not count."""
    low, high = (end if isinf(end) else round(10 * float(end), 6) for end in ends)
    return low if isinf(low) else floor(low) / 10, high if isinf(high) else ceil(high) / 10


def show(value: Any, unit: str = "") -> str:
    """An integer in full, another number to four digits (to one below `_ROUNDING`), a formula as mathematics; then the
    unit. ValueError for NaN."""
    if isinstance(value, str) or hasattr(value, "free_symbols"):
        from ortho.cost import orders

        expr = orders.parse(value)
        if expr.free_symbols or not expr.is_Rational:
            return f"${latex(expr)}${unit}"
        value = Fraction(str(expr))
    if isnan(value):
        raise ValueError(f"value: expected a number, got {value}")
    if isinf(value):
        return f"{'-' if value < 0 else ''}\u221e{unit}"
    if isinstance(value, int) or (value == int(value) and abs(value) < 1e15):
        return f"{int(value):,}{unit}"
    text = f"{float(value):.{1 if abs(value) < _ROUNDING else 4}g}"
    mantissa, e, power = text.partition("e")
    return f"${mantissa}\\times 10^{{{int(power)}}}${unit}" if e else f"{text}{unit}"


def numbers(found: Iterable[Any]) -> str:
    """One number, date or other value, or the least and the most of several."""
    each = set(found)
    return str(*each) if len(each) == 1 else f"{min(each)} to {max(each)}"


def latex(formula: Any) -> str:
    """A formula as LaTeX, with one-character exponents bare, as one writes it by hand."""
    import sympy

    return re.sub(r"\^\{(\w)\}", r"^\1", sympy.latex(formula))


def in_formula(text: str) -> str:
    """A formula's text in which TeX sets thousands without a gap: '4,096' -> '4{,}096'."""
    return _THOUSANDS.sub("{,}", text)


def percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def span(ends: Interval, unit: str = "") -> str:
    """'25 to 30 %', 'at least 2', 'at most 5', or a single figure."""
    low, high = ends
    if low == high:
        return show(low, unit)
    if high == inf:
        return f"at least {show(low, unit)}"
    return f"at most {show(high, unit)}" if low == -inf else f"{show(low)} to {show(high, unit)}"


def furthest(values: Mapping[str, Number]) -> str:
    """The label of the greatest value; the first, if several are equal except for rounding in float64."""
    return max(values, key=lambda label: float(f"{float(values[label]):.6g}"))


def nearest(value: Number, ends: Interval) -> Number:
    """The number of an interval that is nearest to a value."""
    low, high = ends
    return min(max(value, low), high)


def words(text: str) -> int:
    """How many words a text has; a formula counts as one."""
    return len(re.sub(r"\$[^$]*\$", "formula", text).split())


def distance(one: Number, other: Number) -> Number:
    return max(one, other) - min(one, other)


def in_words(count: int) -> str:
    """A count up to twelve as a word, a larger one in figures; 0 is 'none'."""
    return _WORDS[count] if count < len(_WORDS) else f"{count:,}"


def share(count: int, whole: int, noun: str, one: str = "", several: str = "") -> str:
    """'one of three parts holds', 'both parts hold', 'all three parts hold': the noun is a plural, the verb has two
    forms."""
    verb = one if count == 1 else several
    if count < whole:
        amount = f"{in_words(count)} of {in_words(whole)}"
    else:
        amount = "both" if whole == 2 else f"all {in_words(whole)}"
    return " ".join(filter(None, (amount, noun, verb)))


def bracketed(label: str) -> str:
    """A label as it stands after its figure: ' (label)', or nothing."""
    return f" {label if label.startswith('(') else f'({label})'}" if label else ""


def few(texts: Mapping[str, str]) -> str:
    """'text (label)' in a row, for a sentence; of many only the first `_FEW`."""
    return some([f"{text}{bracketed(label)}" for label, text in texts.items()], _FEW)


def some(labels: Collection[str], most: int = _SHOWN) -> str:
    """Labels in a row, of many only the first `most`; separated by semicolons if one of them has a comma."""
    first = list(labels)[:most]
    mark = "; " if any(", " in label for label in first) else ", "
    return mark.join(first) + (f" and {in_words(len(labels) - len(first))} more" if len(labels) > len(first) else "")


def listing(texts: Mapping[str, str], first: Collection[str] = ()) -> str:
    """'label: text' in a row, beginning with the labels `first`; of many only the first `_SHOWN`. An unlabelled entry
    (label '') is its text alone."""
    ordered = {label: texts[label] for label in first} | dict(texts)
    return some([f"{label}: {text}" if label else text for label, text in ordered.items()])
