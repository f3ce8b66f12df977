"""What this paper found, as values that several pages print: the article, the Chinese page, the page on what is new.

Each value is computed once, by the functions below, and has a name by which a page asks for it. All are strings, as
they are printed; formulas are in the notation that Python, Typst and a reader share. What the pages' words rely on
(that a loss is a loss, that one bound lies below another) is asserted where it is computed.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import sympy

from ortho.cost import block, layer
from ortho.cost.big_o import H, N, d
from ortho.theory import retrieval, unbiasedness
from paper import experiments
from paper.claims.outcomes import BITS_A_BYTE, Unit
from paper.claims.shared import frozen_layer, printed_models, printed_speed_ups
from paper.claims.shared.one_learned_head import along_budgets
from paper.experiments.engine.records import Record
from paper.experiments.learning import copying_analysis, ladder, ladder_analysis, ladder_tables, language
from paper.experiments.learning.analysis import Judged, Runs
from paper.experiments.learning.ladder_arms import CONVOLUTION
from paper.experiments.resampling import student_difference
from paper.experiments.statistics import Decision, Interval
from paper.theory import approximation

WIDTH = 768
r = sympy.Symbol("r", positive=True)  # N / d
Values = dict[str, str]


@cache
def values() -> Mapping[str, str]:
    """All values by their names, which are letters, digits and underscores."""
    found: Values = {}
    for topic in (freezing, printed, measured, kernels, retrieving, freezing_learnt, longer_budgets):
        new = topic()
        assert not new.keys() & found.keys(), f"two values of one name: {sorted(new.keys() & found.keys())}"
        found |= new
    return found


def formula(expression: Any) -> str:
    """A formula as Typst reads it: powers as ^, products as spaces."""
    return str(sympy.sympify(expression)).replace("**", "^").replace("*", " ")


def speed_up(of: Callable[..., Any], projection: str, form: str = "reference") -> Any:
    """How many times as fast a training step of a layer or a block is by its FLOPs, as a function of r = N / d."""
    sides = [of(1, N, d, H, projection=one, form=form).step for one in ("learned", projection)]
    return sympy.simplify((sides[0] / sides[1]).subs(N, r * d))


def freezing() -> Values:
    """Products that leave the backward pass of a layer, and what that allows a step to gain."""
    learned, frozen, stopped = (
        layer(1, N, d, H, projection=one, form="reference").backward for one in ("learned", "frozen", "stopped")
    )
    weighted = [name for name in frozen_layer.PRODUCTS if name.startswith(("dW", "dX", "dO"))]
    before, after = (frozen_layer.backward_products(one) for one in ("learned", "frozen"))
    removed = [name for name in weighted if before[name] != after[name]]
    assert sympy.expand(frozen - learned + len(removed) * 2 * N * d**2) == 0
    return {
        "removed": str(len(removed)),
        "weighted": str(len(weighted)),
        "products": str(len(frozen_layer.PRODUCTS.keys() - {"S"})),  # which fused kernels alone compute again
        "backward_learned": formula(learned),
        "backward_frozen": formula(frozen),
        "backward_stopped": formula(stopped),
        "last_alone": formula(frozen_layer.backward_counted(frozen_layer.VALUES_LAST, input_grad=False)),
        "layer_most": f"{float(sympy.limit(speed_up(layer, 'frozen'), r, 0)):.3g}",
        "block_most": f"{float(sympy.limit(speed_up(block, 'frozen'), r, 0)):.3g}",
    }


def printed() -> Values:
    """The figures that the first source prints, and the rule behind them."""
    claimed = sorted(printed_speed_ups.SPEED_UPS.values(), key=float)
    rule = sympy.factor(printed_speed_ups.table_rule(r * d, d) / 100)
    return {
        "dong_speed_up": f"{100 / (1 - printed_speed_ups.DONG_SAVED / 100) - 100:.0f}",
        "source_least": str(claimed[0]),
        "source_most": str(claimed[-1]),
        "source_rule": formula(rule),
        "memory_share": str(printed_models.SHARE),
        "memory_block": f"{printed_models.saved_share(WIDTH, scope='block'):.1f}",
    }


def measured() -> Values:
    """Steps of frozen layers and blocks, as the source has them, on a CPU's clock, with commit and date."""
    kind = {"device": "cpu", "d": WIDTH, "dtype": "float32", "input_grad": True, "causal": False, "compiled": False}
    records = [one for one in experiments.load("training-step") if kind.items() <= one["configuration"].items()]
    made = records[0]["provenance"]
    device = made["device_name"].replace("(R)", "")
    rows = experiments.speedups([one for one in records if one["device"] == records[0]["device"]])
    found = {
        f"step_gain_{scope}": [
            100 * row["speedup"][1] - 100 for row in rows if (row["arm"], row["scope"]) == ("frozen", scope)
        ]
        for scope in ("layer", "block")
    }
    return {
        "step_device": f"{device}, commit {made['commit'][:8]} of {made['date_utc'][:10]}",
        **{name: f"{min(gains):.0f} to {max(gains):.0f}" for name, gains in found.items()},
    }


def kernels() -> Values:
    """Random features, by formula."""
    crossing = approximation.crossing("positive", "orthogonal", 64, 0.5)
    assert crossing is not None
    yardstick = 2**crossing.value
    return {
        "favor_short": f"{100 * unbiasedness.fixed_length_mean(64, 1.0, 1.0):.0f}",
        "favor_features": f"{100 * round(yardstick / 100):,}",
    }


def retrieving() -> Values:
    """Heads that retrieve untrained, by formula."""
    width, d = 16, 96
    return {
        "retrieval_width": str(width),
        "retrieval_d": str(d),
        "retrieval_capacity": f"{round(retrieval.capacity(width, d), -3):,.0f}",
        "retrieval_gaussian": f"{round(retrieval.capacity(width, d, draw='gaussian'), -3):,.0f}",
    }


def freezing_learnt() -> Values:
    """Small language models of bytes with learned, frozen, stopped and positional heads, and tables of counted bytes.

    Raises AssertionError where the records no longer say what the pages say in words.
    """
    records = experiments.load("bytes")
    device = experiments.judged_device(records)
    text = language.by_arm(records, device)
    _expect(text, "learned", frozen="worse", stopped="worse", positional="better")
    assert _judged(text["frozen"], text["frozen Gaussian"]).outcome not in ("better", "worse")
    _expect(text, "frozen 4 x", frozen="better")
    _expect(text, "frozen 1/4 x", frozen="better")
    equal = language.by_arm(experiments.load("bytes-parameters"), device)
    _expect(equal, "learned", positional="worse")
    baseline = text["learned"]
    steps, confidence = baseline.configuration["steps"], Decision.of(baseline.configuration).confidence()
    assert abs(confidence - (1 - 2 * ladder_analysis.LEVEL)) < 1e-9  # one kind of interval on all pages
    stages = along_budgets(experiments.load("bytes-budgets"), device, text)
    times = max(language.BUDGETS)
    later = stages[min(width for width, _ in stages), times]
    _expect(later, "learned", frozen="worse", positional="equivalent")
    (last, counted), (_, counted_later) = (language.best(round(steps * factor)) for factor in (1, times))
    assert counted < min(runs.mean("bits") for runs in text.values())
    return {
        "bytes_models": str(len(baseline.seeds)),
        "bytes_size": f"{round(baseline.parameters, -3):,} trained parameters (learned heads), {steps} steps",
        "confidence": f"{100 * confidence:g}",
        "later_times": f"{times:g}",
        "table_last": str(last),
        "table_bits": f"{counted:.2f}",
        "table_later": f"{counted_later:.2f}",
        "frozen_gap": _difference(text, "frozen", "learned"),
        "later_frozen_gap": _difference(later, "frozen", "learned"),
        **{f"bytes_{arm}": f"{text[arm].mean('bits'):.2f}" for arm in _SHOWN},
        **{f"later_{arm}": f"{later[arm].mean('bits'):.2f}" for arm in _SHOWN},
    }


_SHOWN = ("learned", "positional", "frozen", "stopped")


def longer_budgets() -> Values:
    """Two heads that retrieve untrained beside four learned ones, behind a short convolution, along longer budgets.

    Raises AssertionError where the records no longer say what the pages say in words.
    """
    records = ladder_records()
    bits = {text: ladder_tables.bits(experiments.load("ladder-tables"), text) for text in ladder.TEXTS}
    found = {
        (text, budget): _against_learned(records, text, budget)
        for text in ladder.TEXTS
        for budget in (ladder.LONG, ladder.LONGEST)
    }
    lead = found["python", ladder.LONG]
    assert lead.interval[1] < 0 < min(found[text, ladder.LONGEST].mean for text in ladder.TEXTS)
    counted = list(bits["novels"][ladder.LONGEST])
    kinds = {ladder_analysis.key(record)[1:] for record in records if record["configuration"]["text"] == "novels"}
    trained = (ladder_analysis.blocks(records, ("novels", *kind), ladder.LONGEST).values() for kind in kinds)
    assert min(counted) < min(np.mean([run.mean() for run in of]) for of in trained if of)
    sizes = ladder.case("python", ladder_analysis.RIVAL)
    return {
        "ladder_mb": _megabytes(ladder.LONG),
        "ladder_last_mb": _megabytes(ladder.LONGEST),
        "ladder_size": f"width {sizes['d']}, {sizes['L']} blocks",
        "ladder_induction": _with_runs(BITS_A_BYTE, lead.mean, lead.interval, len(lead.seeds)),
        "ladder_table_novels": str(counted.index(min(counted)) + 1),
    }


def ladder_records() -> list[Record]:
    """The ladder's runs that stand: without looks."""
    return ladder_analysis.standing([one for name in ladder_analysis.EXPERIMENTS for one in experiments.load(name)])


def copying_records() -> list[Record]:
    """The runs that learn to copy: the ladder's, and those with looks."""
    return ladder_records() + experiments.load("copying")


def begun_to_copy() -> tuple[int, int]:
    """How many runs on Python code of learned heads with a KV shift had begun to copy by the end of the longest budget,
    and how many there are.

    Raises AssertionError where the records no longer say what the pages say in words: that heads which retrieve
    untrained copy early in every run, and that one learned head beside two selective ones is at the end as good as
    learned heads with a KV shift, in the median seed, after a lead in every one. A mean would mix two groups: rivals
    that began long before, and late ones.
    """
    records = copying_records()

    def runs(kind: copying_analysis.Kind) -> Mapping[int, Any]:
        return copying_analysis.runs(records, kind, budget=ladder.LONGEST)

    induction = ladder_analysis.INDUCTION, CONVOLUTION
    for kind in (induction, copying_analysis.SELECTIVE, copying_analysis.NGRAM):
        assert all(copying_analysis.has_begun(run, 4) for run in runs(kind).values())
    ours, theirs = runs(copying_analysis.SELECTIVE), runs(copying_analysis.KV_SHIFT)
    leads = {
        budget: [
            copying_analysis.bits_at(ours[seed], budget) - copying_analysis.bits_at(theirs[seed], budget)
            for seed in ours.keys() & theirs.keys()
        ]
        for budget in (ladder.LONG, ladder.LONGEST)
    }
    assert max(leads[ladder.LONG]) < 0
    assert abs(float(np.median(leads[ladder.LONGEST]))) < copying_analysis.NO_WORSE
    return sum(copying_analysis.has_begun(run) for run in theirs.values()), len(theirs)


def _against_learned(records: Sequence[Any], text: str, budget: int) -> Any:
    """What two heads that retrieve untrained take more than four learned heads."""
    ours, theirs = (
        ladder_analysis.blocks(records, (text, kind, CONVOLUTION), budget)
        for kind in (ladder_analysis.INDUCTION, ladder_analysis.RIVAL)
    )
    return ladder_analysis.tested(ours, theirs, 0.0)


def _with_runs(unit: Unit, mean: float, interval: Interval, runs: int) -> str:
    """A difference with its interval and the number of runs, as text: 'mean (low to high, n = runs)'."""
    return f"{unit.spelt(mean, interval)[:-1]}, n\xa0=\xa0{runs})"


def _megabytes(budget: int) -> str:
    """How many million bytes the ladder's models have read at a budget."""
    sizes = ladder.case("python", ladder_analysis.RIVAL)
    return f"{budget * sizes['base'] * sizes['B'] * sizes['N'] / 1e6:.1f} MB"


def _judged(arm: Runs, other: Runs) -> Judged:
    """An arm against another; AssertionError where the runs are too few to be judged."""
    found = language.judged(arm, other)
    assert found is not None
    return found


def _expect(runs: Mapping[str, Runs], other: str, **outcomes: str) -> None:
    """AssertionError unless the rule that was fixed before the runs says this of these arms against another."""
    for arm, outcome in outcomes.items():
        said = _judged(runs[arm], runs[other]).outcome
        assert said == outcome, f"{arm} against {other}: expected {outcome}, got {said}"


def _difference(runs: Mapping[str, Runs], arm: str, other: str) -> str:
    """What an arm takes more than another, with Student's interval and the number of runs."""
    ours, theirs = runs[arm], runs[other]
    assert ours.seeds == theirs.seeds
    confidence = Decision.of(ours.configuration).confidence()
    found = student_difference(ours.values["bits"], theirs.values["bits"], confidence=confidence)
    return _with_runs(BITS_A_BYTE, *found, len(ours.seeds))
