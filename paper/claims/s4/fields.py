"""S4, section 4: linear attention in other fields, and whether it is fit for all tasks with long sequences."""

from collections.abc import Mapping

from paper import experiments
from paper.claims.figures import listing, span
from paper.claims.ledger import evidence
from paper.claims.outcomes import outperforms
from paper.claims.rules import all_of, improves, untestable
from paper.claims.s2.combinations import CHAPTER, IDLE, on_digits
from paper.claims.verdicts import Finding
from paper.experiments.learning import synthetic_rows
from paper.experiments.learning.synthetic_rows import Learnt
from paper.experiments.statistics import LEVEL, Decision, Interval, success_interval

LINEAR, SOFTMAX = "linear", "learned"
KERNELS = (LINEAR, "FAVOR+")  # linear arms that see images
HALF = 0.5  # a task is learnt by an arm of which more than half of the runs learn it

Tasks = Mapping[str, Mapping[str, Learnt]]


def tasks() -> dict[str, dict[str, Learnt]]:
    """Synthetic task -> arm -> its runs."""
    records = experiments.load("synthetic")
    return synthetic_rows.learnt(records, experiments.judged_device(records))


def rate(runs: Learnt, comparisons: int) -> Interval:
    """The exact interval of the rate of successes; of so many, all ends are right but for `LEVEL`."""
    rule = Decision(margin=0, level=LEVEL, higher_is_better=True)
    return success_interval(runs.successes, len(runs.seeds), confidence=rule.confidence(comparisons))


def softmax_learns(found: Tasks) -> list[str]:
    """The tasks that softmax heads learn in more than half of their runs, shown at the level of all together."""
    return [task for task, arms in found.items() if SOFTMAX in arms and rate(arms[SOFTMAX], len(found))[0] > HALF]


def learns(found: Tasks) -> dict[str, Interval]:
    """Of those tasks, by how many per cent more than half of the runs linear attention learns each."""
    known = [task for task in softmax_learns(found) if LINEAR in found[task]]
    ends = {task: rate(found[task][LINEAR], len(known)) for task in known}
    return {task: (round(100 * (low - HALF), 1), round(100 * (high - HALF), 1)) for task, (low, high) in ends.items()}


def fit_for_all() -> Finding:
    """Whether linear attention learns, more often than not, what softmax heads do."""
    statement = "learnt in more than half of the runs, as by softmax heads"
    gains = learns(tasks())
    if not gains:
        needs = {"task that softmax heads learn, with runs of linear ones": None}
        return untestable(statement, needs, lack="there is no")
    return improves(statement, {f"{task}, runs beyond half": gain for task, gain in gains.items()}, unit=" %")


def counts(found: Tasks) -> str:
    """How many runs of linear attention learn each task, and how many with softmax, in words."""
    both = {task: (arms[LINEAR], arms[SOFTMAX]) for task, arms in found.items() if {LINEAR, SOFTMAX} <= arms.keys()}
    return ", ".join(
        f"{task} {ours.successes} of {len(ours.seeds)} ({theirs.successes} of {len(theirs.seeds)})"
        for task, (ours, theirs) in both.items()
    )


def by_attending() -> Finding:
    """Whether linear heads see more in images than heads that see no other token do."""
    digits = on_digits()
    statement = f"better than heads that see no other token, {digits.unit.name}"
    found = {arm: digits.compared(arm, IDLE) for arm in KERNELS}
    have = {arm: outcome for arm, outcome in found.items() if outcome is not None}
    if len(have) < len(found):
        lacking = dict.fromkeys(found.keys() - have.keys())
        return untestable(statement, dict(sorted(lacking.items())), lack="there are not yet two runs of")
    return outperforms(statement, have)


def beside_softmax() -> str:
    """What linear heads have more than softmax on digits, in words, as far as there are runs."""
    digits = on_digits()
    found = {arm: digits.compared(arm, SOFTMAX) for arm in KERNELS}
    told = {arm: f"{span(one[0])} ({one[1]})" for arm, one in found.items() if one is not None}
    return f"More {digits.unit.name} than softmax: {listing(told)}. " if told else ""


@evidence("S4.4b", chapter=CHAPTER)
def other_fields() -> Finding:
    finding = all_of({"images": by_attending(), "synthetic tasks that softmax heads learn": fit_for_all()})
    runs = counts(tasks())
    learnt = f"Runs that learn a task, of softmax in brackets: {runs}. " if runs else ""
    return finding.noting(
        f"{beside_softmax()}{learnt}An open question of the source's, answered here for small models and short "
        "sequences. No model here hears speech"
    )
