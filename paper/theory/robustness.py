r"""How a loss shapes what a memory learns: with outliers among values, and where values must be told apart or replaced.

*Regression*: a stream of unit keys and values $v = S_*^T k$ + noise, of which a share is replaced by vectors of random
direction and a given length. The result is how far the memory is from $S_*$ at the end. *Retrieval*: pairs of random
unit keys and values are written once or several times. The result is whether a key's prediction scores its own value
highest among all of them. Everything is computed for several independent draws at once, and memories are those of
`ortho.attention.recurrent.ttt`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ortho._typing import Float, State
from ortho.attention.recurrent.ttt import state_now, ttt_attention
from ortho.attention.recurrent.ttt_losses import TokenLoss
from ortho.checks import expect

WIDTH, LENGTH, NOISE, DRAWS = 8, 512, 0.1, 32
RATES = (0.025, 0.05, 0.1, 0.2, 0.4, 0.8)


class Stream(NamedTuple):
    """Keys and values, and the matrix that the values come from."""

    target: Float[Tensor, "R K V"]
    k: Float[Tensor, "R N K"]
    v: Float[Tensor, "R N V"]


def stream(share: float, size: float, *, generator: torch.Generator, draws: int = DRAWS) -> Stream:
    """`draws` streams of `LENGTH` tokens with K = V = `WIDTH`, float64, in which each value is an outlier with
    probability `share`.

    A value without noise has a root mean square length of 1, the noise one of `NOISE`; an outlier has length `size`.
    Generators with the same seed give the same stream except for the outliers, whatever their share and size.
    ValueError for a share outside [0, 1].
    """
    expect(0 <= share <= 1, "share", "a number within 0 and 1", share)

    def normal(*shape: int) -> Tensor:
        return torch.randn(draws, *shape, generator=generator, dtype=torch.float64)

    target, k = normal(WIDTH, WIDTH), normalize(normal(LENGTH, WIDTH), dim=-1)
    v = k @ target + NOISE * normal(LENGTH, WIDTH)
    wrong = size * normalize(normal(LENGTH, WIDTH), dim=-1)
    chance = torch.rand(draws, LENGTH, 1, generator=generator, dtype=torch.float64)
    return Stream(target / WIDTH**0.5, k, torch.where(chance < share, wrong, v / WIDTH**0.5))


def _written(
    k: Tensor, v: Tensor, loss: TokenLoss, eta: float, mini_batch_size: int, state: State | None = None
) -> State:
    """The state after writing the pairs in their order, with steps of size eta."""
    rates = k.new_full(k.shape[:-1], eta)
    result: Any = ttt_attention(
        k[:, :1],
        k,
        v,
        loss=loss,
        eta=rates,
        mini_batch_size=mini_batch_size,
        qk_l2norm=False,
        initial_state=state,
        return_state=True,
    )
    return result[1]


def errors(loss: TokenLoss, eta: float, data: Stream) -> Float[Tensor, "R"]:
    r"""$|S - S_*| / |S_*|$ (Frobenius) of each draw after all tokens, written token by token."""
    state = _written(data.k, data.v, loss, eta, 1)
    return (state_now(state) - data.target).flatten(1).norm(dim=1) / data.target.flatten(1).norm(dim=1)


def best_rate(loss: TokenLoss, data: Stream) -> float:
    """The one of `RATES` with the least mean error after the last token."""
    return min(RATES, key=lambda eta: float(errors(loss, eta, data).mean()))


def moved(loss: TokenLoss, eta: float, sizes: Sequence[float]) -> Float[Tensor, "sizes"]:
    """How far, in Frobenius norm, one pair moves an empty memory: a unit key, and a value of each of these lengths with
    equal entries."""
    k, v = torch.eye(WIDTH, dtype=torch.float64)[:1], torch.full((1, WIDTH), WIDTH**-0.5, dtype=torch.float64)
    k, v = (x.expand(len(sizes), 1, WIDTH) for x in (k, v))
    v = torch.tensor(sizes, dtype=torch.float64)[:, None, None] * v
    return state_now(_written(k, v, loss, eta, 1)).flatten(1).norm(dim=1)


def pairs(count: int, width: int, *, generator: torch.Generator, draws: int = DRAWS) -> tuple[Tensor, Tensor]:
    """(keys, values), independent random unit vectors (draws, count, width), float64."""
    shape = (2, draws, count, width)
    k, v = normalize(torch.randn(shape, generator=generator, dtype=torch.float64), dim=-1)
    return k, v


def _found(k: Tensor, v: Tensor, state: State) -> Tensor:
    """The share of keys, draw by draw, whose prediction scores the key's own value highest."""
    nearest = (k @ state_now(state) @ v.mT).argmax(-1)
    return (nearest == torch.arange(k.shape[1])).double().mean(-1)


def retrieved(
    loss: TokenLoss,
    eta: float,
    k: Float[Tensor, "R P K"],
    v: Float[Tensor, "R P V"],
    *,
    mini_batch_size: int,
    passes: int,
    generator: torch.Generator,
) -> Float[Tensor, "R"]:
    """The share of P pairs that is found again after `passes` over all of them, each in its own random order."""
    state = None
    for _ in range(passes):
        order = torch.randperm(k.shape[1], generator=generator)
        state = _written(k[:, order], v[:, order], loss, eta, mini_batch_size, state)
    assert state is not None
    return _found(k, v, state)


def replaced(
    loss: TokenLoss, eta: float, k: Float[Tensor, "R P K"], old: Float[Tensor, "R P V"], new: Float[Tensor, "R P V"]
) -> Float[Tensor, "R"]:
    """The share of P keys that find their new value among all old and new ones, after a pass with the old values and
    one with the new. Token by token."""
    state = _written(k, old, loss, eta, 1)
    return _found(k, torch.cat([new, old], 1), _written(k, new, loss, eta, 1, state))
