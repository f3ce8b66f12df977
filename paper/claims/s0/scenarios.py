"""S0, sections 4.4 and 5.3: the summary, three models, and the final tables."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

from ortho.attention import FORMS
from ortho.cost import Cost, block, layer
from ortho.cost.big_o import H, N, d
from ortho.cost.configurations import CONFIGURATIONS
from ortho.cost.models import step_memory
from paper.claims.ledger import evidence
from paper.claims.rules import all_of, bound, counted, growth, printed, region
from paper.claims.s0.memory import SHARE, memory, saved_share
from paper.claims.s0.printed import CHAPTER, against_limit, against_table, limit
from paper.claims.verdicts import Finding

SUMMARY = (20, 35)  # per cent of speed-up, "depending on N/d"
CASES = {(1024, 768): 30, (128, 768): 50, (8192, 768): 15}  # per cent, by (N, d)
FINAL = {(196, 768): (40, 50), (512, 768): (25, 35), (8192, 768): (15, 20)}  # per cent: ViT, BERT, long documents
ABOUT = 2.5  # per cent: "~35 %" and "~45 %" stand for the nearest five


@dataclass(frozen=True)
class Scenario:
    """A model as the source describes it, with its figures as they are printed, and its name in `CONFIGURATIONS`."""

    length: int
    width: int
    layers: int
    speed_up: int  # per cent
    saved: str  # MB
    published: str
    trained: tuple[str, str] | None = None  # millions, standard and ORA


SCENARIOS = {
    "BERT-base": Scenario(512, 768, 12, 35, "~80", "BERT-base", ("~85", "~70")),
    "GPT-2 medium": Scenario(1024, 1024, 24, 30, "~280", "GPT-2 medium", ("~345", "~290")),
    "ViT": Scenario(196, 768, 12, 45, "~80", "ViT-Base"),
}


def millions(name: str, projection: str = "learned", *, whole: bool = False) -> float:
    """Trained weights and biases of a scenario's blocks, in millions; with `whole`, of the published model."""
    at = CONFIGURATIONS[SCENARIOS[name].published]
    if whole:
        return at.cost(1, projection=projection).trained / 1e6
    return at.L * block(1, at.N, at.d, at.H, bias=True, projection=projection).trained / 1e6


def saved_megabytes(name: str) -> float:
    """10^6 bytes that freezing saves in a published model, all of them numbers of FP16.

    What is kept for the backward pass is the same for both, and falls out.
    """
    at = CONFIGURATIONS[SCENARIOS[name].published]
    standard, frozen = (
        sum(step_memory(at.cost(1, projection=projection, itemsize=2)).values()) for projection in ("learned", "frozen")
    )
    return (standard - frozen) / 1e6


def published(name: str) -> Callable[..., Cost]:
    """A scenario's published model as `limit` wants it: sizes are the model's own, whatever is given."""
    at = CONFIGURATIONS[SCENARIOS[name].published]
    return lambda *_, **options: at.cost(1, **options)


def whole_limit(name: str, projection: str = "frozen", **options: Any) -> float:
    """`limit` for a whole published model, in per cent, by the form of attention that allows more.

    A causal model's fused form computes half of the scores, so that what is frozen is a larger share of it.
    """
    at, of = SCENARIOS[name], published(name)
    return max(float(limit(at.length, at.width, of=of, projection=projection, form=form, **options)) for form in FORMS)


def _speed(name: str) -> Finding:
    at = SCENARIOS[name]
    bare, alone = whole_limit(name, optimiser=0), float(limit(at.length, at.width))
    return bound({"the whole model": at.speed_up}, {"the whole model": whole_limit(name)}, unit=" %").noting(
        "The bound counts the model's matrix products and grants the optimiser a seventh of the step, of which ORA "
        f"takes half. Without the optimiser it is {bare:.1f} %; with it, for an attention layer alone, {alone:.1f} %"
    )


def _table(said: int, *at: tuple[int, int]) -> Finding:
    return against_table(f"~{said} %", (said - ABOUT, said + ABOUT), *at)


def _saved(name: str) -> Finding:
    return printed({"": SCENARIOS[name].saved}, {"": saved_megabytes(name)}, unit=" MB")


def _trained(name: str, *, whole: bool = False) -> Finding:
    said = SCENARIOS[name].trained
    assert said is not None
    sides = {"standard": "learned", "ORA": "frozen"}
    ours = {side: millions(name, projection, whole=whole) for side, projection in sides.items()}
    return printed(dict(zip(sides, said, strict=True)), ours, unit=" million")


def _all_trained(name: str) -> str:
    ours = [f"{millions(name, projection, whole=True):.1f}" for projection in ("learned", "frozen")]
    return f"Of the whole model {ours[0]} and {ours[1]} million"


@evidence("S0.4.4a", chapter=CHAPTER)
def summary() -> Finding:
    standard, frozen = (memory(768, projection) for projection in ("learned", "frozen"))
    costs = [layer(1, N, d, H, projection=projection) for projection in ("learned", "frozen")]
    changes = {
        "trained": costs[1].trained / costs[0].trained,
        "gradients": frozen["gradients"] / standard["gradients"],
        "optimiser": frozen["optimiser"] / standard["optimiser"],
        "memory": sum(frozen.values()) / sum(standard.values()),
        "inference": costs[1].forward / costs[0].forward,
    }
    said = {"trained": "-50", "gradients": "-50", "optimiser": "-50", "memory": f"-{SHARE}", "inference": "~0"}
    return all_of(
        {
            "shares": printed(said, {name: float(100 * ratio - 100) for name, ratio in changes.items()}, unit=" %"),
            # The two ends of the range where the source's own table has its largest and smallest figure.
            "speed-up": against_limit({(128, 768): SUMMARY[1], (4096, 768): SUMMARY[0]}),
        }
    )


@evidence("S0.4.4b", chapter=CHAPTER)
def cases() -> Finding:
    return all_of(
        {
            "in its own table, $N = 1024$": _table(30, (1024, 768)),
            "in its own table, $N = 128$": _table(50, (128, 768)),
            "by count": against_limit(CASES),
        }
    )


@evidence("S0.4.4c", chapter=CHAPTER)
def bert() -> Finding:
    return all_of(
        {
            "trained weights of the blocks": _trained("BERT-base").noting(_all_trained("BERT-base")),
            "saved": _saved("BERT-base"),
            "speed-up in its own table": _table(35, (512, 768)),
            "speed-up by count": _speed("BERT-base"),
        }
    )


@evidence("S0.4.4d", chapter=CHAPTER)
def gpt2() -> Finding:
    return all_of(
        {
            "trained weights with embeddings": _trained("GPT-2 medium", whole=True),
            "saved": _saved("GPT-2 medium"),
            "speed-up in its own table at the same $N/d$": _table(30, (512, 512)),
            "speed-up by count": _speed("GPT-2 medium"),
        }
    )


@evidence("S0.4.4e", chapter=CHAPTER)
def vit() -> Finding:
    gains = {name: whole_limit(name) for name in SCENARIOS}
    return all_of(
        {
            "saved": _saved("ViT"),
            "the most of the three": region(
                (max(gains["BERT-base"], gains["GPT-2 medium"]), inf), {"its bound": gains["ViT"]}, unit=" %"
            ),
            "speed-up in its own table at the lengths around": _table(45, (128, 768), (256, 768)),
            "speed-up by count": _speed("ViT"),
        }
    )


@evidence("S0.5.3a", chapter=CHAPTER)
def final_orders() -> Finding:
    standard, frozen = (layer(1, N, d, H, projection=side, form="reference") for side in ("learned", "frozen"))
    return all_of(
        {
            "forward and space the same": counted(
                {"FLOPs": standard.forward, "bytes": standard.saved_bytes},
                {"FLOPs": frozen.forward, "bytes": frozen.saved_bytes},
            ),
            "trained and optimiser": counted(
                {"standard": "4*d^2", "ORA": "2*d^2", "its state, standard": "8*d^2", "its state, ORA": "4*d^2"},
                {
                    "standard": standard.trained,
                    "ORA": frozen.trained,
                    "its state, standard": standard.optimiser_bytes / standard.itemsize,
                    "its state, ORA": frozen.optimiser_bytes / frozen.itemsize,
                },
            ),
            "standard backward": growth("N^2*d + N*d^2", standard.backward),
            "ORA backward": growth("N*d^2", frozen.backward),
        }
    )


@evidence("S0.5.3b", chapter=CHAPTER)
def final_speed_ups() -> Finding:
    return all_of(
        {
            "memory": printed({"": SHARE}, {"": saved_share(768)}, unit=" %"),
            "BERT in its own table": against_table("25-35 %", FINAL[512, 768], (512, 768)),
            "each range's lower end by count": against_limit({at: low for at, (low, _) in FINAL.items()}),
        }
    )
