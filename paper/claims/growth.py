"""Rules for orders of growth: big-O claims against exact closed forms."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from ortho.cost import orders
from ortho.cost.orders import Formula
from paper.claims import figures
from paper.claims.settings import by_setting
from paper.claims.severity import Severity, heaviest
from paper.claims.verdicts import Finding, Verdict, rule

# Symbols that configure a model and do not grow with the problem: an order without one lacks a constant, not a term.
CONFIGURATION = ("B", "H", "L")


@rule
def growth(
    claimed: Formula, exact: Formula, *, held: Collection[str] = (), settings: Collection[str] = CONFIGURATION
) -> Finding:
    r"""A big-O claim against the exact closed form, all sizes growing independently.

    Terms are compared as in `ortho.cost.orders`; sizes in `held` are constants (to ask what dominates for N >> d,
    hold d). confirmed: each is within the order of the other. corrected: the claim is an upper bound but not a tight
    one (`wording`); or it misses nothing but constants of the configuration (`settings`, such as the number of heads;
    `constant`). refuted, `substance`: the exact form has a term that grows faster than the whole claim, so that the
    claim is not an upper bound.
    """
    said = f"$O({figures.latex(orders.parse(claimed))})$"
    have = figures.show(exact) + (f" for constant ${', '.join(held)}$" if held else "")
    missing, loose = compare(claimed, exact, held)
    if not missing and not loose:
        return Finding(Verdict.CONFIRMED, said, have, f"{said} is the order of the exact form, {have}")
    exactly = f"the exact form is {have}"
    left_out = ""
    if missing:
        dropped, loose = compare(claimed, exact, (*held, *settings))
        if dropped:
            why = f"drops {_terms(dropped)}"
            clause = f"{said} {why}; {exactly}"
            return Finding(Verdict.REFUTED, said, f"{have}: the claim {why}", clause, Severity.SUBSTANCE)
        there = {symbol for term in missing for symbol in term.free_symbols if symbol.name in settings}
        others = {symbol: [name for name in settings if name != symbol.name] for symbol in there}
        symbols = [symbol for symbol in there if compare(claimed, exact, (*held, *others[symbol]))[0]]
        left_out = f"leaves out {_terms(sorted(symbols, key=str))} in {_terms(missing)}"
    too_high = f"no term grows like {_terms(loose)}" if loose else ""
    why = "; ".join(filter(None, (left_out and f"the claim {left_out}", too_high)))
    clause = "; ".join(filter(None, (f"{said} {left_out or 'is not tight'}", too_high, exactly)))
    severity = Severity.CONSTANT if left_out else Severity.WORDING
    return Finding(Verdict.CORRECTED, said, f"{have}: {why}", clause, severity)


@rule
def growth_where(
    claimed: Formula, exact: Mapping[str, Formula], *, settings: Collection[str] = CONFIGURATION
) -> Finding:
    """A big-O claim against the exact closed forms of several settings, each compared as by `growth`.

    confirmed: `growth` confirms it in every setting. corrected: `growth` refutes it in none; the heaviest severity
    counts. conditional: up to constants of the configuration, the claim is an upper bound in some settings, which are
    named. refuted: in none. The last two are of `substance`.
    """
    if not exact:
        raise ValueError("exact: expected at least one setting, got none")
    found = {label: growth(claimed, formula, settings=settings) for label, formula in exact.items()}
    have = {label: finding.ours for label, finding in found.items()}
    said = next(iter(found.values())).source
    held = [label for label, finding in found.items() if finding.verdict != Verdict.REFUTED]
    severity = heaviest(finding.severity for finding in found.values())
    what = f"{said} is the order"
    whole = by_setting(said, have, held, (), how=("holds", "not"), what=what, nowhere="nowhere an upper bound")
    if severity is None:
        return whole
    if whole.verdict != Verdict.CONFIRMED:
        label = next(label for label in exact if label not in held)
        drops = f"drops {_terms(compare(claimed, exact[label], settings)[0])}, as at {label}"
        where = f"holds in {figures.share(len(held), len(exact), 'settings')} ({figures.some(held)}); elsewhere it "
        shown = figures.show(exact[label])
        return replace(whole, clause=f"{said} {where if held else ''}{drops}, where the exact form is {shown}")
    label, worst = next((label, finding) for label, finding in found.items() if finding.severity == severity)
    return replace(worst, ours=whole.ours, clause=worst.clause + figures.bracketed(label))


def compare(claimed: Formula, exact: Formula, held: Collection[str]) -> tuple[list[Formula], list[Formula]]:
    """Terms of the exact form that outgrow the claim, and terms of the claim that outgrow the exact form."""
    upper, truth = orders.monomials(claimed, held), orders.monomials(exact, held)
    return orders.excess(truth, upper), orders.excess(upper, truth)


def _terms(terms: Collection[Formula]) -> str:
    return f"${', '.join(figures.latex(term) for term in terms)}$"
