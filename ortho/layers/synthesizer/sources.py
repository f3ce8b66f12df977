r"""Sources of a Synthesizer's logits: the base class, sources by position and by token, and a list of all.

A source maps tokens x (B, N, d) to logits (B, H, N, M) for the last N of M positions, or to (1, H, N, M) if it does
not look at x. Most logits are products of smaller factors. In a mixture $\sum_i \alpha_i S_i$ a source's weight
$\alpha_i$ multiplies such a factor, not the logits, which would have to be kept for the gradient of $\alpha_i$.
"""

from abc import ABC, abstractmethod
from math import isqrt
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ortho import checks
from ortho._cost import Cost, quotient
from ortho._typing import Float, Size, State
from ortho.attention.call import no_autocast
from ortho.heads import new_weight, split_heads


class Seen(NamedTuple):
    """The tokens that may be attended to: how many they are, and what the source's `state` made of them."""

    keys: int
    state: State = ()


class Call(NamedTuple):
    """The call that a cost describes: x (B, N, d) without a past, in a layer of H heads and max_length positions.

    `rank` is `FactoredRandom`'s, `k1` `FactoredDense`'s.
    """

    B: Size
    N: Size
    d: Size
    H: Size
    max_length: Size
    rank: Size
    k1: Size
    input_grad: bool
    itemsize: int


class LogitSource(nn.Module, ABC):
    """One source of logits, for sequences of at most `max_length` tokens.

    A subclass draws its parameters in `_make`, such that the logits of independent standard normal tokens have a
    variance of 1 or little more. `by_token` says whether logits depend on the tokens, not on positions alone. `carries`
    names what later queries need from earlier tokens; `state` computes it.
    """

    name: ClassVar[str]
    by_token: ClassVar[bool] = True
    carries: ClassVar[tuple[str, ...]] = ()

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
        self.d_model, self.num_heads = checks.heads(d_model, num_heads)
        self.max_length = checks.positive_int("max_length", max_length)
        self._make({"generator": generator, "dtype": dtype, "device": device})

    @abstractmethod
    def _make(self, options: dict[str, Any]) -> None:
        """Draw the parameters; `options` are those of `torch.randn`."""

    def state(self, x: Float[Tensor, "B N d"]) -> State:  # noqa: ARG002 - of use to who carries something
        """What later queries need of these tokens, each (B, H, N, K), in the order of `carries`."""
        return ()

    @abstractmethod
    def logits(self, x: Float[Tensor, "B N d"], seen: Seen, share: Tensor | None = None) -> Float[Tensor, "b H N M"]:
        """The logits of x, the last of the tokens in `seen`, times `share`."""

    @classmethod
    @abstractmethod
    def cost(cls, call: Call) -> Cost:
        """The cost of a call's logits in closed form."""

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, num_heads={self.num_heads}, max_length={self.max_length}"


def shared(factor: Tensor, share: Tensor | None) -> Tensor:
    """A factor of the logits, times the source's share in a mixture if there is one."""
    return factor if share is None else share * factor


def product(
    left: Float[Tensor, "b H N r"], right: Float[Tensor, "b H M r"] | Float[Tensor, "H M r"]
) -> Float[Tensor, "b H N M"]:
    """left right^T in float32 at least; a right factor without a batch axis is the same for all items, and is not
    copied."""
    with no_autocast(left):
        left, right = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (left, right))
        if right.dim() == left.dim():
            return left @ right.mT
        rows = left.transpose(0, 1)  # (H, b, N, r): the tokens of the whole batch are rows of one product a head
        return (rows.flatten(1, 2) @ right.mT).unflatten(1, rows.shape[1:3]).transpose(0, 1)


class Random(LogitSource):
    """The random Synthesizer (Tay et al. 2021, section 3): a trained matrix R (H, max_length, max_length), drawn from
    N(0, 1), the same for every sequence."""

    name = "random"
    by_token = False
    trained: ClassVar[bool] = True

    matrix: Tensor

    def _make(self, options: dict[str, Any]) -> None:
        matrix = torch.randn(self.num_heads, self.max_length, self.max_length, **options)
        self.register_parameter("matrix", nn.Parameter(matrix, requires_grad=self.trained))

    def logits(self, x: Float[Tensor, "B N d"], seen: Seen, share: Tensor | None = None) -> Float[Tensor, "1 H N M"]:
        matrix = self.matrix[None, :, seen.keys - x.shape[1] : seen.keys, : seen.keys]
        return shared(matrix, share)

    @classmethod
    def cost(cls, call: Call) -> Cost:
        matrix = call.H * call.max_length**2
        return Cost(trained=matrix if cls.trained else 0, frozen=0 if cls.trained else matrix)


class FixedRandom(Random):
    """The fixed random Synthesizer: R stays as it was drawn."""

    name = "fixed-random"
    trained = False


class FactoredRandom(LogitSource):
    """The factorised random Synthesizer: R = R1 R2^T with `left` R1 and `right` R2 (H, max_length, rank).

    A call computes only its own rows and columns of R and keeps none; it keeps the softmax, which is as large. Raises
    TypeError or ValueError for a rank below 1, besides `LogitSource`'s errors. The paper's rank is 8.
    """

    name = "factored-random"
    by_token = False

    def __init__(self, d_model: int, num_heads: int, max_length: int, *, rank: int = 8, **options: Any) -> None:
        self.rank = checks.positive_int("rank", rank)
        super().__init__(d_model, num_heads, max_length, **options)

    def _make(self, options: dict[str, Any]) -> None:
        shape = (self.num_heads, self.max_length, self.rank)
        # A logit is a sum of `rank` products of two numbers, each of variance rank^(-1/2).
        self.left, self.right = (nn.Parameter(torch.randn(shape, **options) * self.rank**-0.25) for _ in range(2))

    def logits(self, x: Float[Tensor, "B N d"], seen: Seen, share: Tensor | None = None) -> Float[Tensor, "1 H N M"]:
        left = self.left[None, :, seen.keys - x.shape[1] : seen.keys]
        return product(shared(left, share), self.right[:, : seen.keys])

    @classmethod
    def cost(cls, call: Call) -> Cost:
        factor = call.H * call.N * call.rank
        return Cost(
            forward=2 * call.N * factor,
            backward=4 * call.N * factor,
            decode=2 * call.N * call.H * call.rank,
            trained=2 * call.H * call.max_length * call.rank,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.rank}"


class _Hidden(LogitSource):
    r"""$\mathrm{ReLU}(x W_1)$, with d/H hidden units for each head, and what maps these to logits."""

    weight_1: Tensor

    def _make(self, options: dict[str, Any]) -> None:
        self.weight_1 = new_weight(self.d_model, self.d_model, **options)

    def _second(self, columns: int, options: dict[str, Any]) -> nn.Parameter:
        """Weights (H, columns, K) of variance 2/K: after the ReLU a unit's mean square is 1/2 (He et al. 2015)."""
        width = self.d_model // self.num_heads
        return nn.Parameter(torch.randn(self.num_heads, columns, width, **options) * (2 / width) ** 0.5)

    def hidden(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N K"]:
        """The hidden units, head by head."""
        return split_heads(linear(x, self.weight_1).relu(), self.num_heads)

    @classmethod
    def _cost(cls, call: Call, **second: Size) -> Cost:
        """The cost of the hidden units, and of the `second` map, which makes logits of them."""
        tokens = call.B * call.N * call.d
        product = 2 * tokens * call.d
        own = Cost(
            forward=product, backward=(1 + call.input_grad) * product, decode=2 * call.B * call.d**2, trained=call.d**2
        )
        return own + Cost(**second)


class Dense(_Hidden):
    r"""The dense Synthesizer: $\mathrm{ReLU}(x W_1) W_2$, one logit a position (Tay et al. 2021, section 3).

    `weight_1` (d, d) gives each head K = d/H hidden units; `weight_2` (H, max_length, K) is separate for each head.
    There are d^2 + d N parameters, as in the paper's table, and no biases.
    """

    name = "dense"

    def _make(self, options: dict[str, Any]) -> None:
        super()._make(options)
        self.weight_2 = self._second(self.max_length, options)

    def logits(self, x: Float[Tensor, "B N d"], seen: Seen, share: Tensor | None = None) -> Float[Tensor, "B H N M"]:
        return product(shared(self.hidden(x), share), self.weight_2[:, : seen.keys])

    @classmethod
    def cost(cls, call: Call) -> Cost:
        tokens = call.B * call.N * call.d
        return cls._cost(
            call,
            forward=2 * tokens * call.N,
            backward=4 * tokens * call.N,
            decode=2 * call.B * call.d * call.N,
            trained=call.d * call.max_length,
        )


def _block_count(max_length: Size, k1: Size | None) -> Size:
    """k1, by default the largest divisor of `max_length` up to its square root; symbols pass."""
    if hasattr(max_length, "free_symbols"):
        checks.expect(k1 is not None, "k1", f"a size beside the symbol {max_length} for max_length", "None")
        return k1
    if k1 is None:
        return next(k for k in range(isqrt(max_length), 0, -1) if max_length % k == 0)
    checks.expect(not max_length % k1, "k1", f"a divisor of max_length = {max_length}", k1)
    return k1


class FactoredDense(_Hidden):
    r"""The factorised dense Synthesizer: logit j is $A_{\lfloor j / k_2 \rfloor} B_{j \bmod k_2}$.

    A (k1 numbers) and B (k2), with k1 k2 = max_length, belong to the query: the hidden units of `Dense` times
    `weight_a` (H, k1, K) and `weight_b` (H, k2, K). A is repeated number by number, and B as a whole: if both were
    repeated as a whole, which the paper's words allow, they would give only lcm(k1, k2) different logits. A call
    computes one number of A for each of its blocks of k2 keys.

    `k1` is by default the largest divisor of max_length up to its square root. Raises TypeError or ValueError if it is
    not a divisor, besides `LogitSource`'s errors.
    """

    name = "factored-dense"

    def __init__(self, d_model: int, num_heads: int, max_length: int, *, k1: int | None = None, **options: Any) -> None:
        self.k1 = _block_count(max_length, k1)
        self.k2 = max_length // self.k1
        super().__init__(d_model, num_heads, max_length, **options)

    def _make(self, options: dict[str, Any]) -> None:
        super()._make(options)
        self.weight_a, self.weight_b = self._second(self.k1, options), self._second(self.k2, options)

    def logits(self, x: Float[Tensor, "B N d"], seen: Seen, share: Tensor | None = None) -> Float[Tensor, "B H N M"]:
        hidden, blocks = self.hidden(x), -(-seen.keys // self.k2)
        a = shared(product(hidden, self.weight_a[:, :blocks]), share)  # (B, H, N, blocks)
        b = product(hidden, self.weight_b[:, : seen.keys])  # (B, H, N, k2), fewer for fewer keys
        return (a[..., None] * b[..., None, :]).flatten(-2)[..., : seen.keys]

    @classmethod
    def cost(cls, call: Call) -> Cost:
        tokens = call.B * call.N * call.d
        k1 = _block_count(call.max_length, call.k1)
        k2 = quotient(call.max_length, k1)
        a, b = k1, k2  # how many of the numbers a call computes
        if call.max_length != call.N:
            a, b = -(-call.N // k2), min(k2, call.N) if isinstance(call.N, int) else k2
        return cls._cost(
            call,
            forward=2 * tokens * (a + b),
            backward=4 * tokens * (a + b),
            decode=2 * call.B * call.d * (a + b),
            trained=call.d * (k1 + k2),
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, k1={self.k1}"


class DotProduct(LogitSource):
    r"""The standard layer's $q_i^T k_j / \sqrt{K}$, to be mixed with others ("vanilla" in the paper).

    It has no use for positions; `max_length` is the layer's. The keys (B, H, P, K) of earlier tokens are its state.
    """

    name = "dot-product"
    carries = ("keys",)

    def _make(self, options: dict[str, Any]) -> None:
        self.weight_q, self.weight_k = (new_weight(self.d_model, self.d_model, **options) for _ in range(2))

    def state(self, x: Float[Tensor, "B N d"]) -> State:
        return (split_heads(linear(x, self.weight_k), self.num_heads),)

    def logits(self, x: Float[Tensor, "B N d"], seen: Seen, share: Tensor | None = None) -> Float[Tensor, "B H N M"]:
        q = split_heads(linear(x, self.weight_q), self.num_heads)
        return product(shared(q * q.shape[-1] ** -0.5, share), seen.state[0])

    @classmethod
    def cost(cls, call: Call) -> Cost:
        tokens = call.B * call.N * call.d
        product, scores = 2 * tokens * call.d, 2 * tokens * call.N
        return Cost(
            forward=2 * product + scores,
            backward=2 * (1 + call.input_grad) * product + 2 * scores,
            decode=4 * call.B * call.d**2 + 2 * call.B * call.d * call.N,
            state_bytes=call.itemsize * tokens,
            trained=2 * call.d**2,
        )


# Each takes (d_model, num_heads, max_length, *, generator, dtype, device), and its own options.
SOURCES: dict[str, type[LogitSource]] = {
    source.name: source for source in (Random, FixedRandom, FactoredRandom, Dense, FactoredDense, DotProduct)
}
