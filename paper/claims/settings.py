"""Rules that look for an effect in each of several settings."""

from collections.abc import Collection, Mapping

from paper.claims import figures
from paper.claims.figures import Interval, Number
from paper.claims.severity import Severity, apart
from paper.claims.verdicts import Finding, Verdict, rule


@rule
def agrees(claimed: Interval, measured: Mapping[str, Interval], *, unit: str = "") -> Finding:
    """A range that is claimed, which may contain 0, against measured confidence intervals.

    confirmed: each interval has a value in common with the range. conditional: some have; the settings are named.
    refuted: none has. The severity of the last two is how far `apart` the nearest ends of range and interval are.
    """
    if not measured:
        raise ValueError("measured: expected at least one setting, got none")
    wanted = figures.interval(claimed, "claimed")
    ends = {label: figures.interval(found, "measured") for label, found in measured.items()}
    near = {label: figures.nearest(figures.nearest(wanted[0], found), wanted) for label, found in ends.items()}
    pairs = {label: (near[label], figures.nearest(near[label], found)) for label, found in ends.items()}
    have = {label: figures.span(found, unit) for label, found in ends.items()}
    common = [label for label, (one, other) in pairs.items() if one == other]
    said = figures.span(wanted, unit)
    return by_setting(
        said,
        have,
        common,
        (),
        how=("holds", "not"),
        what=f"the claimed {said} is within the error",
        nowhere="nowhere in the claimed range",
        against={label: figures.distance(*pair) for label, pair in pairs.items()},
        excluded=apart(pair for label, pair in pairs.items() if label not in common),
    )


@rule
def effect(
    claimed: Interval, measured: Mapping[str, Interval], control: Mapping[str, Interval], *, unit: str = ""
) -> Finding:
    """A claimed gain against measured intervals, beside those of a control that compares like with like.

    `claimed` is the range of the gain, with finite ends; `measured` and `control` are confidence intervals by setting.
    A gain shows where its interval lies wholly above the control's. It is excluded where none shows and the interval
    lies below the middle of the claimed range: most of the claimed gain would have shown. confirmed: a gain within the
    claimed range shows everywhere. conditional: in some settings, which are named. refuted: in none, and everywhere it
    is excluded or outside the range. untestable: in none, and somewhere the noise could hide it. The severity is that
    of `by_setting`; for gains that show everywhere, but outside the range, it is how far `apart` from it they are.
    """
    figures.check(measured, control, "measured", "control")
    least, most = figures.interval(claimed, "claimed", finite=True)
    within, hidden, beyond, have, against = [], [], [], {}, {}
    for label in measured:
        low, high = figures.interval(measured[label], "measured")
        noise_low, noise = figures.interval(control[label], "control")
        have[label] = f"{figures.span((low, high), unit)} (control {figures.span((noise_low, noise), unit)})"
        against[label] = -low
        if low > noise and low <= most and high >= least:
            within.append(label)
        elif low > noise:
            beyond.append((most, low) if low > most else (least, high))
        elif high >= (least + most) / 2:
            hidden.append(label)
    said = figures.span((least, most), unit)
    everywhere = len(within) + len(beyond) == len(measured)
    return by_setting(
        said,
        have,
        within,
        hidden,
        what=f"a gain of {said} shows",
        nowhere="no such gain shows anywhere",
        unclear="the noise at {} could hide it",
        against=against,
        excluded=apart(beyond) if everywhere else Severity.SUBSTANCE,
    )


@rule
def improves(statement: str, gains: Mapping[str, Number | Interval], *, unit: str = "") -> Finding:
    """A gain whose size the source does not state, by measured intervals of it.

    `gains` are exact, or confidence intervals of the gain itself, by setting. The intervals hold all at once: with
    several settings, the caller widens each accordingly. A gain shows where its interval lies above 0; there is none
    where the interval ends at 0 or below. confirmed: a gain shows everywhere. conditional: in some settings, which are
    named. refuted: there is none anywhere. untestable: none shows, and somewhere the interval does not decide. The
    severity is that of `by_setting`.
    """
    if not gains:
        raise ValueError("gains: expected at least one setting, got none")
    ends = {label: figures.interval(gain, "gains") for label, gain in gains.items()}
    have = {label: figures.span(gain, unit) for label, gain in ends.items()}
    shown = [label for label, (low, _) in ends.items() if low > 0]
    undecided = [label for label, (low, high) in ends.items() if low <= 0 < high]
    against = {label: -low for label, (low, _) in ends.items()}
    return by_setting(
        statement, have, shown, undecided, what="the gain shows", nowhere="no gain anywhere", against=against
    )


def by_setting(
    said: str,
    have: Mapping[str, str],
    shown: Collection[str],
    undecided: Collection[str],
    *,
    what: str,
    nowhere: str,
    somewhere: str = "",
    how: tuple[str, str] = ("shows", "not"),
    unclear: str = "undecided at {}",
    against: Mapping[str, Number] | None = None,
    excluded: Severity = Severity.SUBSTANCE,
) -> Finding:
    """The finding of a rule that looks for something in each setting: `shown` everywhere, in some, or in none; if in
    none, whether it is `undecided` somewhere. `have` is what was found, in words; `what` and `nowhere` say what it
    means if it shows, and if it shows nowhere. `against` says how far each setting speaks against the claim: the clause
    names the one that does so most; without `against`, the first. `somewhere` says what a claim of all settings meets
    where it is excluded: if it shows nowhere, one such setting refutes it, whether others are undecided or not.

    If the claim does not hold in every setting, its severity is `excluded`, by default `substance`, if a setting
    excludes what is claimed; it is `wording` if the other settings merely leave it open.
    """
    listed = figures.listing(have, undecided)
    rest = [label for label in have if label not in shown]
    out = [label for label in rest if label not in undecided]
    among = out or rest or list(have)
    named = figures.furthest({label: against[label] for label in among}) if against else among[0]
    example = f"{named}: {have[named]}" if named else have[named]
    severity = excluded if out else Severity.WORDING
    if not rest:
        where = f"{figures.share(len(have), len(have), 'settings')}, {'the least at' if against else 'e.g.'}"
        clause = f"{what} in {where if len(have) > 1 else 'the one setting,'} {example}"
        return Finding(Verdict.CONFIRMED, said, listed, clause)
    if shown:
        failing = figures.listing({label: have[label] for label in rest})
        others = f"in the {figures.in_words(len(rest))} others, e.g." if len(rest) > 1 else "at"
        clause = f"{what} in {figures.share(len(shown), len(have), 'settings')}, not {others} {example}"
        parted = f"{how[0]} at {figures.some(shown)}; {how[1]} at {failing}"
        return Finding(Verdict.CONDITIONAL, said, parted, clause, severity)
    if undecided and somewhere and out:
        where = figures.share(len(out), len(have), "settings")
        clause = f"{somewhere} in {where}, e.g. {example}; the others leave it open"
        return Finding(Verdict.REFUTED, said, f"{figures.listing(have, out)}: {somewhere} in {where}", clause, severity)
    if undecided:
        first = next(iter(undecided))
        clause = f"{have[first]} leaves it open{figures.bracketed(first)}"
        if len(have) > 1:
            who = figures.share(len(undecided), len(have), "settings", "leaves", "leave")
            clause = f"{who} it open, {'e.g.' if len(undecided) > 1 else 'at'} {first}: {have[first]}"
        reason = unclear.format(figures.some(undecided))
        return Finding(Verdict.UNTESTABLE, said, f"{listed}: {reason}", clause)
    where = f" in {figures.in_words(len(have))} settings, e.g." if len(have) > 1 else ","
    return Finding(Verdict.REFUTED, said, f"{listed}: {nowhere}", f"{nowhere}{where} {example}", severity)
