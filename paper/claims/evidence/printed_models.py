"""S0, sections 4.2 to 4.4 and 5.3: the memory of a training step, the cost of inference, and three models."""

from dataclasses import dataclass
from itertools import count
from math import inf
from typing import Any

import torch

from ortho.attention import FORMS
from ortho.cost import Cost, block, layer, of
from ortho.cost.big_o import H, N, d
from ortho.cost.configurations import CONFIGURATIONS
from ortho.cost.counting import flops_of
from ortho.layers.multihead import MultiheadAttention
from paper.claims.evidence.frozen_layer import linear_backward
from paper.claims.evidence.printed_speed_ups import CHAPTER, HEAD_WIDTH, against_limit, against_table, limit
from paper.claims.figures import show
from paper.claims.ledger import evidence, evidence_table
from paper.claims.rules import all_of, bound, contradiction, counted, growth, printed, region
from paper.claims.shared.common import SOME
from paper.claims.verdicts import Finding, Parts
from paper.elementwise import elementwise
from paper.memory import formula, step_memory

SIDES = {"standard": "learned", "ORA": "frozen"}

# ------------------------------------------------------------------------------------------------ memory, section 4.2


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
BY_WIDTH = {
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
    cells = {f"{name}, {side}": (name, i) for name in COMPONENTS for i, side in enumerate(SIDES)}
    ours = megabytes(768)
    in_block, mixed = saved_share(768, scope="block"), saved_share(768, precision="mixed")
    parts = {
        "bytes": printed(
            {label: COMPONENTS[name][i] for label, (name, i) in cells.items()},
            {label: ours[name][i] for label, (name, i) in cells.items()},
            unit=" MB",
        ),
        "saved": printed({"": SHARE}, {"": saved_share(768)}, unit=" %"),
    }
    return all_of(parts).noting(
        f"In mixed precision {mixed:.2f} % are saved; of a block with its feed-forward half, {in_block:.1f} %"
    )


@evidence("S0.4.2b", chapter=CHAPTER)
def configurations() -> Parts:
    columns = (*SIDES, "saved")
    said = {f"{width} {name}": row[i] for width, row in BY_WIDTH.items() for i, name in enumerate(columns)}
    ours: dict[str, float] = {}
    for width in BY_WIDTH:
        standard, frozen = megabytes(width)["total"]
        ours |= zip((f"{width} {name}" for name in columns), (standard, frozen, standard - frozen), strict=True)
    shares = {str(width): saved_share(width) for width in BY_WIDTH}
    return {
        "bytes, by $d$": printed(said, ours, unit=" MB"),
        "share saved, by $d$": printed(dict.fromkeys(shares, SHARE), shares, unit=" %"),
    }


@evidence("S0.4.2c", chapter=CHAPTER)
def activations() -> Finding | Parts:
    forms = {"materialised": "reference", "fused": "fast"}
    x = torch.zeros(1, 48, 64, requires_grad=True)

    def kept(side: str) -> dict[str, Any]:
        return {name: formula(projection=side, form=form) for name, form in forms.items()}

    def ran(side: str) -> dict[str, Any]:
        made = {name: MultiheadAttention(64, 4, projection=side, form=form) for name, form in forms.items()}
        return {name: of(module, x).saved_bytes for name, module in made.items()}

    return {
        "bytes, ORA as standard": counted(kept("learned"), kept("frozen")),
        "in a run with $N = 48$, $d = 64$": counted(ran("learned"), ran("frozen")),
        "order": growth("N^2 + N*d", kept("frozen")["materialised"]),
    }


@evidence("S0.4.2d", chapter=CHAPTER)
def models() -> Finding:
    labels = {layers: f"{layers} layers" if layers > 1 else "a layer" for layers in MODELS}
    saved = {label: layers * saved_bytes(768) for layers, label in labels.items()}
    return printed(
        {labels[layers]: text for layers, text in MODELS.items()},
        {label: size / 1e6 for label, size in saved.items()},
        unit=" MB",
    ).noting(f"In MiB, the unit of its tables: {', '.join(show(size / 2**20) for size in saved.values())}")


def inference(side: str) -> dict[str, Any]:
    """What a forward pass and a decoded token of a layer cost, declared and counted."""
    cost = layer(1, N, d, H, projection=side)
    module, x = MultiheadAttention(64, 4, projection=side), torch.zeros(1, 48, 64)
    return {
        "forward": cost.forward,
        "a decoded token": cost.decode,
        "state, in bytes": cost.state_bytes,
        "FLOPs run at $N = 48$, $d = 64$": flops_of(module, x),
        "element-wise run there": elementwise(module, x)[0].total(),
    }


# ------------------------------------------------------------------------------- three models, sections 4.3 to 5.3

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
    """10^6 bytes that freezing saves in a published model, with all numbers in FP16.

    What is kept for the backward pass is the same for both, and cancels.
    """
    at = CONFIGURATIONS[SCENARIOS[name].published]
    costs = (at.cost(1, projection=projection, itemsize=2) for projection in SIDES.values())
    standard, frozen = (sum(step_memory(cost, 0).values()) for cost in costs)
    return (standard - frozen) / 1e6


def whole_limit(name: str, projection: str = "frozen") -> float:
    """The gain, in per cent, that the products of a whole published model allow, by the form of attention allowing
    more.

    A causal model's fused form computes half of the scores, so that the frozen part is a larger share of it.
    """
    scenario, at = SCENARIOS[name], CONFIGURATIONS[SCENARIOS[name].published]

    def of(*_: Any, **settings: Any) -> Cost:  # its sizes are the model's own
        return at.cost(1, **settings)

    sizes = scenario.length, scenario.width
    return max(float(limit(*sizes, of=of, projection=projection, form=form)) for form in FORMS)


def fewer_weights(name: str) -> float:
    """What the optimiser of a whole published model gains by freezing, in per cent: it updates the trained weights."""
    return 100 * (millions(name, whole=True) / millions(name, "frozen", whole=True) - 1)


def _speed(name: str) -> Finding:
    """Whatever share of the step the optimiser takes, the whole gains no more than the part that gains most."""
    products, weights = whole_limit(name), fewer_weights(name)
    said = {"the whole model": SCENARIOS[name].speed_up}
    return bound(said, {"the whole model": max(products, weights)}, unit=" %").noting(
        f"Its products gain {products:.1f} %, its optimiser {weights:.1f} %, and a step of both no more than the larger"
    )


def _table(said: int, *at: tuple[int, int]) -> Finding:
    return against_table(f"~{said} %", (said - ABOUT, said + ABOUT), *at)


def _saved() -> Finding:
    """The three models' figures as one table, which has one unit."""
    ours = {name: saved_megabytes(name) for name in SCENARIOS}
    return printed({name: at.saved for name, at in SCENARIOS.items()}, ours, unit=" MB")


def _trained(name: str, *, whole: bool = False) -> Finding:
    said = SCENARIOS[name].trained
    assert said is not None
    ours = {side: millions(name, projection, whole=whole) for side, projection in SIDES.items()}
    return printed(dict(zip(SIDES, said, strict=True)), ours, unit=" million")


@evidence("S0.4.4a", chapter=CHAPTER)
def summary() -> Parts:
    (standard, kept), (frozen, less) = (
        (layer(1, N, d, H, projection=side), memory(768, side)) for side in SIDES.values()
    )
    changes = {
        "trained": ("-50", frozen.trained / standard.trained),
        "gradients": ("-50", less["gradients"] / kept["gradients"]),
        "optimiser": ("-50", less["optimiser"] / kept["optimiser"]),
        "memory": (f"-{SHARE}", sum(less.values()) / sum(kept.values())),
        "inference": ("~0", frozen.forward / standard.forward),
    }
    return {
        "shares": printed(
            {name: said for name, (said, _) in changes.items()},
            {name: float(100 * ratio - 100) for name, (_, ratio) in changes.items()},
            unit=" %",
        ),
        "speed-up in its own table": against_table("+20 % to +35 %", SUMMARY, (4096, 768)),
        # The two ends of the range where the source's own table has its largest and smallest figure.
        "speed-up by count": against_limit({(128, 768): SUMMARY[1], (4096, 768): SUMMARY[0]}),
    }


@evidence("S0.4.4c", chapter=CHAPTER)
def bert() -> Parts:
    whole = " and ".join(f"{millions('BERT-base', projection, whole=True):.1f}" for projection in SIDES.values())
    return {
        "trained weights of the blocks": _trained("BERT-base").noting(f"Of the whole model {whole} million"),
        "saved": _saved(),
        "speed-up in its own table": _table(35, (512, 768)),
        "speed-up by count": _speed("BERT-base"),
    }


@evidence("S0.4.4e", chapter=CHAPTER)
def vit() -> Parts:
    gains = {name: whole_limit(name) for name in SCENARIOS}
    return {
        "saved": _saved(),
        "the most of the three": region(
            (max(gains["BERT-base"], gains["GPT-2 medium"]), inf), {"its bound": gains["ViT"]}, unit=" %"
        ),
        "speed-up in its own table at the lengths around": _table(45, (128, 768), (256, 768)),
        "speed-up by count": _speed("ViT"),
    }


@evidence("S0.4.4f", chapter=CHAPTER)
def most_of_all() -> Parts:
    near, short = (1024, 768), (128, 768)
    said = {at: (gain - ABOUT, gain + ABOUT) for at, gain in CASES.items()}
    gains = {at: float(limit(*at)) for at in CASES}
    rest = [gain for at, gain in gains.items() if at != near]
    return {
        "beside its own figures": contradiction(
            ("$N = 1024$, ~30 %, gains most", (0, said[near][1])), ("$N = 128$, ~50 %", said[short]), unit=" %"
        ),
        "by count of products": region((max(rest), inf), {"$N = 1024$": gains[near]}, unit=" %"),
    }


@evidence("S0.5.1c", chapter=CHAPTER)
def short_sequences() -> Parts:
    short, long = 196, 8192  # the lengths of ViT and of the longest case
    saved = {
        length: 100 * (1 - layer(1, length, 768, 12, projection="frozen").trained / layer(1, length, 768, 12).trained)
        for length in (short, long)
    }
    difference = {f"at $N = {short}$ more than at $N = {long:,}$": float(saved[short] - saved[long])}
    return {
        "speed-up by count": against_limit({(short, 768): 50, (512, 768): 40}),
        "trained weights saved, of all": region(SOME, difference, unit=" %"),
    }


@evidence("S0.5.2e", chapter=CHAPTER)
def long_sequences() -> Parts:
    (short, width), (long, _) = (128, 768), (8192, 768)
    rise = 100 / (1 + width / long) - 100 / (1 + width / short)  # of the share saved, by section 2.3
    work = layer(1, N, d, H, projection="frozen", form="reference").step
    quadratic = work.coeff(N, 2) * N**2 / work
    return {
        f"change of the share saved from $N = {short}$ to ${long:,}$": contradiction(
            ("it diminishes", (-100, 0)), ("section 2.3: it is $1/(1 + d/N)$", (rise, rise)), unit=" points"
        ),
        "about 15 %": against_limit({(long, width): 15}),
        f"share of $N^2$ in a step's products at $N = {long:,}$": region(
            (50, 100), {"": float(100 * quadratic.subs({N: long, d: width}))}, unit=" %"
        ),
    }


@evidence("S0.5.3a", chapter=CHAPTER)
def final_orders() -> Parts:
    standard, frozen = (layer(1, N, d, H, projection=side, form="reference") for side in SIDES.values())
    ours = {
        "standard": ("4*d^2", standard.trained),
        "ORA": ("2*d^2", frozen.trained),
        "its state, standard": ("8*d^2", standard.optimiser_bytes / standard.itemsize),
        "its state, ORA": ("4*d^2", frozen.optimiser_bytes / frozen.itemsize),
    }
    return {
        "forward and space the same": counted(
            {"FLOPs": standard.forward, "bytes": formula(form="reference")},
            {"FLOPs": frozen.forward, "bytes": formula(projection="frozen", form="reference")},
        ),
        "forward": growth("N^2*d + N*d^2", frozen.forward),
        "space": growth("N^2 + N*d", formula(projection="frozen", form="reference")),
        "trained and optimiser": counted(
            {name: said for name, (said, _) in ours.items()}, {name: cost for name, (_, cost) in ours.items()}
        ),
        "standard backward": growth("N^2*d + N*d^2", standard.backward),
        "ORA backward": linear_backward(),
    }


evidence_table(
    CHAPTER,
    {
        "S0.4.3a": lambda: counted(inference("learned"), inference("frozen")),
        "S0.4.4b": lambda: {
            "in its own table, $N = 1024$": _table(30, (1024, 768)),
            "in its own table, $N = 128$": _table(50, (128, 768)),
            "by count": against_limit(CASES),
        },
        "S0.4.4d": lambda: {
            "trained weights with embeddings": _trained("GPT-2 medium", whole=True),
            "saved": _saved(),
            "speed-up in its own table at the same $N/d$": _table(30, (512, 512)),
            "speed-up by count": _speed("GPT-2 medium"),
        },
        "S0.5.3b": lambda: {
            "memory": printed({"": SHARE}, {"": saved_share(768)}, unit=" %"),
            "BERT in its own table": against_table("25-35 %", FINAL[512, 768], (512, 768)),
            "each range's lower end by count": against_limit({at: low for at, (low, _) in FINAL.items()}),
        },
    },
)
