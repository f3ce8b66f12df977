"""The language model: reading, decoding, generating."""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from ortho import checks
from ortho._typing import Bool, Float, Int
from ortho.attention.cache import Cache
from ortho.layers.block import TransformerBlock, stack
from ortho.layers.checkpointed import Checkpointed
from ortho.models.embeddings import (
    add_positions,
    check_length,
    check_token,
    mask_of_tokens,
    new_embeddings,
    token_indices,
)
from ortho.models.generation import check_sampling, continued


class LanguageModel(nn.Module):
    """A causal language model: token and position embeddings, `num_layers` pre-norm blocks, a norm, a tied read-out.

    The architecture is GPT-2's (Radford et al. 2019), with the same parameters if `bias`, and with the exact GELU.
    `kwargs` go to every block (`projection`, `attention` and its options, `num_kv_heads`, ...); each draws its own
    frozen matrices, and a module among them is copied for each.
    Each of `max_length` places has a learned embedding or, with `positions` 'sinusoidal', a fixed one that is as large
    as the token embeddings are at first. With `max_length=None` there are no position embeddings: the attention has to
    provide the order, and any length is allowed. Induction heads want this: they compare whole tokens, and embeddings
    of places, as large as those of tokens, hide what matches. `dropout` applies to the embeddings and to every block.
    """

    embed_positions: Tensor | None

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        num_heads: int,
        num_layers: int,
        *,
        max_length: int | None,
        positions: str = "learned",
        dropout: float = 0.0,
        bias: bool = False,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.vocab_size, self.max_length = vocab_size, max_length
        kind: dict[str, Any] = {"bias": bias, "dtype": dtype, "device": device}
        make = partial(TransformerBlock, d_model, num_heads, dropout=dropout, generator=generator, **kind)
        self.blocks = stack(num_layers, make, **kwargs)
        self.norm = nn.LayerNorm(d_model, **kind)
        self.dropout = nn.Dropout(checks.probability("dropout", dropout))

        vectors: dict[str, Any] = {"generator": generator, "dtype": dtype, "device": device}
        self.embed_tokens = new_embeddings(vocab_size, d_model, **vectors)
        add_positions(self, "embed_positions", positions, max_length, d_model, **vectors)

    def forward(
        self,
        tokens: Int[Tensor, "B N"],
        *,
        caches: Sequence[Cache] | None = None,
        key_padding_mask: Bool[Tensor, "B M"] | None = None,
    ) -> Float[Tensor, "B N vocab"]:
        """Token indices (B, N) -> logits (B, N, vocab_size).

        With `caches` (`new_caches`), one for each block, the tokens follow those that the caches have read, without
        gradients.

        `key_padding_mask` (B, M) is True = padding, as in `torch.nn.MultiheadAttention`, and includes the tokens of the
        caches (they take one where a state sums up the keys). Nothing attends to padding. Position embeddings skip
        padding; an attention's own positions count it. The logits at padding have no meaning.

        Raises ValueError for sequences longer than `max_length`; for a padding mask of another shape; for caches that
        are not one for each block, or of different lengths (after a call that failed in a later block).
        """
        if caches is not None:
            return self._decoded(tokens, caches, key_padding_mask)
        x = self._embed(tokens, 0, key_padding_mask)  # (B, N, d)
        masks = {} if key_padding_mask is None else {"key_padding_mask": key_padding_mask}  # not every layer takes them
        for block in self.blocks:
            x = block(x, is_causal=True, **masks)
        return self._read_out(x)

    def new_caches(self, capacity: int | None = None) -> list[Cache]:
        """An empty cache for each block, with room for `capacity` tokens, by default `max_length`."""
        capacity = self.max_length if capacity is None else capacity
        layers = [block.attention for block in self._one_by_one()]
        for layer in layers:
            if not hasattr(layer, "new_cache"):
                name = type(layer).__name__
                raise TypeError(f"layer: expected one with `new_cache`, to decode token by token, got {name}")
        return [layer.new_cache(capacity) for layer in layers]

    def _one_by_one(self) -> list[TransformerBlock]:
        """The blocks, also those that are recomputed together."""
        groups = (block.blocks if isinstance(block, Checkpointed) else [block] for block in self.blocks)
        return [cast(TransformerBlock, block) for group in groups for block in group]

    @torch.no_grad()
    def generate(
        self,
        tokens: Int[Tensor, "B N"],
        count: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        stop: int | None = None,
        key_padding_mask: Bool[Tensor, "B N"] | None = None,
        generator: torch.Generator | None = None,
    ) -> Int[Tensor, "B N_and_more"]:
        """The tokens (B, N), and up to `count` more that the model draws one after the other.

        `temperature` and `top_k` are those of `ortho.models.generation.next_token`; temperature 0 takes the
        likeliest token. A row ends with the token `stop`, which also fills the places after it; drawing ends when all
        rows have. `key_padding_mask` (B, N) is True where a prompt is padded, on either side. Rows with equally many
        tokens are then continued together, the shortest first, from these tokens alone: the drawn tokens do not depend
        on the padding, and stand after column N in all rows.

        Raises TypeError or ValueError for a wrong `count`, temperature, `top_k` or `stop`, for a row without a
        token, and if more than `max_length` tokens would be read (the last one drawn is not).
        """
        check_sampling(temperature, top_k)
        checks.positive_int("count", count)
        token_indices("tokens", tokens)
        if stop is not None:
            check_token("stop", stop, self.vocab_size)
        how: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "generator": generator}
        if key_padding_mask is None:
            return torch.cat([tokens, self._continued(tokens, count, stop, how)], 1)
        mask_of_tokens("key_padding_mask", key_padding_mask, "tokens", tokens.shape)
        lengths = (~key_padding_mask).sum(1)
        checks.expect(lengths.all(), "key_padding_mask", "a token in each row", "one of padding alone")
        check_length("tokens", int(lengths.max()) + count - 1, 0, self.max_length)
        drawn = tokens.new_full((len(tokens), count), 0 if stop is None else stop)
        most = 0
        for length in lengths.unique():
            rows = (lengths == length).nonzero()[:, 0]
            prompts = tokens[rows][~key_padding_mask[rows]].view(len(rows), -1)
            found = self._continued(prompts, count, stop, how)
            drawn[rows, : found.shape[1]] = found
            most = max(most, found.shape[1])
        return torch.cat([tokens, drawn[:, :most]], 1)

    def _continued(self, tokens: Tensor, count: int, stop: int | None, how: dict[str, Any]) -> Int[Tensor, "B n"]:
        """The tokens drawn after prompts without padding: `count` columns, or fewer if all rows have ended."""
        check_length("tokens", tokens.shape[1] + count - 1, 0, self.max_length)  # the last one is not read
        caches = self.new_caches(tokens.shape[1] + count)
        return continued(partial(self, caches=caches), tokens, count, stop, **how)

    @torch.no_grad()
    def _decoded(self, tokens: Tensor, caches: Sequence[Cache], padding: Tensor | None) -> Tensor:
        blocks = self._one_by_one()
        if len(caches) != len(blocks):
            raise ValueError(f"caches: expected {len(blocks)}, one a block, got {len(caches)}")
        lengths = [cache.length for cache in caches]
        checks.expect(len(set(lengths)) <= 1, "caches", "caches that have read as many tokens", lengths)
        x = self._embed(tokens, lengths[0], padding)
        masks = {} if padding is None else {"key_padding_mask": padding}
        for block, cache in zip(blocks, caches, strict=True):
            x = block(x, is_causal=True, cache=cache, **masks)
        return self._read_out(x)

    def _embed(self, tokens: Tensor, past: int, padding: Tensor | None = None) -> Tensor:
        token_indices("tokens", tokens)
        (B, N), x = tokens.shape, embedding(tokens, self.embed_tokens)
        check_length("tokens", N, past, self.max_length)
        if padding is not None and padding.shape != (B, past + N):
            raise ValueError(f"key_padding_mask: expected shape {(B, past + N)}, got {tuple(padding.shape)}")
        if self.embed_positions is not None and padding is None:
            x = x + self.embed_positions[past : past + N]
        elif self.embed_positions is not None:
            places = ((~cast(Tensor, padding)).cumsum(1) - 1).clamp(min=0)[:, past:]  # (B, N), padding not counted
            x = x + embedding(places, self.embed_positions)
        return self.dropout(x)

    def _read_out(self, x: Tensor) -> Tensor:
        return linear(self.norm(x), self.embed_tokens)  # (B, N, vocab)
