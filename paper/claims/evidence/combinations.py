"""Frozen orthogonal queries and keys with other attention (S2, section 5.3), and linear attention elsewhere (S4)."""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

import torch
from torch import nn

from ortho.cost import layer
from ortho.layers.multihead import MultiheadAttention
from ortho.models.language_model import LanguageModel
from paper import experiments
from paper.claims.figures import listing, span
from paper.claims.ledger import evidence
from paper.claims.outcomes import BITS_A_BYTE, Told, Unit, loses_nothing, outperforms
from paper.claims.rules import all_of, counted, holds, improves, untestable
from paper.claims.shared.common import IDLE, SHOWN, Arms, noting_each, seeded, without_records
from paper.claims.verdicts import Finding
from paper.experiments.learning import images, language, synthetic
from paper.experiments.learning.heads import window_heads
from paper.experiments.learning.synthetic import Learnt
from paper.experiments.statistics import LEVEL, Decision, Interval, success_interval

CHAPTER = "32-combinations"

D, H = 768, 12
LENGTHS = (512, 4096)
# The mechanism of each kind of heads. Its arm has the kind's name; with frozen queries and keys it is `frozen kind`.
KINDS = {"linear": "linear", "FAVOR+": "favor", "delta": "delta", "window": "window"}
ORA = "frozen"  # with softmax
ON_DIGITS = ("linear",)  # kinds for which `images` has both arms
DIGITS = Unit("% of the digits", 100, 1)


Comparison = tuple[Arms, str, str]  # the field, an arm that may lose something, and the arm it may lose to


def on_bytes() -> Arms:
    """The arms of `bytes`."""
    records = experiments.load("bytes")
    return Arms(language.by_arm(records, experiments.judged_device(records)), "bits", BITS_A_BYTE)


def on_digits() -> Arms:
    """The arms of `images` on digits."""
    records = experiments.load("images")
    return Arms(images.by_arm(records, experiments.judged_device(records)), "correct", DIGITS)


def nothing_lost(comparisons: Sequence[Comparison], statement: str = "nothing is lost") -> Finding:
    """Whether nothing is lost, wherever there is something to lose.

    There is something to lose if the other arm is shown to be better than heads that see no other token. If it is not,
    the absence of a difference says nothing, and the comparison is left out; a difference that shows ('better' or
    'worse') is kept. If nothing is left, or if runs are missing, the finding is untestable.
    """
    missing, idle, kept, have = [], [], [], {}
    for field, arm, other in comparisons:
        label = f"{arm} against {other}, {field.unit.name}"
        gain, found = field.reported(other, IDLE), field.reported(arm, other)
        if gain is None or found is None:
            missing.append(label)
        elif gain[1] != "better" and found[1] not in SHOWN:
            idle.append(label)
        else:
            have[label] = found
            kept += [label] * (gain[1] != "better")
    if missing:
        return untestable(statement, dict.fromkeys(missing), lack="there are not yet two runs of the arms of")
    if not have:
        needs = {"difference that shows, nor an arm shown to be better than heads that see no other token": None}
        return untestable(statement, needs, lack="there is no")
    why = "the other variant is not shown to be better than heads that see no other token"
    return noting_each(
        loses_nothing(statement, have),
        {
            f"Left out, as no difference shows and {why}": idle,
            f"Kept, as a difference shows, though {why}": kept,
        },
    )


def step(kind: str, N: int, projection: str) -> int:
    """FLOPs of the matrix products of a causal layer's training step."""
    return int(layer(1, N, D, H, projection=projection, attention=KINDS[kind], causal=True).step)


def beyond_linear(kind: str) -> int:
    """The second difference of a step's FLOPs over lengths that are whole numbers of chunks and windows."""
    once, twice, thrice = (step(kind, n * LENGTHS[0], "frozen") for n in (1, 2, 3))
    return thrice - 2 * twice + once


def saved(kind: str, N: int) -> float:
    """How many per cent of a step's FLOPs with learned queries and keys are saved by freezing them."""
    return round(100 - 100 * step(kind, N, "frozen") / step(kind, N, "learned"), 1)


def beside_what_is_combined() -> list[Comparison]:
    """Frozen queries and keys against learned ones in the same attention; and, with frozen ones, another attention
    against softmax on digits, where nothing else differs."""
    text, digits = on_bytes(), on_digits()
    own = [(text, f"frozen {kind}", kind) for kind in KINDS]
    return own + [(digits, f"frozen {kind}", other) for kind in ON_DIGITS for other in (kind, ORA)]


def beside_ora_on_bytes() -> Mapping[str, Told]:
    """The same against softmax on bytes, where positions differ too: kind -> more bits a byte, if there are runs."""
    text = on_bytes()
    return {kind: told for kind in KINDS if (told := text.reported(f"frozen {kind}", ORA)) is not None}


@evidence("S2.5.3b", chapter=CHAPTER)
def with_other_attention() -> Finding:
    finding = all_of(
        {
            "FLOPs of the step beyond linear in $N$": counted(
                dict.fromkeys(KINDS, 0), {kind: beyond_linear(kind) for kind in KINDS}
            ),
            "FLOPs of the layer's step that freezing spares": improves(
                "fewer", {kind: saved(kind, LENGTHS[-1]) for kind in KINDS}, unit=" %"
            ),
            "beside what is combined": nothing_lost(beside_what_is_combined()),
        }
    )
    if more := beside_ora_on_bytes():
        told = listing({kind: f"{span(interval)} ({outcome})" for kind, (interval, outcome) in more.items()})
        return finding.noting(
            f"More bits a byte than softmax with frozen queries and keys: {told}; there softmax heads turn queries and "
            "keys by their positions, which none of the others do"
        )
    return finding


# ---------------------------- linear attention in other fields, and whether it is fit for all tasks with long sequences

LINEAR, SOFTMAX = "linear", "learned"
KERNELS = (LINEAR, "FAVOR+")  # linear arms that see images
PLACED = "linear + embeddings", "learned + embeddings"  # the two that know positions in the same way
HALF = 0.5  # an arm learns a task if more than half of its runs learn it
Tasks = Mapping[str, Mapping[str, Learnt]]


def tasks() -> dict[str, dict[str, Learnt]]:
    """Synthetic task -> arm -> its runs."""
    records = experiments.load("synthetic")
    return synthetic.learnt(records, experiments.judged_device(records))


def rate(runs: Learnt, comparisons: int) -> Interval:
    """The exact interval of the success rate; with this many, all ends hold at once except with probability `LEVEL`."""
    rule = Decision(margin=0, level=LEVEL, higher_is_better=True)
    return success_interval(runs.successes, len(runs.seeds), confidence=rule.confidence(comparisons))


def softmax_learns(found: Tasks) -> list[str]:
    """The tasks that softmax heads learn in more than half of their runs, shown at the level of all together."""
    return [task for task, arms in found.items() if SOFTMAX in arms and rate(arms[SOFTMAX], len(found))[0] > HALF]


def learns(found: Tasks) -> dict[str, Interval]:
    """For each of those tasks, the per cent of runs, beyond half of them, in which linear attention learns it."""
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


def beside_softmax() -> Finding:
    """Whether linear heads lose nothing to softmax heads, on text and on images."""
    fields = [(on_bytes(), *PLACED), (on_digits(), LINEAR, SOFTMAX)]
    return nothing_lost(fields, "linear heads lose nothing to softmax heads")


@torch.no_grad()
def far_token(kind: Callable[..., nn.Module], **options: Any) -> float:
    """By how much the outputs at the last of 16 tokens change if the first one does, in two blocks of such layers."""
    N = 16
    model = LanguageModel(N, 8, 2, 2, max_length=N, layer=kind, generator=seeded(), **options).double()
    tokens = torch.arange(N)[None]
    changed = tokens.clone()
    changed[0, 0] = 1
    return float((model(changed) - model(tokens))[0, -1].abs().max())


@evidence("S4.3b", chapter=CHAPTER)
def not_for_all() -> Finding:
    text = on_bytes()
    linear = text.reported(PLACED[1], PLACED[0])
    statement = "a task at which softmax heads are better"
    if linear is None:
        return without_records(statement, "linear heads and softmax heads on text")
    window = far_token(window_heads, width=4)  # two blocks hand a token on by 2 (4 - 1) = 6 places, not by 15
    softmax = far_token(MultiheadAttention)
    far = holds(
        "a token farther back than windows reach changes the outputs of softmax heads, and not those of window heads",
        window / softmax if softmax else inf,
        torch.finfo(torch.float64).eps,
    )
    told = outperforms(statement, {f"text, {text.unit.name}": linear})
    return all_of({"sparse, a window": far, "linear": told}).noting(
        "Whatever windows learn, they are at chance in a task that asks for such a token. On text, linear heads and "
        "softmax heads have the same embeddings of positions"
    )


@evidence("S4.4b", chapter=CHAPTER)
def other_fields() -> Finding:
    finding = all_of({"fields": beside_softmax(), "synthetic tasks that softmax heads learn": fit_for_all()})
    runs = counts(tasks())
    learnt = f"Runs that learn a task, of softmax in brackets: {runs}. " if runs else ""
    return finding.noting(
        f"{learnt}An open question of the source's, answered here for small models and short "
        "sequences. No model here hears speech"
    )
