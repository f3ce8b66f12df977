"""S2, section 4.1: whether projections need to be trained, what one learned head brings, and whether orthogonal
matrices are better than Gaussian ones; by the records of language models of bytes."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from paper import experiments
from paper.claims import figures
from paper.claims.ledger import evidence
from paper.claims.outcomes import BITS_A_BYTE, loses_nothing, outperforms
from paper.claims.rules import all_of, untestable
from paper.claims.shared.common import Arms
from paper.claims.verdicts import Finding
from paper.experiments.engine.records import Record
from paper.experiments.learning import ladder, ladder_analysis, language
from paper.experiments.learning.analysis import Runs

CHAPTER = "29-one-learned-head"

# Kinds of heads whose queries and keys are not trained, or that have none.
FIXED = ("frozen", "stopped", "positional", "static random", "identity")
ORTHOGONAL = ("frozen", "stopped")  # kinds that also exist as Gaussian ones
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


@evidence("S2.4.1a", chapter=CHAPTER)
def learned_heads() -> Finding:
    records = experiments.load("bytes")
    device = experiments.judged_device(records)
    if not device:
        return untestable("projections need not all be trained", {"record of the experiment bytes": None}, lack=LACK)
    found = whole(language.by_arm(records, device))
    H = experiments.by_device(records)[device][0]["configuration"]["H"]
    parts = {
        "no head learned": part(
            loses_nothing,
            "fixed heads suffice: as good as learned ones",
            found,
            {kind: (kind, BASELINE) for kind in FIXED},
        ),
        f"one of {H} learned": part(
            loses_nothing,
            "they suffice beside one learned head",
            found,
            {f"others {kind}": (name(1, kind, H), BASELINE) for kind in FIXED},
        ),
        "one learned against none": part(
            outperforms,
            "keeping one learned head helps",
            found,
            {f"others {kind}": (name(1, kind, H), kind) for kind in FIXED},
        ),
        "orthogonal against Gaussian": part(
            outperforms,
            "orthogonality is a good inductive bias",
            found,
            {kind: (kind, f"{kind} Gaussian") for kind in ORTHOGONAL},
        ),
    }
    return all_of(parts).noting(remarks(records, device, H))


def part(rule: Callable[..., Finding], statement: str, found: Found, pairs: Mapping[str, tuple[str, str]]) -> Finding:
    """A rule's finding on pairs of arms, the first against the second; untestable until all seeds of all have run."""
    missing = dict.fromkeys(arm for pair in pairs.values() for arm in pair if arm not in found)
    if missing:
        return untestable(statement, missing, lack=f"{LACK} run of every seed of")
    arms = Arms(found, "bits", BITS_A_BYTE)
    told = {label: arms.reported(*pair) for label, pair in pairs.items()}
    return rule(statement, told, unit=f" {BITS_A_BYTE.name}")


def remarks(records: Sequence[Record], device: str, H: int) -> str:
    """What else the records say of the arms that are followed, against learned heads: at equal parameters, along
    budgets, on other devices."""
    middle = whole(language.by_arm(records, device))
    equal = whole(language.by_arm(experiments.load("bytes-parameters"), device))
    stages = along_budgets(experiments.load("bytes-budgets"), device, middle)
    settings: dict[str, Found] = {"at equal parameters and steps": equal}
    for (d, multiple), stage in stages.items():
        if stage and any(one is not middle.get(arm) for arm, one in stage.items()):
            settings[f"at {multiple:g} times the steps, $d = {d}$"] = whole(stage)
    for other in experiments.by_device(records):
        if other != device:
            settings[f"on {other}"] = whole(language.by_arm(records, other))
    texts = [f"{setting}: {text}" for setting, found in settings.items() if (text := beside(found, H))]
    least = "Bits a byte at equal training FLOPs, in what the first has more"
    texts = texts or ["no record yet at equal parameters or other budgets"]
    return "; ".join([least, *texts, *convolved(H)])


def convolved(H: int) -> Iterator[str]:
    """One learned head against all along longer budgets, where all layers have a short convolution."""
    arm, runs = name(1, "positional", H), ladder_analysis.standing(experiments.load("ladder"))
    for text in ladder.TEXTS:
        for budget in (ladder.LONG, ladder.LONGEST):
            found = ladder_analysis.compared(runs, text, arm, budget)
            if found is not None:
                low, high = found.interval
                where = f"with a short convolution, {text}, {budget} times the least budget, equal steps"
                yield f"{where}: {arm} {figures.span((round(low, 3), round(high, 3)))}"


def beside(found: Found, H: int) -> str:
    """The followed arms compared with learned heads, in words."""
    arms = Arms(found, "bits", BITS_A_BYTE)
    told = {arm: arms.reported(arm, BASELINE) for arm in language.few(H)[1:]}
    return ", ".join(f"{arm} {figures.span(one[0])} ({one[1]})" for arm, one in told.items() if one is not None)
