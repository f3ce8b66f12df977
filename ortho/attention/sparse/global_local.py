"""A window and global tokens (Longformer; Beltagy et al. 2020, arXiv:2004.05150, section 3.1)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ortho._checks import checked
from ortho.attention.sparse.pattern import Pattern, pattern_mechanism
from ortho.attention.sparse.tiling import BLOCK, TILE, Section, Tiling, band, consecutive
from ortho.attention.sparse.window import Window


@checked
@dataclass(frozen=True)
class GlobalLocal(Pattern):
    """The keys less than `width` positions away, and the pairs with one of the first `tokens`, which are global.

    Global tokens attend to all tokens, and all tokens attend to them. A causal call keeps only the latter: the first
    tokens see only each other, so they cannot collect anything from the sequence. The paper gives global tokens
    projections of their own (`ortho.layers.longformer`); here they share those of the other tokens.
    """

    width: int
    tokens: int

    def allowed(self, i: Tensor, j: Tensor) -> Tensor:
        return ((i - j).abs() < self.width) | (i < self.tokens) | (j < self.tokens)

    def remembered(self) -> tuple[int, int]:
        return self.tokens, self.width

    def causal_pairs(self, n: int) -> int:
        beyond = max(0, n - self.width)  # tokens whose window does not reach the first token
        some = min(self.tokens, beyond)  # global tokens outside some token's window
        return Window(self.width).causal_pairs(n) + some * beyond - some * (some - 1) // 2

    def tilings(self, section: Section) -> tuple[Tiling, ...]:
        first, stop, keys, is_causal, _ = section
        reach, later = min(self.width, max(stop, keys)) - 1, max(first, self.tokens)

        def last(i: Tensor) -> Tensor:
            return torch.full_like(i, keys)

        tilings = []
        if not is_causal and first < self.tokens:  # global queries
            rows = section._replace(stop=min(stop, self.tokens))
            tilings.append(band(rows, torch.zeros_like, last, None, tile=min(TILE, self.tokens)))
        others = section._replace(first=first if is_causal else later)
        if others.first < stop:  # global keys
            tilings.append(band(others, torch.zeros_like, last, None, keys=(0, min(self.tokens, keys))))
        if later < stop and self.tokens < keys:
            near, rule = section._replace(first=later), Window(self.width).allowed
            between = (self.tokens, keys)
            tilings.append(band(near, lambda i: i - reach, lambda i: i + reach, rule, keys=between, relative=True))
        return tuple(tilings)


@checked
@dataclass(frozen=True)
class GlobalKeys(GlobalLocal):
    """`GlobalLocal` without the rows of its global tokens: they attend to nothing, and the caller computes them."""

    def allowed(self, i: Tensor, j: Tensor) -> Tensor:
        return super().allowed(i, j) & (i >= self.tokens)

    @checked(shapes=False)
    def pairs(self, n: int, *, is_causal: bool = False) -> int:
        rows = min(self.tokens, n)
        return super().pairs(n, is_causal=is_causal) - (rows * (rows + 1) // 2 if is_causal else rows * n)

    def tilings(self, section: Section) -> tuple[Tiling, ...]:
        others = super().tilings(section._replace(first=max(section.first, self.tokens)))
        if others:
            return others
        # All queries are global: one tiling in which they read nothing.
        queries = consecutive(section.first, section.stop, TILE, section.device)
        keys = consecutive(0, section.keys, BLOCK, section.device)
        return (Tiling(queries, keys, keys.positions.new_empty(len(queries.positions), 0)),)


MECHANISMS = (pattern_mechanism("global-local", GlobalLocal(256, 16), "Beltagy et al. 2020, arXiv:2004.05150"),)
