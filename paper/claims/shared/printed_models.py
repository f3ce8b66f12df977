"""S0, sections 4.2 to 4.4 and 5.3: the memory of a training step, the cost of inference, and three models."""

from dataclasses import dataclass
from typing import Any

import torch

from ortho.attention import FORMS
from ortho.cost import Cost, block, layer
from ortho.cost.big_o import H, N, d
from ortho.cost.configurations import CONFIGURATIONS
from paper.claims.shared.printed_speed_ups import HEAD_WIDTH, limit
from paper.memory import formula


@dataclass(frozen=True)
class Precision:
    """Bytes for each weight or activation, for each gradient, and for what the optimiser keeps of each parameter."""

    weight: int
    gradient: int
    optimiser: int


PRECISIONS = {
    "FP16": Precision(2, 2, 4),  # the source's: Adam's two moments in FP16 too
    "mixed": Precision(2, 2, 12),  # moments and a master copy in FP32 (Rajbhandari et al. 2020, section 3.1)
    "FP32": Precision(4, 4, 8),
}


def memory(
    width: int,
    projection: str = "learned",
    *,
    length: int = 0,
    precision: str = "FP16",
    scope: str = "layer",
    form: str = "fast",
) -> dict[str, int]:
    """Bytes of a layer's (or block's) parameters, gradients, optimiser state, and activations of one sequence.

    Frozen parameters have the precision of the activations; they have no gradient and no optimiser state. Length 0
    leaves the activations out.
    """
    size = PRECISIONS[precision]
    # The sources materialise weights in the precision of the rest; the definition keeps float32, 4 bytes a number.
    itemsize = 4 if form == "reference" else size.weight
    dtype = torch.float32 if itemsize == 4 else torch.float16
    cost = {"layer": layer, "block": block}[scope](1, 1, width, width // HEAD_WIDTH, projection=projection)
    kept = formula(scope=scope, projection=projection, form=form, dtype=dtype)
    saved = kept.subs({N: length, d: width, H: width // HEAD_WIDTH}) * size.weight // itemsize
    return {
        "parameters": size.weight * (cost.trained + cost.frozen),
        "gradients": size.gradient * cost.trained,
        "optimiser": size.optimiser * cost.trained,
        "activations": int(saved),
    }


def saved_bytes(width: int, **settings: Any) -> int:
    """Bytes that freezing saves; `settings` are those of `memory`."""
    return sum(memory(width, **settings).values()) - sum(memory(width, "frozen", **settings).values())


def saved_share(width: int, **settings: Any) -> float:
    """The same, in per cent of the standard layer's bytes."""
    return 100 * saved_bytes(width, **settings) / sum(memory(width, **settings).values())


SHARE = "37.5"  # per cent saved, throughout


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


def whole_limit(name: str) -> float:
    """The gain, in per cent, that the products of a whole published model allow, by the form of attention allowing
    more.

    A causal model's fused form computes half of the scores, so that the frozen part is a larger share of it.
    """
    scenario, at = SCENARIOS[name], CONFIGURATIONS[SCENARIOS[name].published]

    def of(*_: Any, **settings: Any) -> Cost:  # its sizes are the model's own
        return at.cost(1, **settings)

    sizes = scenario.length, scenario.width
    return max(float(limit(*sizes, of=of, form=form)) for form in FORMS)
