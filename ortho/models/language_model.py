"""The language model: reading, decoding, generating."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import embedding, linear

from ortho import _checks
from ortho._checks import checked
from ortho._typing import Int, State, Tensor
from ortho.attention.cache import Cache
from ortho.layers.block import TransformerBlock
from ortho.models.embeddings import add_positions, check_length, new_embeddings, token_indices

__all__ = ["LanguageModel"]


class LanguageModel(nn.Module):
    """A causal language model: token and position embeddings, `num_layers` pre-norm blocks, a norm, a tied read-out.

    The architecture of GPT-2 (Radford et al. 2019), whose parameters it has with `bias`; its GELU is the exact one.
    `kwargs` go to every block (`projection`, `attention`, `num_kv_heads`, ...); each draws its own frozen matrices.
    Each of `max_length` places has an embedding, a learned one or, with `positions` 'sinusoidal', a fixed one of the
    same length as the tokens' are at first; with `max_length=None` there are no position embeddings, order is the
    attention's own matter, and any length is served. `dropout` is that of the embeddings and of every block.
    """

    embed_positions: Tensor | None

    @checked
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
        self.blocks = nn.ModuleList(
            TransformerBlock(d_model, num_heads, dropout=dropout, generator=generator, **kind, **kwargs)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(d_model, **kind)
        self.dropout = nn.Dropout(_checks.share("dropout", dropout))

        vectors: dict[str, Any] = {"generator": generator, "dtype": dtype, "device": device}
        self.embed_tokens = new_embeddings(vocab_size, d_model, **vectors)
        add_positions(self, "embed_positions", positions, max_length, d_model, **vectors)

    @checked(shapes=False)
    def forward(
        self,
        tokens: Int[Tensor, "B N"],
        *,
        initial_state: tuple[int, list[State]] | None = None,
        return_state: bool = False,
        caches: Sequence[Cache] | None = None,
    ) -> Any:
        """Token indices (B, N) -> logits (B, N, vocab_size), or (logits, state) with `return_state`.

        The state is the number of tokens seen and each block's own state; given as `initial_state`, the call continues
        that sequence. `caches` (`new_caches`), one a block, do so in place; nothing then has a gradient.

        Raises TypeError or ValueError for tokens that are no indices into the vocabulary, for sequences longer than
        `max_length`, and for caches beside a state, of another number than the blocks, or of different lengths, as a
        call leaves them that fails in a later block.
        """
        if caches is not None:
            if initial_state is not None or return_state:
                raise ValueError("caches: expected None beside initial_state or return_state")
            return self._decoded(tokens, caches)
        past, states = initial_state or (0, [None] * len(self.blocks))  # type: ignore[list-item]
        x = self._embed(tokens, past)  # (B, N, d)
        new_states = []
        for block, state in zip(self.blocks, states, strict=True):
            x = block(x, is_causal=True, initial_state=state, return_state=return_state)
            if return_state:
                x, state = x
                new_states.append(state)
        logits = self._read_out(x)
        return (logits, (past + tokens.shape[1], new_states)) if return_state else logits

    @checked
    def new_caches(self, capacity: int | None = None) -> list[Cache]:
        """An empty cache for each block, with room for `capacity` tokens, by default `max_length`."""
        capacity = self.max_length if capacity is None else capacity
        return [cast(TransformerBlock, block).attention.new_cache(capacity) for block in self.blocks]

    @checked(shapes=False)
    @torch.no_grad()
    def generate(
        self,
        tokens: Int[Tensor, "B N"],
        count: int,
        *,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Int[Tensor, "B N_and_count"]:
        """The tokens (B, N), and `count` more that the model draws one after the other; likeliest at temperature 0.

        Raises TypeError or ValueError for a `count` or a temperature that is none, and for more tokens than are read
        with `max_length`: all but the last.
        """
        if temperature < 0:
            raise ValueError(f"temperature: expected a number of at least 0, got {temperature}")
        token_indices("tokens", tokens, self.vocab_size)
        check_length("tokens", tokens.shape[1] + count - 1, 0, self.max_length)  # the last one is not read
        caches = self.new_caches(tokens.shape[1] + count)
        drawn = [tokens]
        for _ in range(count):
            logits = self(drawn[-1], caches=caches)[:, -1]  # (B, vocab)
            if temperature == 0:
                drawn.append(logits.argmax(-1, keepdim=True))
            else:
                # In float64, below the largest: else a very low temperature leads out of the range of the dtype.
                logits = logits.double() - logits.amax(-1, keepdim=True)
                chances = (logits / temperature).softmax(-1).float()
                drawn.append(torch.multinomial(chances, 1, generator=generator))
        return torch.cat(drawn, 1)

    @torch.no_grad()
    def _decoded(self, tokens: Tensor, caches: Sequence[Cache]) -> Tensor:
        if len(caches) != len(self.blocks):
            raise ValueError(f"caches: expected {len(self.blocks)}, one a block, got {len(caches)}")
        for cache in caches:
            if not isinstance(cache, Cache):
                raise TypeError(f"caches: expected caches, got {_checks.describe(cache)}")
        lengths = [cache.length for cache in caches]
        if len(set(lengths)) > 1:
            raise ValueError(f"caches: expected caches that have read as many tokens, got {lengths}")
        x = self._embed(tokens, lengths[0])
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, is_causal=True, cache=cache)
        return self._read_out(x)

    def _embed(self, tokens: Tensor, past: int) -> Tensor:
        token_indices("tokens", tokens, self.vocab_size)
        check_length("tokens", tokens.shape[1], past, self.max_length)
        x = embedding(tokens, self.embed_tokens)
        if self.embed_positions is not None:
            x = x + self.embed_positions[past : past + tokens.shape[1]]
        return self.dropout(x)

    def _read_out(self, x: Tensor) -> Tensor:
        return linear(self.norm(x), self.embed_tokens)  # (B, N, vocab)
