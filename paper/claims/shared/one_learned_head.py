"""S2, section 4.1: whether projections need to be trained, what one learned head brings, and whether orthogonal
matrices are better than Gaussian ones; by the records of language models of bytes."""

from collections.abc import Callable, Iterable, Mapping

from paper.claims.outcomes import BITS_A_BYTE
from paper.claims.rules import untestable
from paper.claims.shared.common import Arms
from paper.claims.verdicts import Finding
from paper.experiments.engine.records import Record
from paper.experiments.learning import language
from paper.experiments.learning.analysis import Runs

BASELINE = "learned"
LACK = "there is no"
Found = Mapping[str, Runs]


def name(learned: int, kind: str, H: int) -> str:
    """The name of the arm with this many learned heads, whose other heads are of one kind."""
    return f"{learned} learned + {H - learned} {kind}" if learned else kind


def whole(found: Found) -> dict[str, Runs]:
    """The arms for which all seeds have run."""
    return {arm: one for arm, one in found.items() if one.seeds == language.SEEDS}


def along_budgets(records: Iterable[Record], device: str, middle: Found) -> dict[tuple[int, float], dict[str, Runs]]:
    """(width, budget) -> the arms there, in rising order; `middle` are arms of the experiment `bytes`; those that are
    followed here join at their own width."""
    found: dict[tuple[int, float], dict[str, Runs]] = {}
    for one in language.runs(records, device):
        c = one.configuration
        found.setdefault((c["d"], language.budget(c)), {})[one.arm] = one
    followed = {arm for stage in found.values() for arm in stage}
    for arm in followed & middle.keys():
        found.setdefault((middle[arm].configuration["d"], 1.0), {})[arm] = middle[arm]
    return dict(sorted(found.items()))


def part(rule: Callable[..., Finding], statement: str, found: Found, pairs: Mapping[str, tuple[str, str]]) -> Finding:
    """A rule's finding on pairs of arms, the first against the second; untestable until all seeds of all have run."""
    missing = dict.fromkeys(arm for pair in pairs.values() for arm in pair if arm not in found)
    if missing:
        return untestable(statement, missing, lack=f"{LACK} run of every seed of")
    arms = Arms(found, "bits", BITS_A_BYTE)
    told = {label: arms.reported(*pair) for label, pair in pairs.items()}
    return rule(statement, told, unit=f" {BITS_A_BYTE.name}")
