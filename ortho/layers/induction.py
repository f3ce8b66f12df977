r"""Induction heads without training: they find where the present token stood before, and read what followed.

One frozen projection makes queries and keys; the keys come one token late. With $\hat x_t = \sqrt d\, x_t / |x_t|$
and a random orthogonal R (K x d) for each head, drawn once,

$$u_t = \sqrt{c / n} \sum_{j=0}^{n-1} R_j\, \hat x_{t-j}.$$

The query is $q_t = u_t$, the key $k_s = u_{s-1}$. Scores are $q_t^T k_s / \sqrt K$. If the n tokens before s equal the
n tokens up to t, the score is about $c \sqrt K$, and the value at s is what came next. For independent tokens the score
is about c times a standard normal number (Johnson and Lindenstrauss). If their projections are drawn independently, as
in orthogonal random attention, q and k have $E[q^T k] = 0$ for every pair.

Beside M tokens that do not match, the one that does gets a weight of about
$1 / (1 + M e^{c^2 / 2 - c \sqrt K})$, which grows as c nears $\sqrt K$: a head finds it where $K > 2 \ln M$. But tokens
of a text are not independent. From c = 4 on, near matches matter more than the noise, and a larger c only gives near
matches less weight: by default c is $\sqrt K$, but at most 4.

A softmax reads something even where nothing matches. A *sink* adds one more score to each row, a share of $c \sqrt K$,
for a key whose value is 0: then the head reads nothing where all scores are well below the sink's. This needs room
between a match and the largest of M scores of standard deviation c, about $c \sqrt{2 \ln M}$, and so keys that are
wider than values.
"""

from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ortho import checks
from ortho._typing import Bool, Float, State
from ortho.attention.cache import KeyValueCache
from ortho.attention.call import upcast
from ortho.attention.softmax.frozen_qk import (
    frozen_qk_attention,
    frozen_qk_attention_reference,
    recomputed_attention,
)
from ortho.heads import frozen, split_heads, token_mask
from ortho.layers.heads import Heads, alone
from ortho.orthogonal import haar
from ortho.projections.projection import Projection

SHARPEST = 4.0  # the largest default c
SINK = 0.9  # for heads that read nothing where nothing matches
SELECTIVE_WIDTH = 64  # of the keys of such heads


def default_sharpness(K: int) -> float:
    """The default c for heads of width K: the square root of K, but at most 4."""
    return min(sqrt(K), SHARPEST)


def default_key_dim(d: int, V: int, sink: float | None) -> int:
    """The default width of keys for values of width V in a layer of width d: V, but max(V, min(d, 64)) with a sink."""
    return V if sink is None else max(V, min(d, SELECTIVE_WIDTH))


class InductionProjection(Projection):
    """x (B, N, d) -> q and k (B, H, N, K) by the module's formulas, without gradients.

    `head_dim` is K, by default d/H, `tokens` is n, the number of last tokens that are compared, and `sharpness` c.
    Heads are drawn in groups, as many as fit into d, and the rows of a group are orthogonal.

    The first token has no predecessor: its key is 0, so its score is the mean score of tokens that do not match. Where
    several tokens are compared, those before the sequence count as 0, too. So does a token that is not there.

    Raises TypeError or ValueError, naming the argument, for sizes below 1, and for a sharpness that is not positive.
    """

    frozen = True
    stop_gradient = True
    own_tokens = False
    bias_q = bias_k = None

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        tokens: int = 1,
        sharpness: float | int | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(d_model, num_heads, head_dim=head_dim)
        self.tokens = checks.positive_int("tokens", tokens)
        self.sharpness = default_sharpness(self.head_dim) if sharpness is None else float(sharpness)
        checks.expect(self.sharpness > 0, "sharpness", "a number above 0", sharpness)
        kind: dict[str, Any] = {"dtype": dtype or torch.get_default_dtype(), "device": device}
        drawn = [self._draw(generator, **kind) for _ in range(tokens)]
        self.weight = frozen(torch.stack(drawn))  # (n, H K, d)

    def _draw(self, generator: torch.Generator | None, **kind: Any) -> Float[Tensor, "q d"]:
        """Rows of unit length for all heads, in groups of heads that fit into d, each with orthogonal rows."""
        d, K = self.d_model, self.head_dim
        some = max(1, d // K) * K
        rows = [min(some, self.q_width - first) for first in range(0, self.q_width, some)]
        return torch.cat([haar(n, d, generator=generator, **kind) * sqrt(max(n, d) / d) for n in rows])

    def forward(
        self, x: Float[Tensor, "B N d"], context: Float[Tensor, "B M d"] | None = None
    ) -> tuple[Float[Tensor, "B H N K"], Float[Tensor, "B H N K"]]:
        """x (B, N, d) -> q, k (B, H, N, K), for a sequence that begins with x. Raises ValueError for a context: a key
        is made from the token before, in the same sequence."""
        if context is not None:
            raise ValueError(f"context: expected None with keys a token late, got {checks.describe(context)}")
        q, k, _ = self.step(x)
        return q, k

    @torch.no_grad()
    def step(
        self, x: Float[Tensor, "B N d"], token_mask: Bool[Tensor, "b N"] | None = None, before: State | None = None
    ) -> tuple[Float[Tensor, "B H N K"], Float[Tensor, "B H N K"], tuple[Tensor, Tensor]]:
        """q and k of further tokens, and what later tokens need: the next key (B, H, 1, K), and the last n - 1
        normalised tokens (B, n - 1, d). Tokens that `token_mask` leaves out count as zeros."""
        n, (B, N, d) = self.tokens, x.shape
        x = self._normalised(x.detach())  # without gradients in forward mode, too
        if token_mask is not None:
            x = x * token_mask[..., None]
        earlier = x.new_zeros(B, n - 1, d)
        if before is not None:
            earlier = checks.carried("tokens", before[1], earlier.shape, x)
        line = torch.cat([earlier, x], 1) if n > 1 else x
        u = self._projected(line[:, n - 1 :], 0)
        for j in range(1, n):
            u = u + self._projected(line[:, n - 1 - j : n - 1 - j + N], j)
        first = u.new_zeros(B, self.num_heads, 1, self.head_dim)
        if before is not None:
            first = checks.carried("key", before[0], first.shape, u)
        k = torch.cat([first, u[:, :, :-1]], 2)
        return u, k, (u[:, :, -1:].clone(), line[:, N:].clone())

    def _normalised(self, x: Tensor) -> Tensor:
        """Each token scaled to the length sqrt(d c / n), computed in float32 at least.

        A token whose mean square is near the dtype's smallest number becomes shorter. ValueError, on the CPU, if a mean
        square exceeds the dtype's range.
        """
        wide = upcast(x)
        mean_square = wide.square().mean(-1, keepdim=True)
        checks.within("x", "mean squares of tokens", mean_square, 0, torch.finfo(wide.dtype).max)
        mean_square = mean_square + torch.finfo(wide.dtype).tiny  # no division by 0
        return (wide * (mean_square.rsqrt() * sqrt(self.sharpness / self.tokens))).to(x.dtype)

    def _projected(self, x: Float[Tensor, "B N d"], j: int) -> Float[Tensor, "B H N K"]:
        """R_j x."""
        return split_heads(linear(x, self.weight[j]), self.num_heads)

    @property
    def weight_q(self) -> Float[Tensor, "q d"]:  # type: ignore[override]
        """R_0 of all heads, the matrix of queries and keys if one token is compared."""
        return self.weight[0]

    @property
    def weight_k(self) -> Float[Tensor, "q d"]:  # type: ignore[override]
        """The same as `weight_q`."""
        return self.weight_q

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, tokens={self.tokens}, sharpness={self.sharpness:g}"


class InductionHeads(Heads):
    """Softmax attention with one frozen projection for queries and keys, where each key is made from the token before.

    `InductionProjection` makes q and k, of width `key_dim`, and explains `tokens` and `sharpness`. q and k are
    constants: only the values have a gradient (`softmax.frozen_qk`), for which q and k are computed again. `sink`
    is the sink's score as a share of a match's, None for no sink. `key_dim` is at least the width V of the values
    (`Heads`' `head_dim`) and by default V, with a sink max(V, min(d, 64)). The reference form materialises the weights.

    In a `LanguageModel` with `max_length=None`, untrained heads of 16 numbers give the right one of 40 tokens a weight
    of about .97; beside embeddings of places, which make tokens differ, of less than half.

    Padding, and a token that a mask of keys leaves out, are not used as predecessors; a mask of pairs leaves out no
    token.

    Source: Olsson et al. 2022, arXiv:2209.11895, on heads that copy what follows a match.

    Raises TypeError or ValueError, naming the argument, for what `InductionProjection` refuses, for keys narrower than
    values, and for a sink outside (0, 1).
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        key_dim: int | None = None,
        tokens: int = 1,
        sharpness: float | int | None = None,
        sink: float | None = None,
        form: str = "fast",
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(d_model, num_heads, head_dim=head_dim)
        kind: dict[str, Any] = {"generator": generator, "dtype": dtype, "device": device}
        own: dict[str, Any] = {"tokens": tokens, "sharpness": sharpness}
        if key_dim is not None:
            checks.positive_int("key_dim", key_dim)
        self.key_dim = default_key_dim(d_model, self.head_dim, sink) if key_dim is None else key_dim
        wanted = f"at least the values' width {self.head_dim}"
        checks.expect(self.key_dim >= self.head_dim, "key_dim", wanted, key_dim)
        checks.expect(sink is None or 0 < sink < 1, "sink", "a number in (0, 1)", sink)
        self.projection = InductionProjection(d_model, num_heads, head_dim=self.key_dim, **own, **kind)
        self.form, self.sink = form, sink
        self._make_maps(**kind)

    def forward(
        self,
        x: Float[Tensor, "B N d"],
        *,
        attn_mask: Bool[Tensor, "..."] | None = None,
        key_padding_mask: Bool[Tensor, "B M"] | None = None,
        is_causal: bool = False,
        cache: KeyValueCache | None = None,
    ) -> Float[Tensor, "B N d"]:
        """x (B, N, d) -> (B, N, d); the arguments are those of `MultiheadAttention.forward`."""
        checks.sequence("x", x, self.d_model)
        if cache is not None:
            alone(is_causal, attn_mask=attn_mask, key_padding_mask=key_padding_mask)
            return self._decoded(x, cache)
        N = x.shape[1]
        call: dict[str, Any] = {"is_causal": is_causal}
        call["attn_mask"] = checks.layer_mask(attn_mask, key_padding_mask, len(x), self.num_heads, N, N)
        tokens = token_mask(attn_mask, key_padding_mask, N)
        if self.form == "fast":
            seen = x if tokens is None else x.detach() * tokens[..., None]
            made = recomputed_attention(seen, self._values(x), self.projection, sink=self._sink_score, **call)
            return self._merge(made)
        q, k, _ = self.projection.step(x, tokens)
        return self._merge(self._function(q, k, self._values(x), **call))

    def new_cache(self, capacity: int | None = None) -> KeyValueCache:
        """An empty cache for decoding with this layer, with room for `capacity` tokens: keys, values, the next key."""
        checks.expect(capacity is not None, "capacity", "a number of tokens, as all keys are kept", capacity)
        return KeyValueCache(InductionHeads, capacity)

    @property
    def _sink_score(self) -> float | None:
        return None if self.sink is None else self.sink * self.projection.sharpness * sqrt(self.key_dim)

    def _function(self, *qkv: Tensor, **call: Any) -> Any:
        """Attention by the layer's form and sink."""
        attend = frozen_qk_attention if self.form == "fast" else frozen_qk_attention_reference
        return attend(*qkv, sink=self._sink_score, **call)

    @torch.no_grad()
    def _decoded(self, x: Tensor, cache: KeyValueCache) -> Tensor:
        cache.fits("InductionHeads")
        q, k, after = self.projection.step(x, None, cache.beside or None)
        o = self._merge(cache.attend(q, k, self._values(x), function=self._function))
        cache.beside = after
        return o

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, sink={self.sink}, form={self.form!r}"
