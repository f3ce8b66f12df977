"""A window and global tokens (Longformer; Beltagy et al. 2020, arXiv:2004.05150, section 3.1)."""

from dataclasses import dataclass

from torch import Tensor

from ortho.attention.sparse.block_mask import BLOCK, TILE, BlockMask, Section, band, consecutive
from ortho.attention.sparse.pattern import Pattern, pattern_mechanism


@dataclass(frozen=True)
class GlobalLocal(Pattern):
    """The keys less than `width` positions away, and the pairs with one of the first `tokens`, which are global.

    Global tokens attend to all tokens, and all tokens attend to them. A causal call keeps only the latter: the first
    tokens see only each other, so they cannot collect anything from the sequence. The paper gives global tokens
    projections of their own (`ortho.layers.longformer`); here they share those of the other tokens.
    """

    width: int = 256
    tokens: int = 16

    def allowed(self, i: Tensor, j: Tensor) -> Tensor:
        return ((i - j).abs() < self.width) | (i < self.tokens) | (j < self.tokens)

    def kv_window(self) -> tuple[int, int]:
        return self.tokens, self.width

    def block_masks(self, section: Section) -> tuple[BlockMask, ...]:
        first, stop, keys, is_causal, _ = section
        reach, later = min(self.width, max(stop, keys)) - 1, max(first, self.tokens)

        found = []
        if not is_causal and first < self.tokens:  # global queries
            rows = section._replace(stop=min(stop, self.tokens))
            found.append(band(rows, None, None, None, tile=min(TILE, self.tokens)))
        others = section._replace(first=first if is_causal else later)
        if others.first < stop:  # global keys
            found.append(band(others, None, None, None, keys=(0, min(self.tokens, keys))))
        if later < stop and self.tokens < keys:
            near, between = section._replace(first=later), (self.tokens, keys)

            def close(i: Tensor, j: Tensor) -> Tensor:
                return (i - j).abs() < self.width

            found.append(band(near, lambda i: i - reach, lambda i: i + reach, close, keys=between))
        return tuple(found)


@dataclass(frozen=True)
class GlobalKeys(GlobalLocal):
    """`GlobalLocal` without the rows of its global tokens: they attend to nothing, and the caller computes them."""

    def allowed(self, i: Tensor, j: Tensor) -> Tensor:
        return super().allowed(i, j) & (i >= self.tokens)

    def block_masks(self, section: Section) -> tuple[BlockMask, ...]:
        others = super().block_masks(section._replace(first=max(section.first, self.tokens)))
        if others:
            return others
        # All queries are global: one block mask in which they read nothing.
        queries = consecutive(section.first, section.stop, TILE, section.device)
        keys = consecutive(0, section.keys, BLOCK, section.device)
        return (BlockMask(queries, keys, keys.new_empty(len(queries), 0)),)


MECHANISMS = (pattern_mechanism("global-local", GlobalLocal, "Beltagy et al. 2020, arXiv:2004.05150"),)
global_local_attention = MECHANISMS[0].fast
