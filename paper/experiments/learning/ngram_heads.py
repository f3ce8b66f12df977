r"""N-gram heads: what an induction head does, wired to the tokens themselves (Akyürek et al. 2024, arXiv:2401.12973).

A head of length n reads what followed the last n tokens wherever they stood before. Token t attends to all

$$S_t = \{s \le t : x_{s-n}, \ldots, x_{s-1} = x_{t-n+1}, \ldots, x_t\}$$

equally, and to nothing if this set is empty. There are no queries, keys or scores: matches are exact, and of the tokens
themselves rather than of what a layer makes of them. W_V and W_O are trained.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ortho._cost import Cost, linear_map, product
from ortho.cost.layers import NOT_DERIVED
from ortho.layers.heads import Heads
from ortho.models.language_model import LanguageModel

LENGTHS = (2, 4)  # n of the first heads; further heads begin again with the first n


def matches_reference(tokens: Tensor, n: int) -> Tensor:
    """Which s each t attends to, (B, N) -> (B, N, N), directly by the formula: all windows are compared with all."""
    B, N = tokens.shape
    found = torch.zeros(B, N, N, dtype=torch.bool, device=tokens.device)
    if n < N:
        windows = tokens.unfold(1, n, 1)  # (B, N - n + 1, n), the i-th ends in the token i + n - 1
        found[:, n - 1 :, n:] = (windows[:, :, None] == windows[:, None, :-1]).all(-1)
    return found.tril()


def matches(tokens: Tensor, n: int) -> Tensor:
    """`matches_reference` token by token: windows match if they end in the same token and their beginnings match."""
    found = torch.zeros(*tokens.shape, tokens.shape[1], dtype=torch.bool, device=tokens.device)
    found[:, :, 1:] = tokens[:, :, None] == tokens[:, None, :-1]
    last = found
    for j in range(1, n):
        earlier = torch.zeros_like(found)
        earlier[:, j:, j:] = last[:, :-j, :-j]
        found = found & earlier
    return found.tril()


class NgramHeads(Heads):
    """N-gram heads of the lengths above: x (B, N, d) -> (B, N, d), only in causal calls; `read` gives them tokens."""

    weights: Tensor | None = None  # (B, H, N, N)

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        head_dim: int,
        form: str = "fast",
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(d_model, num_heads, head_dim=head_dim)
        self.form = form
        self.lengths = [LENGTHS[i % len(LENGTHS)] for i in range(num_heads)]
        self._make_maps(generator=generator, dtype=dtype, device=device)

    def read(self, tokens: Tensor) -> None:
        """Look for matches among tokens (B, N), for the next call."""
        found = matches if self.form == "fast" else matches_reference
        places = torch.stack([found(tokens, n) for n in self.lengths], 1).to(self.weight_v.dtype)
        self.weights = places / places.sum(-1, keepdim=True).clamp(min=1)

    def forward(self, x: Tensor, *, is_causal: bool = False, **others: Any) -> Tensor:
        """x (B, N, d) -> (B, N, d). ValueError for a call that is not causal, or with masks, states or caches."""
        if not is_causal or any(value is not None and value is not False for value in others.values()):
            raise ValueError("is_causal: expected True, without mask, state or cache; n-gram heads are for training")
        if self.weights is None or self.weights.shape[::2] != x.shape[:2]:
            raise ValueError("x: expected the tokens that `read` was given last")
        return self._merge(self.weights @ self._values(x))


class NgramModel(LanguageModel):
    """A language model whose n-gram heads see its tokens."""

    def _embed(self, tokens: Tensor, past: int, padding: Tensor | None = None) -> Tensor:
        for part in self.modules():
            if isinstance(part, NgramHeads):
                part.read(tokens)
        return super()._embed(tokens, past, padding)


def ngram_heads(B: int, N: int, d: int, H: int, *, head_dim: int, **kwargs: Any) -> Cost:
    """FLOPs and parameters of `NgramHeads(d, H)`: its maps, and the weights, which need no gradient, times the values.
    The other figures are not derived."""
    passes = {name: kwargs[name] for name in ("input_grad", "itemsize") if name in kwargs}
    width = H * head_dim
    maps = linear_map(B, N, d, width, **passes) + linear_map(B, N, width, d)
    return replace(maps + product(B * H * N * N * head_dim, gradients=1), **NOT_DERIVED)
