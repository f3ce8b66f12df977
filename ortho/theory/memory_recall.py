r"""What a memory answers after it was told M pairs: expected errors of the linear memory and of the delta rule, exact.

Keys are independent unit vectors of uniform direction in $R^K$, values independent with mean 0 and one mean square, of
which errors are shares: a memory that answers 0 has the error 1. The age a of a pair counts those written after it. A
write fades the memory by `decay`, $\alpha$, and enters its pair with the strength `beta`; linear, it adds to what is
there, $S \leftarrow \alpha S + \beta k v^T$, and by the delta rule it erases first,
$S \leftarrow (I - \beta k k^T)\, \alpha S + \beta k v^T$.

The answer to the key $k_j$ is $\sum_i w_i v_i$, $w_i = \beta \alpha^{M-i} k_i^T x_i$, where $x_i$ is $k_j$ in the
linear memory, and by the delta rule $x_M = k_j$, $x_{i-1} = (I - \beta k_i k_i^T) x_i$. With
$E\, k k^T X k k^T = (2 X + \mathrm{tr}(X) I) / (K (K + 2))$ for symmetric X, all $E w_i^2$ are sums of powers.
"""

from itertools import count
from typing import Any, NamedTuple

import torch

from ortho import _checks
from ortho._checks import checked
from ortho._typing import Float, Tensor
from ortho.attention.recurrent.delta import delta_rule
from ortho.attention.recurrent.recurrence import recurrence
from ortho.theory.estimates import Estimate, estimate
from ortho.theory.stability import unit_keys

__all__ = ["MEMORIES", "Answer", "answers", "capacity", "expected_answer", "mean_error", "sampled_errors"]

MEMORIES = ("linear", "delta")
VALUES = 16  # numbers of a value in draws


class Answer(NamedTuple):
    """Expectations of an answer, as shares of the values' mean square."""

    own: float  # the product with the value that was written, E o^T v
    square: float  # E |o|^2

    @property
    def error(self) -> float:
        """E |o - v|^2."""
        return 1 - 2 * self.own + self.square


@checked
def expected_answer(memory: str, K: int, pairs: int, age: int, *, beta: float = 1.0, decay: float = 1.0) -> Answer:
    r"""What the key of the pair of that age, 0 for the last one written, is answered after M `pairs`.

    For beta = decay = 1 the error is $(M - 1) / K$ in the linear memory, and by the delta rule
    $2 (1 - \rho^a) - \rho^M (1 - (\sigma / \rho)^a)$ with $\rho = 1 - 1/K$ and $\sigma = 1 - 2 (K + 1) / (K (K + 2))$.
    """
    _sizes(memory, K, pairs, beta, decay)
    if not 0 <= age < pairs:
        raise ValueError(f"age: expected 0 to {pairs - 1} with {pairs} pairs, got {age}")
    fresh = beta * decay**age
    if memory == "linear":
        others = _geometric(decay**2, pairs) - decay ** (2 * age)
        return Answer(fresh, fresh**2 + beta**2 / K * others)
    erased = beta * (2 - beta)
    kept = 1 - erased / K  # by one write, of the mean square of x
    along = 1 - 2 * beta / K + 2 * beta**2 / (K * (K + 2))  # of that of x along k_j, but for what comes from across
    square = ((K - 1) * along**age + kept**age) / K  # E (k_j^T x_j)^2
    fading = decay**2 * kept
    later = _geometric(fading, age)
    earlier = decay ** (2 * age + 2) * (kept**age - erased * square) * _geometric(fading, pairs - 1 - age)
    return Answer(fresh * (1 - beta / K) ** age, fresh**2 * square + beta**2 / K * (later + earlier))


@checked
def mean_error(
    memory: str,
    K: int,
    pairs: int,
    *,
    last: int | None = None,
    beta: float = 1.0,
    decay: float = 1.0,
    scaled: bool = False,
) -> float:
    """The expected error, the mean over the `last` pairs that were written, by default all.

    `scaled`: after all answers were multiplied by the one number with which it is least, as a layer may learn to do.
    """
    last = pairs if last is None else _checks.positive_int("last", last)
    if last > _checks.positive_int("pairs", pairs):
        raise ValueError(f"last: expected at most the {pairs} pairs, got {last}")
    found = [expected_answer(memory, K, pairs, age, beta=beta, decay=decay) for age in range(last)]
    mean = Answer(*(sum(values) / last for values in zip(*found, strict=True)))
    return 1 - mean.own**2 / mean.square if scaled else mean.error


@checked
def capacity(memory: str, K: int, error: float, *, beta: float = 1.0, decay: float = 1.0, scaled: bool = False) -> int:
    """The most pairs of which any number up to it has at most that `mean_error`, a number between 0 and 1.

    There is one: the error of old pairs tends to 1 or more.
    """
    if not 0 < error < 1:
        raise ValueError(f"error: expected a number between 0 and 1, got {error}")
    gates: dict[str, Any] = {"beta": beta, "decay": decay, "scaled": scaled}
    return next(M for M in count() if mean_error(memory, K, M + 1, **gates) > error)


@checked
def answers(
    memory: str,
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    beta: float = 1.0,
    decay: float = 1.0,
) -> Float[Tensor, "*batch M V"]:
    """What each key is answered when all M pairs of unit keys and values have been written, in their order."""
    _checks.one_of("memory", memory, MEMORIES)
    strength = torch.full_like(k[..., 0], beta)
    log_decay = None if decay == 1 else torch.full_like(strength, decay).log()
    if memory == "delta":
        found: Any = delta_rule(k, k, v, beta=strength, log_decay=log_decay, normalise=False)
        return found
    empty = v.new_zeros(*k.shape[:-2], k.shape[-1], v.shape[-1])
    return recurrence(k, k, v, strength, log_decay, empty, is_causal=False, erase=False)[0]


@checked
def sampled_errors(
    memory: str,
    K: int,
    pairs: int,
    *,
    draws: int,
    beta: float = 1.0,
    decay: float = 1.0,
    generator: torch.Generator | None = None,
) -> list[Estimate]:
    """The errors of drawn keys and normal values, float64, by age; each is the mean of so many draws."""
    _sizes(memory, K, pairs, beta, decay)
    k = unit_keys(_checks.positive_int("draws", draws), pairs, K, generator=generator)
    v = torch.randn(draws, pairs, VALUES, generator=generator, dtype=torch.float64)
    errors = (answers(memory, k, v, beta=beta, decay=decay) - v).square().mean(-1)  # (draws, M)
    return [estimate(column) for column in errors.flip(-1).mT]


def _geometric(ratio: float, terms: int) -> float:
    """1 + ratio + ratio^2 + ..., so many terms."""
    return terms if ratio == 1 else (1 - ratio**terms) / (1 - ratio)


def _sizes(memory: str, K: int, pairs: int, beta: float, decay: float) -> None:
    """TypeError or ValueError for an unknown memory, sizes below 1, and gates outside their range."""
    _checks.one_of("memory", memory, MEMORIES)
    _checks.positive_int("K", K)
    _checks.positive_int("pairs", pairs)
    for name, value, most in (("beta", beta, 2), ("decay", decay, 1)):
        if not 0 < value <= most:
            raise ValueError(f"{name}: expected a number in (0, {most}], got {value}")
