r"""S3, section 3, improvement 5: losses of test-time training beyond least squares, Huber's and a contrastive one.

The source names the losses, and neither their constants nor a task. Here delta is twice the length of the noise on the
values in the norm form, and about three standard deviations of one of its numbers in the other. Steps and temperatures
are those that do best on other draws, which have no outliers.
"""

from functools import cache
from itertools import product

import torch

from ortho.attention.recurrent.ttt import BATCH
from ortho.attention.recurrent.ttt_losses import Contrastive, Huber, HuberNorm, Squared, TokenLoss
from ortho.theory import robustness
from ortho.theory.estimates import SIGMAS, estimate
from paper.claims.figures import Interval, outward
from paper.claims.ledger import evidence
from paper.claims.rules import all_of, holds, improves
from paper.claims.verdicts import Finding

CHAPTER = "13-gates-products-losses"
ROBUST: dict[str, TokenLoss] = {"Huber, each number": Huber(0.1), "Huber, norm": HuberNorm(0.2)}
OUTLIERS = ((0.02, 1.0), (0.1, 10.0))  # their share and their length; that of other values is 1
COUNT, WIDTH = 32, 16  # pairs to be retrieved, twice as many as a linear map can fit
PASSES = (1, 10)
STEPS = (0.0625, 0.125, 0.25, 0.5, 1.0)
TEMPERATURES = (0.1, 0.2, 0.5, 1.0)
# A step is a dozen float64 operations on numbers of size delta.
EXACT = 1e-12


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def interval(samples: torch.Tensor) -> Interval:
    """Of the mean, which the right one leaves with a probability of 1e-5 (of 1e-4, as there are 32 samples)."""
    found = estimate(samples)
    reach = SIGMAS * found.standard_error
    return outward((found.value - reach, found.value + reach))


@cache
def rate(loss: TokenLoss) -> float:
    """The step that is best without outliers."""
    return robustness.best_rate(loss, robustness.stream(0.0, 1.0, generator=seeded(0)))


@cache
def regression(loss: TokenLoss, share: float, size: float) -> torch.Tensor:
    """The relative error of the memory at the end, draw by draw, in per cent."""
    return 100 * robustness.errors(loss, rate(loss), robustness.stream(share, size, generator=seeded(1)))[0]


def saved(loss: TokenLoss, share: float, size: float) -> Interval:
    """By how many per cent the error is below that of the squared loss."""
    return interval(100 * (1 - regression(loss, share, size) / regression(Squared(), share, size)))


@cache
def retrieval(loss: TokenLoss, eta: float, passes: int, data: int, order: int) -> torch.Tensor:
    """The share of pairs that is found again, draw by draw, in per cent."""
    k, v = robustness.pairs(COUNT, WIDTH, generator=seeded(data))
    found = robustness.retrieved(loss, eta, k, v, batch=BATCH, passes=passes, generator=seeded(order))
    return 100 * found


@cache
def tuned(passes: int) -> tuple[tuple[TokenLoss, float], tuple[TokenLoss, float]]:
    """The squared and the contrastive loss with the steps and the temperature that retrieve most, of other pairs."""

    def best(*losses: TokenLoss) -> tuple[TokenLoss, float]:
        return max(product(losses, STEPS), key=lambda setting: float(retrieval(*setting, passes, 2, 3).mean()))

    return best(Squared()), best(*map(Contrastive, TEMPERATURES))


def more_found(passes: int) -> Interval:
    """How many more pairs in a hundred the contrastive loss finds than the squared one, which has them in another
    order."""
    squared, contrastive = tuned(passes)
    return interval(retrieval(*contrastive, passes, 4, 6) - retrieval(*squared, passes, 4, 5))


@cache
def replacing(loss: TokenLoss, eta: float) -> float:
    """The share of keys, in per cent, at which the second of two values is found, each written once: 8 keys."""
    k, old = robustness.pairs(8, WIDTH, generator=seeded(7))
    new = robustness.pairs(8, WIDTH, generator=seeded(8))[1]
    return 100 * float(robustness.replaced(loss, eta, k, old, new).mean())


def excess(delta: float = 0.2, eta: float = 0.5) -> float:
    """By how much the step of an outlier of 1 to a million is longer than eta delta, relatively."""
    lengths = robustness.moved(HuberNorm(delta), eta, [10.0**n for n in range(7)])
    return float((lengths / (eta * delta) - 1).max())


@evidence("S3.3g", chapter=CHAPTER)
def losses() -> Finding:
    settings = [(name, loss, *outliers) for name, loss in ROBUST.items() for outliers in OUTLIERS]
    labels = [f"{name}, {100 * share:g} % of length {size:g}" for name, _, share, size in settings]
    gains = {label: saved(*setting[1:]) for label, setting in zip(labels, settings, strict=True)}
    clean = {
        name: 100 * float((regression(loss, 0.0, 1.0) / regression(Squared(), 0.0, 1.0) - 1).mean())
        for name, loss in ROBUST.items()
    }
    found = {f"{COUNT} pairs, {n} pass{'es' * (n > 1)}": more_found(n) for n in PASSES}
    return all_of(
        {
            "one token": holds(
                "the norm form moves the memory by $\\eta \\delta \\lvert k \\rvert$ at most", excess(), EXACT
            ),
            "with outliers": improves("Huber's error is below that of the squared loss", gains, unit=" %"),
            "contrastive": improves("retrieves more pairs than the squared loss", found, unit=" %"),
        }
    ).noting(
        f"Without outliers the error is larger than with the squared loss, by "
        f"{', '.join(f'{more:.0f} % ({name})' for name, more in clean.items())}. What is new looks like an outlier: of "
        f"values that replace others the squared loss finds {replacing(Squared(), 1.0):.0f} %, Huber's norm form with "
        f"the same $\\delta$ {replacing(ROBUST['Huber, norm'], 1.0):.0f} %"
    )
