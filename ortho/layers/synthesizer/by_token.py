r"""Logits that depend on the tokens: of the query's alone (dense), or of the query's and the key's (dot product)."""

from math import isqrt
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from ortho import _checks
from ortho._checks import checked
from ortho._typing import Float, Size, State, Tensor
from ortho._weights import new_weight, split_heads
from ortho.layers.synthesizer.source import Call, LogitSource, Seen, SourceCost, product, shared

__all__ = ["Dense", "DotProduct", "FactoredDense"]


class _Hidden(LogitSource):
    r"""$\mathrm{ReLU}(x W_1)$, of which each head has d/H units of its own, and what maps them to logits."""

    weight_1: Tensor

    def _make(self, options: dict[str, Any]) -> None:
        self.weight_1 = new_weight(self.d_model, self.d_model, **options)

    def _second(self, columns: int, options: dict[str, Any]) -> nn.Parameter:
        """(H, columns, K), of variance 2/K: a unit's mean square is 1/2 behind the ReLU (He et al. 2015)."""
        width = self.d_model // self.num_heads
        return nn.Parameter(torch.randn(self.num_heads, columns, width, **options) * (2 / width) ** 0.5)

    def hidden(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N K"]:
        """The hidden units, head by head."""
        return split_heads(linear(x, self.weight_1).relu(), self.num_heads)

    @classmethod
    def _cost(cls, call: Call, **second: Size) -> SourceCost:
        """Of the hidden units, and of the `second` map, which makes logits of them."""
        tokens = call.B * call.N * call.d
        product = 2 * tokens * call.d
        own = {
            "forward": product,
            "backward": (1 + call.input_grad) * product,
            "elementwise_forward": tokens,  # ReLU
            "elementwise_backward": (1 + call.input_grad) * tokens,  # ReLU; sum of dx
            "saved_bytes": call.itemsize * tokens,
            "decode": 2 * call.B * call.d**2,
            "trained": call.d**2,
        }
        return SourceCost(items=call.B, **{name: size + second[name] for name, size in own.items()})


class Dense(_Hidden):
    r"""The dense Synthesizer: $\mathrm{ReLU}(x W_1) W_2$, one logit a position (Tay et al. 2021, section 3).

    `weight_1` (d, d) gives each head K = d/H hidden units, `weight_2` (H, max_length, K) is the heads' own: d^2 + d N
    parameters, as the paper's table has it. No biases.
    """

    name = "dense"

    def _make(self, options: dict[str, Any]) -> None:
        super()._make(options)
        self.weight_2 = self._second(self.max_length, options)

    def logits(self, x: Float[Tensor, "B N d"], seen: Seen, share: Tensor | None = None) -> Float[Tensor, "B H N M"]:
        return product(shared(self.hidden(x), share), self.weight_2[:, : seen.keys])

    @classmethod
    def cost(cls, call: Call) -> SourceCost:
        tokens = call.B * call.N * call.d
        return cls._cost(
            call,
            forward=2 * tokens * call.N,
            backward=4 * tokens * call.N,
            elementwise_forward=call.shared * tokens,
            elementwise_backward=3 * call.shared * tokens,
            saved_bytes=call.itemsize * call.shared * tokens,
            decode=2 * call.B * call.d * call.N,
            trained=call.d * call.max_length,
        )


def _block_count(max_length: Size, k1: Size | None) -> Size:
    """k1, by default the divisor of `max_length` that is next to its root from below; symbols pass."""
    if hasattr(max_length, "free_symbols"):
        if k1 is None:
            raise ValueError(f"k1: expected a size beside the symbol {max_length} for max_length, got None")
        return k1
    _checks.positive_int("max_length", max_length)
    if k1 is None:
        return next(k for k in range(isqrt(max_length), 0, -1) if max_length % k == 0)
    if max_length % _checks.positive_int("k1", k1):
        raise ValueError(f"k1: expected a divisor of max_length = {max_length}, got {k1}")
    return k1


class FactoredDense(_Hidden):
    r"""The factorised dense Synthesizer: logit j is $A_{\lfloor j / k_2 \rfloor} B_{j \bmod k_2}$.

    A (k1 numbers) and B (k2), with k1 k2 = max_length, are the query's: the hidden units of `Dense` times `weight_a`
    (H, k1, K) and `weight_b` (H, k2, K). Number by number A is repeated, and B as a whole: if both were repeated as a
    whole, which the paper's words allow, they would give but lcm(k1, k2) different logits. Of A only as many numbers
    are computed as a call has blocks of k2 keys.

    `k1` is by default the divisor of max_length that is next to its root from below; TypeError or ValueError if it
    is none, besides `LogitSource`'s errors.
    """

    name = "factored-dense"

    @checked
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
    def cost(cls, call: Call) -> SourceCost:
        tokens, rows = call.B * call.N * call.d, call.B * call.N * call.H
        k1 = _block_count(call.max_length, call.k1)
        k2 = call.max_length // k1 if isinstance(call.max_length, int) else call.max_length / k1
        a, b = k1, k2  # how many of the numbers a call computes
        if call.max_length != call.N:
            a, b = -(-call.N // k2), min(k2, call.N) if isinstance(call.N, int) else k2
        logits = rows * a * b
        return cls._cost(
            call,
            forward=2 * tokens * (a + b),
            backward=4 * tokens * (a + b),
            elementwise_forward=logits + call.shared * rows * a,
            # times the other factor, summed over it; the sum of the hidden units' gradients
            elementwise_backward=logits * (2 + (a != 1) + (b != 1)) + tokens + 3 * call.shared * rows * a,
            saved_bytes=call.itemsize * rows * ((1 + call.shared) * a + b),
            decode=2 * call.B * call.d * (a + b),
            trained=call.d * (k1 + k2),
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, k1={self.k1}"


class DotProduct(LogitSource):
    r"""The standard layer's $q_i^T k_j / \sqrt{K}$, to be mixed with others ("vanilla" in the paper).

    It has no use for positions; `max_length` is the layer's. The keys (B, H, P, K) of earlier tokens are its memory.
    """

    name = "dot-product"
    carries = ("keys",)

    def _make(self, options: dict[str, Any]) -> None:
        self.weight_q, self.weight_k = (new_weight(self.d_model, self.d_model, **options) for _ in range(2))

    def memory(self, x: Float[Tensor, "B N d"]) -> State:
        return (split_heads(linear(x, self.weight_k), self.num_heads),)

    def logits(self, x: Float[Tensor, "B N d"], seen: Seen, share: Tensor | None = None) -> Float[Tensor, "B H N M"]:
        q = split_heads(linear(x, self.weight_q), self.num_heads)
        return product(shared(q * q.shape[-1] ** -0.5, share), seen.memory[0])

    @classmethod
    def cost(cls, call: Call) -> SourceCost:
        tokens = call.B * call.N * call.d
        product, scores = 2 * tokens * call.d, 2 * tokens * call.N
        return SourceCost(
            items=call.B,
            forward=2 * product + scores,
            backward=2 * (1 + call.input_grad) * product + 2 * scores,
            elementwise_forward=(1 + call.shared) * tokens,  # the scale
            elementwise_backward=(1 + 3 * call.shared + 2 * call.input_grad) * tokens,
            saved_bytes=call.itemsize * (2 + call.shared) * tokens,
            decode=4 * call.B * call.d**2 + 2 * call.B * call.d * call.N,
            state_bytes=call.itemsize * tokens,
            trained=2 * call.d**2,
        )
