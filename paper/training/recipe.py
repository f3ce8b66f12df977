"""How a model is trained."""

from dataclasses import dataclass
from math import cos, inf, pi

from ortho import checks

PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True)
class Recipe:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) on `steps` batches of `B` examples.

    The learning rate rises in a straight line to `rate` in the first share `warm_up` of the steps and falls to 0 along
    half a cosine. Gradients are clipped to the norm `clip` (Pascanu et al. 2013). `weight_decay` shrinks matrices, but
    not norms and biases; `smoothing` is the share of an answer that is spread over all (Szegedy et al. 2016). With the
    `precision` 'bfloat16' products are computed in bfloat16, and weights are kept in float32.

    Raises TypeError or ValueError, naming the field, for sizes below 1, for a rate or a clip that is not positive, for
    a weight decay below 0, for shares outside [0, 1), and for another precision.
    """

    steps: int
    rate: float
    B: int
    warm_up: float = 0.1
    weight_decay: float = 0.0
    clip: float = 1.0
    smoothing: float = 0.0
    precision: str = "float32"

    def __post_init__(self) -> None:
        for name in ("steps", "B"):
            checks.positive_int(name, getattr(self, name))
        for name in ("warm_up", "smoothing"):
            checks.probability(name, getattr(self, name))
        for name in ("rate", "clip", "weight_decay"):
            value = getattr(self, name)
            wanted = "of at least 0" if name == "weight_decay" else "above 0"
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name}: expected a number {wanted}, got {checks.describe(value)}")
            if not 0 <= value < inf or (value == 0 and name != "weight_decay"):
                raise ValueError(f"{name}: expected a finite number {wanted}, got {value}")
        checks.one_of("precision", self.precision, PRECISIONS)

    def share_of_rate(self, step: int) -> float:
        """The share of `rate` with which a step, counted from 0, is made."""
        rise = max(1, round(self.warm_up * self.steps))
        if step < rise:
            return (step + 1) / rise
        return (1 + cos(pi * (step - rise) / max(1, self.steps - rise))) / 2
