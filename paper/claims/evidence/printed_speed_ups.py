"""S0, sections 3.3 and 4.1: the printed operations and speed-ups, the rules that give them, and what counts allow."""

from collections.abc import Callable, Mapping
from fractions import Fraction
from itertools import product
from math import gcd, inf, log2
from typing import Any

from ortho._typing import Size
from ortho.cost import Cost, layer
from paper.claims import figures
from paper.claims.ledger import evidence, evidence_table
from paper.claims.rules import all_of, bound, contradiction, printed
from paper.claims.verdicts import Finding

CHAPTER = "04-every-printed-number"
HEAD_WIDTH = 64  # the source's: d = 768, h = 12

# ------------------------------------------------------------------------------------------- operations, section 3.3

COLUMNS = ("standard", "Performer", "ORA forward", "ORA backward")
OPERATIONS = {
    128: ("0.09", "0.08", "0.09", "0.08"),
    256: ("0.20", "0.15", "0.20", "0.15"),
    512: ("0.50", "0.31", "0.50", "0.30"),
    1024: ("1.41", "0.61", "1.41", "0.60"),
    2048: ("4.43", "1.22", "4.43", "1.21"),
    4096: ("15.30", "2.45", "15.30", "2.42"),
    8192: ("56.37", "4.89", "56.37", "4.83"),
}  # 10^9 ops at d = 768, by N


def unit_operations(length: int, width: int = 768, *, log: Callable[[float], float] = log2) -> tuple[float, ...]:
    """The source's orders of growth read as numbers, every constant 1, in 10^9, by `COLUMNS`."""
    projections, scores = length * width**2 / 1e9, length**2 * width / 1e9
    return projections + scores, projections + length * width * log(width) / 1e9, projections + scores, projections


def sides(of: Callable[..., Cost], length: Size, width: Size, projection: str, form: str) -> tuple[Cost, Cost]:
    """The costs of a standard layer, or of whatever `of` makes, and of the same with another projection."""
    heads = width // HEAD_WIDTH if isinstance(width, int) else 1
    standard, other = (of(1, length, width, heads, projection=name, form=form) for name in ("learned", projection))
    return standard, other


def true_operations(length: int, width: int = 768) -> tuple[float, ...]:
    """10^9 FLOPs, by `COLUMNS`; for the Performer only its four projections, without its features.

    The materialised form is the favourable one: a fused backward pass computes the scores a second time.
    """
    standard, frozen = sides(layer, length, width, "frozen", "reference")
    flops = standard.forward, 8 * length * width**2, frozen.forward, frozen.backward
    return tuple(one / 1e9 for one in flops)


@evidence("S0.3.3a", chapter=CHAPTER)
def operations() -> Finding:
    columns = {"ORA forward": "forward in FLOPs, by $N$", "ORA backward": "ORA backward in FLOPs, by $N$"}

    def by_column(row: Callable[[int], tuple[Any, ...]]) -> dict[tuple[str, int], Any]:
        return {(column, n): value for n in OPERATIONS for column, value in zip(COLUMNS, row(n), strict=True)}

    said, unit, true = by_column(OPERATIONS.__getitem__), by_column(unit_operations), by_column(true_operations)
    found = {
        "with every constant 1": printed(
            {f"{column}, $N = {n}$": said[column, n] for column, n in said},
            {f"{column}, $N = {n}$": unit[column, n] for column, n in unit},
        )
    }
    for column, label in columns.items():
        ratios = [true[column, n] / unit[column, n] for n in OPERATIONS]
        found[label] = printed(
            {str(n): said[column, n] for n in OPERATIONS}, {str(n): true[column, n] for n in OPERATIONS}
        ).noting(f"FLOPs are {min(ratios):.1f} to {max(ratios):.1f} times the printed operations")
    return all_of(found)


# --------------------------------------------------------------------------------------------- speed-ups, section 4.1

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
_HALF_DIGIT = 0.05 + 1e-9  # per cent: half of the last printed digit


def table_rule(length: Size, width: Size) -> Any:
    """The formula that gives all of `SPEED_UPS`, in per cent: (9 + r)/(14 (1 + r)), r = N/d."""
    return 100 * (9 * width + length) / (14 * (width + length))


def ratios_that_fit(largest: int) -> list[tuple[int, int, int, int]]:
    """All (a, b, c, e) up to `largest`, without common factor, whose (a + b r)/(c + e r) gives every printed digit."""
    import numpy as np

    ratio = np.array([length / width for length, width in SPEED_UPS])
    said = np.array([float(text) for text in SPEED_UPS.values()])
    b, c, e = (axis.reshape(-1, 1) for axis in np.meshgrid(*3 * [np.arange(largest + 1)], indexing="ij"))
    # At every point a + b r lies between the printed figure's two ends times c + e r: an interval for a.
    low = np.ceil(((said - _HALF_DIGIT) / 100 * (c + e * ratio) - b * ratio).max(1)).clip(0).astype(int)
    high = np.floor(((said + _HALF_DIGIT) / 100 * (c + e * ratio) - b * ratio).min(1)).clip(max=largest).astype(int)
    found = [
        (a, int(b[i, 0]), int(c[i, 0]), int(e[i, 0]))
        for i in np.flatnonzero((low <= high) & (c + e > 0)[:, 0])
        for a in range(int(low[i]), int(high[i]) + 1)
    ]
    return [fit for fit in found if gcd(*fit) == 1]


def step_gain(
    ratio: float, backward: float, optimiser: float, dropped: float, *, part: str = "N d^2", reading: str = "saved"
) -> float:
    """What ORA gains, in per cent, if steps are weighed in units of one forward pass F = N^2 d + N d^2.

    The standard step is 1 + `backward` + `optimiser`. ORA leaves `dropped` times `part` ('N d^2' or 'N^2 d') out of
    the backward pass and, as the source says, half of the optimiser. `reading` says what the figure is: the share of
    the time that is 'saved', or the 'speed-up' T/T' - 1 (infinite if nothing is left).
    """
    total = 1 + backward + optimiser
    saved = dropped * (1 if part == "N d^2" else ratio) / (1 + ratio) + optimiser / 2
    if reading == "saved":
        return 100 * saved / total
    return 100 * saved / (total - saved) if saved < total else inf


def weights_that_fit(largest: int = 6, steps: int = 4) -> list[tuple[str, str, float, float, float]]:
    """All (reading, part, backward, optimiser, dropped) of `step_gain` that give every printed digit.

    The three weights run over the multiples of 1/`steps` up to `largest`.
    """
    points = [(length / width, float(text)) for (length, width), text in SPEED_UPS.items()]
    grid = [k / steps for k in range(largest * steps + 1)]
    return [
        (reading, part, *weights)
        for reading, part in product(("saved", "speed-up"), ("N d^2", "N^2 d"))
        for weights in product(grid, grid, grid)
        if all(abs(step_gain(r, *weights, part=part, reading=reading) - said) <= _HALF_DIGIT for r, said in points)
    ]


# The weights among these whose backward pass costs twice the forward pass, as it does by count.
BACKWARD, OPTIMISER, DROPPED = 2.0, 0.5, 2.0
OPTIMISER_SHARE = Fraction(1, 7)  # of the standard step: OPTIMISER/(1 + BACKWARD + OPTIMISER)


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


def needed_share(speed_up: float, length: int, width: int) -> float:
    """The share of the standard step that its update would have to take for the layer to gain `speed_up` per cent."""
    standard, frozen = (cost.step for cost in sides(layer, length, width, "frozen", "reference"))
    gain = 1 + speed_up / 100
    update = (gain * frozen - standard) / (1 - gain / 2)
    return update / (standard + update)


# Where the optimiser weighs most: an update after each sequence, by AdamW in FP32, which reads a weight, its gradient
# and two moments and writes all but the gradient; products and memory at the peaks of NVIDIA's data sheet, H100 SXM.
UPDATE_BYTES = 28  # a trained weight
PRODUCTS_A_SECOND, BYTES_A_SECOND = 989e12, 3.35e12  # dense, BF16; HBM3
MANY = 64  # sequences an update


def update_share(length: int, width: int, *, sequences: int = 1) -> float:
    """The share of the standard layer's step that its update then takes, with one update for this many sequences."""
    cost = layer(sequences, length, width, width // HEAD_WIDTH, form="reference")
    update, products = UPDATE_BYTES * cost.trained / BYTES_A_SECOND, cost.step / PRODUCTS_A_SECOND
    return update / (update + products)


def against_limit(claimed: Mapping[tuple[int, int], float]) -> Finding:
    """Claimed speed-ups, in per cent by (N, d), against `limit` where the optimiser weighs most."""

    def limits(sequences: int) -> dict[str, float]:
        return {_at(*at): float(limit(*at, optimiser=update_share(*at, sequences=sequences))) for at in claimed}

    said = {_at(*at): gain for at, gain in claimed.items()}
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


def _at(length: int, width: int) -> str:
    return f"({length}, {width})"


evidence_table(
    CHAPTER,
    {
        "S0.4.1c": lambda: {
            "as $(9 + r)/(14 + 14 r)$, by $(N, d)$": printed(
                {_at(*at): text for at, text in SPEED_UPS.items()},
                {_at(*at): table_rule(*at) for at in SPEED_UPS},
                unit=" %",
            ),
            # The text's recipe gives at least this much, as it leaves the optimiser open; at most, it saves everything.
            "by the text's recipe": against_table(
                "backward pass and optimiser halved when $N \\gg d$",
                (step_gain(0, BACKWARD, 0, BACKWARD / 2), 100.0),
                (4096, 768),
            ),
            "by count": against_limit({at: float(text) for at, text in SPEED_UPS.items()}),
        },
        # By count: each range's lower end, at the shortest length that the source gives as an example.
        "S0.4.1d": lambda: {
            "$N \\ll d$ in the table": against_table("40-50 %", RANGES["N << d"], (128, 768)),
            "$N \\approx d$ in the table": against_table("25-30 %", RANGES["N ~ d"], (512, 512)),
            "$N \\gg d$ in the table": against_table("15-20 %", RANGES["N >> d"], (4096, 768)),
            "by count": against_limit(
                {at: RANGES[name][0] for at, name in zip(((128, 768), (512, 512), (4096, 768)), RANGES, strict=True)}
            ),
        },
    },
)
