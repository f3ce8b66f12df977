r"""Synthesizers: attention whose weights need no products of queries and keys (Tay et al. 2021, arXiv:2005.00743).

The layer is $Y = \mathrm{concat}_j\, \mathrm{softmax}(S_j)\, V_j\, W_O$ with logits S from any source. A source maps
tokens x (B, N, d) to logits (B, H, N, N) for the first N positions, or to (1, H, N, N) if it does not look at x.
Most logits are products of smaller factors. In a mixture $\sum_i \alpha_i S_i$ a source's weight $\alpha_i$ multiplies
such a factor, not the logits, which would have to be kept for the gradient of $\alpha_i$.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import reduce
from math import isqrt
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ortho import checks
from ortho._typing import Bool, Float, Size
from ortho.attention.call import blocked_pairs, no_autocast
from ortho.attention.scores import masked_softmax
from ortho.heads import new_weight, split_heads
from ortho.layers.heads import Heads


class LogitSource(nn.Module, ABC):
    """One source of logits, for sequences of at most `max_length` tokens.

    A subclass draws its parameters in `_make`, such that the logits of independent standard normal tokens have a
    variance of 1 or little more. `by_token` says whether logits depend on the tokens, not on positions alone.
    """

    name: ClassVar[str]
    by_token: ClassVar[bool] = True

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

    @abstractmethod
    def logits(self, x: Float[Tensor, "B N d"], share: Tensor | None = None) -> Float[Tensor, "b H N N"]:
        """The logits of x, times `share`."""

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

    def logits(self, x: Float[Tensor, "B N d"], share: Tensor | None = None) -> Float[Tensor, "1 H N N"]:
        return shared(self.matrix[None, :, : x.shape[1], : x.shape[1]], share)


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

    def logits(self, x: Float[Tensor, "B N d"], share: Tensor | None = None) -> Float[Tensor, "1 H N N"]:
        left, right = (factor[:, : x.shape[1]] for factor in (self.left, self.right))
        return product(shared(left[None], share), right)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.rank}"


class Hidden(LogitSource):
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


class Dense(Hidden):
    r"""The dense Synthesizer: $\mathrm{ReLU}(x W_1) W_2$, one logit a position (Tay et al. 2021, section 3).

    `weight_1` (d, d) gives each head K = d/H hidden units; `weight_2` (H, max_length, K) is separate for each head.
    There are d^2 + d N parameters, as in the paper's table, and no biases.
    """

    name = "dense"

    def _make(self, options: dict[str, Any]) -> None:
        super()._make(options)
        self.weight_2 = self._second(self.max_length, options)

    def logits(self, x: Float[Tensor, "B N d"], share: Tensor | None = None) -> Float[Tensor, "B H N N"]:
        return product(shared(self.hidden(x), share), self.weight_2[:, : x.shape[1]])


def block_count(max_length: Size, k1: Size | None) -> Size:
    """k1, by default the largest divisor of `max_length` up to its square root; symbols pass."""
    if hasattr(max_length, "free_symbols"):
        checks.expect(k1 is not None, "k1", f"a size beside the symbol {max_length} for max_length", "None")
        return k1
    if k1 is None:
        return next(k for k in range(isqrt(max_length), 0, -1) if max_length % k == 0)
    checks.expect(not max_length % k1, "k1", f"a divisor of max_length = {max_length}", k1)
    return k1


class FactoredDense(Hidden):
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
        self.k1 = block_count(max_length, k1)
        self.k2 = max_length // self.k1
        super().__init__(d_model, num_heads, max_length, **options)

    def _make(self, options: dict[str, Any]) -> None:
        super()._make(options)
        self.weight_a, self.weight_b = self._second(self.k1, options), self._second(self.k2, options)

    def logits(self, x: Float[Tensor, "B N d"], share: Tensor | None = None) -> Float[Tensor, "B H N N"]:
        hidden, N = self.hidden(x), x.shape[1]
        a = shared(product(hidden, self.weight_a[:, : -(-N // self.k2)]), share)  # (B, H, N, blocks)
        b = product(hidden, self.weight_b[:, :N])  # (B, H, N, k2), fewer for fewer keys
        return (a[..., None] * b[..., None, :]).flatten(-2)[..., :N]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, k1={self.k1}"


class DotProduct(LogitSource):
    r"""The standard layer's $q_i^T k_j / \sqrt{K}$, to be mixed with others ("vanilla" in the paper).

    It has no use for positions; `max_length` is the layer's.
    """

    name = "dot-product"

    def _make(self, options: dict[str, Any]) -> None:
        self.weight_q, self.weight_k = (new_weight(self.d_model, self.d_model, **options) for _ in range(2))

    def logits(self, x: Float[Tensor, "B N d"], share: Tensor | None = None) -> Float[Tensor, "B H N N"]:
        q, k = (split_heads(linear(x, weight), self.num_heads) for weight in (self.weight_q, self.weight_k))
        return product(shared(q * q.shape[-1] ** -0.5, share), k)


# Each takes (d_model, num_heads, max_length, *, generator, dtype, device), and its own options.
SOURCES: dict[str, type[LogitSource]] = {
    source.name: source for source in (Random, FixedRandom, FactoredRandom, Dense, FactoredDense, DotProduct)
}


class SynthesizerAttention(Heads):
    r"""Multi-head Synthesizer for sequences of at most `max_length` tokens, without biases.

    `source` is where the logits come from: a name of `SOURCES`, a `LogitSource` of these sizes, or several of either.
    A shorter sequence uses the first positions. `Heads` has W_V and W_O.

    Several sources are mixed, $\sum_i \alpha_i S_i$, with a trained share for each; the shares sum to 1 (Tay et al.
    2021, section 3). They are the softmax of `mixing`, the same for all heads and equal at first; for two sources this
    is the sigmoid of the authors' code.

    With `head_dim` (`Heads`) sources must depend on positions alone ("random", "fixed-random", "factored-random"); a
    source module has H K as its d_model.

    Raises TypeError or ValueError, naming the argument, for sizes below 1, for d_model not divisible by num_heads, for
    unknown sources or sources of other sizes, and for a source that looks at the tokens if `head_dim` is given.
    """

    sources: Any  # a list of LogitSource

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        max_length: int,
        *,
        source: str | LogitSource | Sequence[str | LogitSource] = "random",
        head_dim: int | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(d_model, num_heads, head_dim=head_dim)
        self.max_length = checks.positive_int("max_length", max_length)
        options: dict[str, Any] = {"generator": generator, "dtype": dtype, "device": device}
        given = [source] if isinstance(source, str | LogitSource) else source
        checks.expect(given, "source", "at least one", "none")
        self.sources = nn.ModuleList(self._source(one, options) for one in given)
        mixed = len(self.sources) > 1
        self.mixing = nn.Parameter(torch.zeros(len(self.sources), dtype=dtype, device=device)) if mixed else None
        if head_dim is not None:
            by_position(type(one) for one in self.sources)
        self._make_maps(**options)

    def _source(self, source: str | LogitSource, options: dict[str, Any]) -> LogitSource:
        """The source of that name, or the given one if it has the layer's sizes."""
        sizes = (self.num_heads * self.head_dim, self.num_heads, self.max_length)
        if not isinstance(source, LogitSource):
            return SOURCES[checks.one_of("source", source, SOURCES)](*sizes, **options)
        got = (source.d_model, source.num_heads, source.max_length)
        checks.expect(got == sizes, "source", f"(d_model, num_heads, max_length) = {sizes}", f"{got} ({source.name})")
        return source

    def forward(
        self,
        x: Float[Tensor, "B N d"],
        *,
        attn_mask: Bool[Tensor, "..."] | None = None,
        key_padding_mask: Bool[Tensor, "B M"] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "B N d"]:
        """x (B, N, d) -> (B, N, d).

        `attn_mask` broadcasts to (B, H, N, N), True = may attend, and `key_padding_mask` is (B, N), True = padding; a
        row with nothing to attend to gives zeros. Raises TypeError or ValueError for arguments that do not fit, and for
        more than `max_length` tokens.
        """
        checks.sequence("x", x, self.d_model)
        attn_mask = checks.layer_mask(attn_mask, key_padding_mask, len(x), self.num_heads, x.shape[1], x.shape[1])
        weights, v = self.weights(x, attn_mask=attn_mask, is_causal=is_causal), self._values(x)
        with no_autocast(x):
            o = self._read(weights, v.to(weights.dtype))
        return linear(o.to(v.dtype), self.weight_o)

    @staticmethod
    def _read(weights: Float[Tensor, "b H N M"], v: Float[Tensor, "B H M K"]) -> Float[Tensor, "B N d"]:
        """The heads' outputs side by side."""
        if len(weights) == 1:  # one matrix a head for the batch, whose items are columns of one product
            columns = v.permute(1, 2, 0, 3)  # (H, M, B, K)
            o = (weights[0] @ columns.flatten(2)).unflatten(2, columns.shape[2:]).permute(2, 1, 0, 3)  # (B, N, H, K)
        else:
            o = (weights @ v).transpose(1, 2)
        return o.flatten(2)

    def weights(
        self, x: Float[Tensor, "B N d"], *, attn_mask: Bool[Tensor, "..."] | None = None, is_causal: bool = False
    ) -> Float[Tensor, "b H N N"]:
        """The attention weights (B, H, N, N), in float32 at least; (1, H, N, N) if they are the same for all items of
        the batch."""
        checks.sequence("x", x, self.d_model)
        N = x.shape[1]
        checks.expect(self.max_length >= N, "x", f"at most {self.max_length} tokens", N)
        if attn_mask is not None:
            checks.mask(attn_mask, (len(x), self.num_heads, N, N))
        blocked = blocked_pairs(N, N, is_causal, attn_mask, x.device)
        shares = [None] if self.mixing is None else self.mixing.softmax(0)
        parts = (source.logits(x, share) for source, share in zip(self.sources, shares, strict=True))
        logits = reduce(torch.add, parts)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return masked_softmax(logits, blocked, empty_rows=attn_mask is not None)

    def extra_repr(self) -> str:
        width = "" if self.num_heads * self.head_dim == self.d_model else f", head_dim={self.head_dim}"
        return f"d_model={self.d_model}, num_heads={self.num_heads}, max_length={self.max_length}{width}"


def by_position(sources: Iterable[type[LogitSource]]) -> None:
    """Raise ValueError for a source that looks at the tokens: it splits its results into heads of width d/H."""
    for source in sources:
        checks.expect(not source.by_token, "source", "sources by position beside head_dim", repr(source.name))
