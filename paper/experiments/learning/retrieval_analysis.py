"""Analysis of the records of `retrieval`, by the rule that is stated in that module."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from paper.experiments.engine.records import Record
from paper.experiments.learning import rates
from paper.experiments.learning.analysis import grouped, seed
from paper.experiments.learning.retrieval_tasks import (
    GROUPS,
    LENGTHS,
    ONE,
    SETTINGS,
    SUCCESS,
    H,
    is_learnt,
    part,
)
from paper.experiments.statistics import Interval, better_by_chance, holm, success_interval

LEVEL = 0.05  # of all pairs together
PAIRS = tuple((name, width, d) for width, d, names, _ in GROUPS for name in names)  # with the two arms `ONE`
Key = tuple[str, str, int, int]  # a task, an arm, the width of its convolution, d


class Climbs(NamedTuple):
    """An arm's runs on a task, in the order of their seeds. `steps` has for each run the lengths that it learnt, each
    with the number of steps at that length."""

    seeds: tuple[int, ...]
    steps: tuple[Mapping[int, int], ...]

    @property
    def reached(self) -> tuple[int, ...]:
        """The longest length that each run learnt; 0 for none."""
        return tuple(max(steps, default=0) for steps in self.steps)

    def successes(self, N: int) -> int:
        """The runs that learnt a length."""
        return sum(N in steps for steps in self.steps)

    def rate(self, N: int) -> Interval:
        """The exact interval of the rate of successes, at 95 %."""
        return success_interval(self.successes(N), len(self.seeds))

    @property
    def boundary(self) -> int:
        """The longest length that more than half of the runs learnt; 0 for none."""
        return max((N for N in LENGTHS if 2 * self.successes(N) > len(self.seeds)), default=0)


def counts(record: Record) -> bool:
    """Whether a run is a result: it does not choose a rate, and has the rate that was chosen, if one was."""
    return rates.counts({**record, "configuration": {**record["configuration"], "N": LENGTHS[0]}})


def climbs(records: Iterable[Record]) -> dict[Key, Climbs]:
    """The runs that count, of all CPUs together or of one other device."""
    return {
        key: Climbs(tuple(map(seed, group)), tuple(map(_steps, group)))
        for key, group in grouped(records, _key, counts).items()
    }


def _key(record: Record) -> Key:
    case = record["configuration"]
    return case["task"], case["arm"], case["convolution"], case["d"]


def _steps(record: Record) -> dict[int, int]:
    """Length that a run learnt -> after how many steps at that length it was seen to be learnt."""
    case, found = record["configuration"], {}
    for N in LENGTHS:
        if (tested := record["repetitions"].get(part(N))) is not None and is_learnt(tested, case):
            looks = [look for look in record["facts"]["validation"] if look["N"] == N]
            seen = [look["step"] for look in looks if look["correct_fraction"] >= case["success_fraction"]]
            found[N] = int(min(seen, default=looks[-1]["step"]))
    return found


def judged(records: Iterable[Record]) -> dict[tuple[str, str, int, int], tuple[float, bool]]:
    """For each of `PAIRS` and each of the arms `ONE`: the chance that, if the two arms do not differ, one goes at least
    as far beyond the other as this one does; and whether this shows that it goes further. Comparisons that were not
    measured count in the family with a chance of 1."""
    found, chances = climbs(records), {}
    for name, width, d in PAIRS:
        for ours, theirs in (ONE, ONE[::-1]):
            both = [found.get((name, arm, width, d)) for arm in (ours, theirs)]
            reached = [one.reached for one in both if one is not None]
            chances[name, ours, width, d] = better_by_chance(*reached) if len(reached) == 2 else 1.0
    shown = holm(list(chances.values()), level=LEVEL)
    return {key: (chance, held) for (key, chance), held in zip(chances.items(), shown, strict=True)}


def predicted_chance(name: str, N: int, d: int) -> float | None:
    """The chance that one untrained head finds the right token, by the law of its threshold; None for tasks in which
    more than one token has to be matched."""
    from ortho.theory.retrieval import found_chance  # needs SciPy

    others = SETTINGS[name].others
    return None if others is None else found_chance(others(N), d // H, d)


def predicted_boundary(name: str, d: int) -> int | None:
    """The longest length at which `predicted_chance` reaches the share of right answers that counts as learnt; 0 if it
    does so at none, and None if there is no such chance for the task."""
    if SETTINGS[name].others is None:
        return None
    return max((N for N in LENGTHS if (predicted_chance(name, N, d) or 0) >= SUCCESS), default=0)
