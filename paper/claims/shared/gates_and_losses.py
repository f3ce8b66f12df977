"""S3, section 3, improvements 1, 2 and 5: gates, heads, updates of higher rank; and losses beyond least squares.

The source names Huber's loss and a contrastive one, but neither their constants nor a task. Here delta is about
three standard deviations of one number of the noise on the values. Steps and temperatures are those that do best on
other draws, without outliers.
"""

from collections.abc import Collection

from paper import experiments
from paper.claims.figures import Interval, outward
from paper.claims.rules import improves, untestable
from paper.claims.verdicts import Finding
from paper.experiments.learning import analysis
from paper.experiments.learning import study as learning
from paper.experiments.learning.analysis import Row
from paper.experiments.statistics import gain
from paper.tasks.flip_flop import IGNORED, RANGES, TRAINED

OVERWRITTEN = tuple(
    f"{word}, tokens {first} to {last}" for word in IGNORED for first, last in RANGES if first > TRAINED
)
LEVEL = 0.05  # the probability that chance shows a gain in any of the settings of an experiment


def gained(experiment: str, better: str, worse: str, tests: Collection[str], *, of: int = 0) -> dict[str, Interval]:
    """By test and device: how many more answers in a hundred are right in an arm's runs than in the other's.

    The intervals are those of the exact rank test. For all `of` settings (by default, those that are found) they hold
    at once, except with probability `LEVEL` at either end, which five seeds can reach in up to 12 settings. Arms with
    fewer runs than `learning.SEEDS` are left out.
    """
    records = experiments.load(experiment)
    pairs: dict[str, tuple[Row, Row]] = {}
    for device in experiments.by_device(records):
        found = analysis.results(records, device)
        for test in tests:
            rows = [found[arm][test] for arm in (better, worse) if test in found.get(arm, {})]
            if len(rows) == 2 and all(len(row["seeds"]) >= len(learning.SEEDS) for row in rows):
                pairs[f"{test} on {experiments.shown_name(device)}"] = rows[0], rows[1]
    gains = {}
    for label, (one, other) in pairs.items():
        low, high = gain(one["correct"], other["correct"], LEVEL / max(of, len(pairs)))
        gains[label] = outward((100 * low, 100 * high))
    return gains


def more_right(statement: str, experiment: str, better: str, worse: str, tests: Collection[str]) -> Finding:
    """What the records of an experiment say of an arm's gain over another."""
    gains = gained(experiment, better, worse, tests)
    if not gains:
        lack = f"the experiment {experiment!r} has no records of {len(learning.SEEDS)} runs each of"
        return untestable(statement, {f"{better!r} and {worse!r}": None}, lack=lack)
    return improves(statement, gains, unit=" %")
