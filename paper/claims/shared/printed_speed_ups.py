"""S0, sections 3.3 and 4.1: the printed operations and speed-ups, the rules that give them, and what counts allow."""

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from ortho._typing import Size
from ortho.cost import Cost, layer
from paper.claims import figures
from paper.claims.rules import bound, contradiction
from paper.claims.verdicts import Finding

HEAD_WIDTH = 64  # the source's: d = 768, h = 12


def sides(of: Callable[..., Cost], length: Size, width: Size, projection: str, form: str) -> tuple[Cost, Cost]:
    """The costs of a standard layer, or of whatever `of` makes, and of the same with another projection."""
    heads = width // HEAD_WIDTH if isinstance(width, int) else 1
    standard, other = (of(1, length, width, heads, projection=name, form=form) for name in ("learned", projection))
    return standard, other


SPEED_UPS = {
    (128, 768): "56.1",
    (256, 768): "50.0",
    (512, 768): "41.4",
    (1024, 768): "31.6",
    (2048, 768): "22.7",
    (4096, 768): "16.2",
    (512, 512): "35.7",
    (1024, 512): "26.2",
    (2048, 1024): "26.2",
}  # per cent, by (N, d)
RANGES = {"N << d": (40, 50), "N ~ d": (25, 30), "N >> d": (15, 20)}  # per cent
DONG_SAVED = 23.9  # per cent of the training time a sample, of whole models (Dong et al. 2025)


def table_rule(length: Size, width: Size) -> Any:
    """The formula that gives all of `SPEED_UPS`, in per cent: (9 + r)/(14 (1 + r)), r = N/d."""
    return 100 * (9 * width + length) / (14 * (width + length))


def limit(
    length: Size,
    width: Size,
    *,
    optimiser: Fraction | float = 0,
    of: Callable[..., Cost] = layer,
    projection: str = "frozen",
    form: str = "reference",
) -> Any:
    """The speed-up, in per cent, that the count of a step's matrix products allows; `of` is `layer` or `block`.

    `optimiser` is the share of the standard step that its update takes, beside the products; the update's time is in
    proportion to the trained weights. The input needs a gradient, as everywhere but at the bottom of a network.
    """
    standard, other = sides(of, length, width, projection, form)
    update = standard.step * optimiser / (1 - optimiser)
    return 100 * (standard.step + update) / (other.step + update * other.trained / standard.trained) - 100


# Where the optimiser weighs most: AdamW in FP32 reads a weight, its gradient and two moments and writes all but the
# gradient; products and memory at the peaks of NVIDIA's data sheet, H100 SXM.
UPDATE_BYTES = 28  # a trained weight
PRODUCTS_A_SECOND, BYTES_A_SECOND = 989e12, 3.35e12  # dense, BF16; HBM3
MANY = 64  # sequences an update


def update_share(length: int, width: int, *, sequences: int = 1) -> float:
    """The share of the standard layer's step that its update then takes, with one update for this many sequences."""
    cost = layer(sequences, length, width, width // HEAD_WIDTH, form="reference")
    update, products = UPDATE_BYTES * cost.trained / BYTES_A_SECOND, cost.step / PRODUCTS_A_SECOND
    return update / (update + products)


def needed_share(speed_up: float, length: int, width: int) -> float:
    """The share of the standard step that its update would have to take for the layer to gain `speed_up` per cent."""
    standard, frozen = (cost.step for cost in sides(layer, length, width, "frozen", "reference"))
    gain = 1 + speed_up / 100
    update = (gain * frozen - standard) / (1 - gain / 2)
    return update / (standard + update)


def against_limit(claimed: Mapping[tuple[int, int], float]) -> Finding:
    """Claimed speed-ups, in per cent by (N, d), against `limit` where the optimiser weighs most."""

    def limits(sequences: int) -> dict[str, float]:
        return {at_sizes(*at): float(limit(*at, optimiser=update_share(*at, sequences=sequences))) for at in claimed}

    said = {at_sizes(*at): gain for at, gain in claimed.items()}
    few = sum(said[label] <= most for label, most in limits(MANY).items())
    shares = [100 * needed_share(gain, *at) for at, gain in claimed.items()]
    needed = figures.span(figures.outward((min(shares), max(shares))), " %")
    return bound(said, limits(1), unit=" %").noting(
        "The bound counts the layer's products and its optimiser, both at the peaks of an H100, with an update after "
        f"each sequence; after {MANY} it allows {few} of {len(said)}. The optimiser would have to take {needed} of the "
        "step"
    )


def against_table(quote: str, said: tuple[float, float], *at: tuple[int, int]) -> Finding:
    """A speed-up stated elsewhere in the source, in per cent from low to high, against the figures of its own table."""
    rows = [float(SPEED_UPS[row]) for row in at]
    table = ", ".join(f"$N = {n}$, $d = {d}$: {SPEED_UPS[n, d]} %" for n, d in at)
    return contradiction((quote, said), (table, (min(rows), max(rows))), unit=" %")


def at_sizes(length: int, width: int) -> str:
    """The label of a figure's sizes."""
    return f"$N = {length:,}$, $d = {width}$"
