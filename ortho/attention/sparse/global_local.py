"""A window and global tokens (Longformer; Beltagy et al. 2020, arXiv:2004.05150, section 3.1)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ortho._checks import checked
from ortho.attention.sparse.pattern import Pattern, both_ways, pattern_mechanism
from ortho.attention.sparse.tiling import TILE, Tiling, band, causal
from ortho.attention.sparse.window import Window


@checked
@dataclass(frozen=True)
class GlobalLocal(Pattern):
    """The keys less than `width` positions away, and the pairs with one of the first `tokens`, which are global.

    Global tokens attend to all tokens, and all to them. Of that a causal call leaves the latter alone: the first tokens
    see none but each other, and can collect nothing of the sequence. The paper projects global tokens by weights of
    their own; here they share those of the others.
    """

    width: int
    tokens: int

    def allowed(self, i: Tensor, j: Tensor) -> Tensor:
        return ((i - j).abs() < self.width) | (i < self.tokens) | (j < self.tokens)

    def remembered(self) -> tuple[int, int]:
        return self.tokens, self.width

    def pairs(self, n: int, *, is_causal: bool = False) -> int:
        beyond = max(0, n - self.width)  # tokens that have the first one outside their window
        some = min(self.tokens, beyond)  # global tokens that are outside anyone's
        far = some * beyond - some * (some - 1) // 2
        return both_ways(Window(self.width).pairs(n, is_causal=True) + far, n, is_causal)

    def tilings(self, first: int, stop: int, keys: int, *, is_causal: bool, device: torch.device) -> tuple[Tiling, ...]:
        reach, border = min(self.width, max(stop, keys)) - 1, min(self.tokens, keys)

        def last(i: Tensor) -> Tensor:
            return i if is_causal else torch.full_like(i, keys)

        tilings = []
        if not is_causal and first < self.tokens:  # global queries
            rows = first, min(stop, self.tokens)
            tilings.append(
                band(rows, (0, keys), torch.zeros_like, last, None, tile=min(TILE, self.tokens), device=device)
            )
        others = first if is_causal else max(first, self.tokens), stop
        if others[0] < stop:  # global keys
            rule = causal if is_causal else None
            tilings.append(band(others, (0, border), torch.zeros_like, last, rule, device=device))
        near = max(first, self.tokens), stop
        if near[0] < stop and self.tokens < keys:
            window = Window(self.width)
            tilings.append(
                band(
                    near,
                    (self.tokens, keys),
                    lambda i: i - reach,
                    lambda i: i if is_causal else i + reach,
                    window.rule(is_causal),
                    relative=True,
                    device=device,
                )
            )
        return tuple(tilings)


MECHANISMS = (pattern_mechanism("global-local", GlobalLocal(256, 16), "Beltagy et al. 2020, arXiv:2004.05150"),)
