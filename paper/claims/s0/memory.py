"""S0, sections 4.2 and 4.3: the memory of a training step, and the cost of inference."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from ortho.cost import Cost, block, layer
from ortho.cost.big_o import H, N, d
from ortho.cost.counting import count_forward, count_step
from ortho.layers.multihead import MultiheadAttention
from paper.claims.ledger import evidence
from paper.claims.rules import all_of, counted, growth, printed
from paper.claims.s0.printed import CHAPTER, HEAD_WIDTH
from paper.claims.verdicts import Finding


@dataclass(frozen=True)
class Precision:
    """Bytes for each parameter: its weight and activations; its gradient; what the optimiser keeps of it."""

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
    of: Callable[..., Cost] = layer,
    form: str = "fast",
) -> dict[str, int]:
    """Bytes of a layer's (or block's) parameters, gradients, optimiser state, and activations of one sequence.

    Frozen parameters have the precision of the activations; they have no gradient and no optimiser state. Length 0
    leaves the activations out.
    """
    size = PRECISIONS[precision]
    # The sources materialise weights in the precision of the rest; the definition keeps float32, 4 bytes a number.
    itemsize = 4 if form == "reference" else size.weight
    cost = of(1, max(length, 1), width, width // HEAD_WIDTH, projection=projection, form=form, itemsize=itemsize)
    return {
        "parameters": size.weight * (cost.trained + cost.frozen),
        "gradients": size.gradient * cost.trained,
        "optimiser": size.optimiser * cost.trained,
        "activations": cost.saved_bytes * size.weight // itemsize if length else 0,
    }


def saved_bytes(width: int, **settings: Any) -> int:
    """Bytes that freezing saves; `settings` are those of `memory`."""
    return sum(memory(width, **settings).values()) - sum(memory(width, "frozen", **settings).values())


def saved_share(width: int, **settings: Any) -> float:
    """The same, in per cent of the standard layer's bytes."""
    return 100 * saved_bytes(width, **settings) / sum(memory(width, **settings).values())


def even_length(width: int, **settings: Any) -> int:
    """The shortest sequence whose activations take as much as all the rest of the standard layer."""
    rest = sum(memory(width, **settings).values())
    return next(n for n in count(1) if memory(width, length=n, **settings)["activations"] >= rest)


COMPONENTS = {
    "parameters": ("4.50", "4.50"),
    "gradients": ("4.50", "2.25"),
    "optimiser": ("9.00", "4.50"),
    "total": ("18.00", "11.25"),
}  # MB a layer: standard, ORA; FP16, d = 768
CONFIGURATIONS = {
    512: ("8.00", "5.00", "3.00"),
    768: ("18.00", "11.25", "6.75"),
    1024: ("32.00", "20.00", "12.00"),
    1536: ("72.00", "45.00", "27.00"),
    2048: ("128.00", "80.00", "48.00"),
}  # MB a layer, by d: standard, ORA, saved
SHARE = "37.5"  # per cent saved, throughout
MODELS = {1: "~7", 12: "~84", 24: "~168"}  # MB saved at d = 768, by layers


def megabytes(width: int) -> dict[str, tuple[float, float]]:
    """`COMPONENTS` recomputed: 10^6 bytes in FP16, standard and ORA."""
    sides = [{name: size / 1e6 for name, size in memory(width, side).items()} for side in ("learned", "frozen")]
    for side in sides:
        side["total"] = sum(side.values())
    return {name: (sides[0][name], sides[1][name]) for name in COMPONENTS}


@evidence("S0.4.2a", chapter=CHAPTER)
def components() -> Finding:
    ours = megabytes(768)
    sides = [(name, i) for name in COMPONENTS for i in (0, 1)]
    in_block, mixed = saved_share(768, of=block), saved_share(768, precision="mixed")
    return all_of(
        {
            "bytes": printed(
                {f"{name}, {'ORA' if i else 'standard'}": COMPONENTS[name][i] for name, i in sides},
                {f"{name}, {'ORA' if i else 'standard'}": ours[name][i] for name, i in sides},
                unit=" MB",
            ),
            "saved": printed({"": SHARE}, {"": saved_share(768)}, unit=" %"),
        }
    ).noting(f"In mixed precision {mixed:.2f} % are saved; of a block with its feed-forward half, {in_block:.1f} %")


@evidence("S0.4.2b", chapter=CHAPTER)
def configurations() -> Finding:
    columns = ("standard", "ORA", "saved")
    said = {f"{width} {name}": row[i] for width, row in CONFIGURATIONS.items() for i, name in enumerate(columns)}
    ours: dict[str, float] = {}
    for width in CONFIGURATIONS:
        standard, frozen = megabytes(width)["total"]
        ours |= zip((f"{width} {name}" for name in columns), (standard, frozen, standard - frozen), strict=True)
    shares = {str(width): saved_share(width) for width in CONFIGURATIONS}
    return all_of(
        {
            "bytes, by $d$": printed(said, ours, unit=" MB"),
            "share saved, by $d$": printed(dict.fromkeys(shares, SHARE), shares, unit=" %"),
        }
    )


@evidence("S0.4.2c", chapter=CHAPTER)
def activations() -> Finding:
    forms = {"materialised": "reference", "fused": "fast"}
    kept = {
        (name, side): layer(1, N, d, H, projection=side, form=form).saved_bytes
        for name, form in forms.items()
        for side in ("learned", "frozen")
    }
    x = torch.zeros(1, 48, 64, requires_grad=True)
    ran = {
        (name, side): count_step(MultiheadAttention(64, 4, projection=side, form=form), x).saved_bytes
        for name, form in forms.items()
        for side in ("learned", "frozen")
    }
    return all_of(
        {
            "bytes, ORA as standard": counted(
                {name: kept[name, "learned"] for name in forms}, {name: kept[name, "frozen"] for name in forms}
            ),
            "in a run with $N = 48$, $d = 64$": counted(
                {name: ran[name, "learned"] for name in forms}, {name: ran[name, "frozen"] for name in forms}
            ),
            "order": growth("N^2 + N*d", kept["materialised", "frozen"]),
        }
    )


@evidence("S0.4.2d", chapter=CHAPTER)
def models() -> Finding:
    said = {f"{layers} layers" if layers > 1 else "a layer": text for layers, text in MODELS.items()}
    ours = [layers * saved_bytes(768) / 1e6 for layers in MODELS]
    return printed(said, dict(zip(said, ours, strict=True)), unit=" MB")


@evidence("S0.4.3a", chapter=CHAPTER)
def inference() -> Finding:
    x = torch.zeros(1, 48, 64)
    sides: dict[str, dict[str, Any]] = {}
    for side in ("learned", "frozen"):
        cost = layer(1, N, d, H, projection=side)
        flops, elementwise = count_forward(MultiheadAttention(64, 4, projection=side), x)
        sides[side] = {
            "forward": cost.forward,
            "element-wise": cost.elementwise_forward,
            "a decoded token": cost.decode,
            "state, in bytes": cost.state_bytes,
            "FLOPs run at $N = 48$, $d = 64$": flops,
            "element-wise run there": elementwise,
        }
    return counted(sides["learned"], sides["frozen"])
