r"""What a source of logits is, and what all of them share.

A source maps tokens x (B, N, d) to logits (B, H, N, M) for the last N of M positions, or to (1, H, N, M) if it does
not look at x. Most are products of factors that are smaller than they are. In a mixture $\sum_i \alpha_i S_i$ a
source's share $\alpha_i$ multiplies such a factor, not the logits: those would have to be kept for its gradient.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from ortho import _checks
from ortho._autocast import no_autocast
from ortho._checks import checked
from ortho._typing import Float, Size, State, Tensor

__all__ = ["Call", "LogitSource", "Seen", "SourceCost", "product", "shared"]


class Seen(NamedTuple):
    """The tokens that may be attended to: how many they are, and what the source's `memory` made of them."""

    keys: int
    memory: State = ()


class Call(NamedTuple):
    """The call that a closed form is of: x (B, N, d) without a past, in a layer of H heads and max_length positions.

    `shared` is 1 within a mixture, else 0. `rank` is `FactoredRandom`'s, `k1` `FactoredDense`'s.
    """

    B: Size
    N: Size
    d: Size
    H: Size
    max_length: Size
    rank: Size
    k1: Size
    shared: int
    input_grad: bool
    itemsize: int


class SourceCost(NamedTuple):
    """What a source costs a layer: FLOPs of matrix products, scalar operations, bytes kept beside x, the weights and
    what the layer keeps of v, FLOPs of one more token, bytes carried between tokens, parameters.

    `items` is the length of the logits' first axis, B or 1. The sum of x's gradient with those of the layer's other
    paths is included.
    """

    items: Size
    forward: Size = 0
    backward: Size = 0
    elementwise_forward: Size = 0
    elementwise_backward: Size = 0
    saved_bytes: Size = 0
    decode: Size = 0
    state_bytes: Size = 0
    trained: Size = 0
    frozen: Size = 0


class LogitSource(nn.Module, ABC):
    """One source of logits, for sequences of at most `max_length` tokens.

    A subclass draws its parameters in `_make`, such that the logits of independent standard normal tokens have a
    variance of 1 or little more. `carries` names what later queries need of earlier tokens, which `memory` makes of
    them.
    """

    name: ClassVar[str]
    carries: ClassVar[tuple[str, ...]] = ()

    @checked
    def __init__(
        self,
        d_model: int,
        num_heads: int,
        max_length: int,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.d_model, self.num_heads = _checks.heads(d_model, num_heads)
        self.max_length = _checks.positive_int("max_length", max_length)
        self._make({"generator": generator, "dtype": dtype, "device": device})

    @abstractmethod
    def _make(self, options: dict[str, Any]) -> None:
        """Draw the parameters; `options` are those of `torch.randn`."""

    def memory(self, x: Float[Tensor, "B N d"]) -> State:  # noqa: ARG002 - of use to who carries something
        """What later queries need of these tokens, each (B, H, N, K), in the order of `carries`."""
        return ()

    @abstractmethod
    def logits(self, x: Float[Tensor, "B N d"], seen: Seen, share: Tensor | None = None) -> Float[Tensor, "b H N M"]:
        """The logits of x, the last of the tokens that it sees, times `share`."""

    @classmethod
    @abstractmethod
    def cost(cls, call: Call) -> SourceCost:
        """The closed form of the logits of a call, integers for integer sizes, formulas for symbols."""

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, num_heads={self.num_heads}, max_length={self.max_length}"


def shared(factor: Tensor, share: Tensor | None) -> Tensor:
    """A factor of the logits, times the source's share in a mixture if there is one."""
    return factor if share is None else share * factor


def product(
    left: Float[Tensor, "b H N r"], right: Float[Tensor, "b H M r"] | Float[Tensor, "H M r"]
) -> Float[Tensor, "b H N M"]:
    """left right^T in float32 at least; a right factor without the batch's axis is the same for all items, and not
    copied for them."""
    with no_autocast(left):
        left, right = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (left, right))
        if right.dim() == left.dim():
            return left @ right.mT
        rows = left.transpose(0, 1)  # (H, b, N, r): the tokens of the whole batch are rows of one product a head
        return (rows.flatten(1, 2) @ right.mT).unflatten(1, rows.shape[1:3]).transpose(0, 1)
