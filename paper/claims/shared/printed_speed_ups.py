"""S0, sections 3.3 and 4.1: the printed operations and speed-ups, the rules that give them, and what counts allow."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from ortho._typing import Size
from ortho.cost import Cost, layer

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
