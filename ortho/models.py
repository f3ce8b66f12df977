"""Whole models built from the blocks."""

from collections.abc import Sequence
from math import inf
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import embedding, linear

from ortho import _checks
from ortho._typing import Int, State, Tensor
from ortho.attention.decoding import Cache
from ortho.layers import TransformerBlock

__all__ = ["LanguageModel"]


class LanguageModel(nn.Module):
    """A causal language model: token and position embeddings, `num_layers` pre-norm blocks, a norm, a tied read-out.

    The architecture of GPT-2 (Radford et al. 2019), with `bias` in full. `kwargs` go to every block (`projection`,
    `attention`, `num_kv_heads`, ...); each block draws its own frozen matrices. Each of `max_length` places has a
    learned embedding; with `max_length=None` there are no position embeddings, order is the attention's own matter, and
    any length is served.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        num_heads: int,
        num_layers: int,
        *,
        max_length: int | None,
        bias: bool = False,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.vocab_size = _checks.positive_int("vocab_size", vocab_size)
        self.max_length = None if max_length is None else _checks.positive_int("max_length", max_length)
        kind: dict[str, Any] = {"bias": bias, "dtype": dtype, "device": device}
        self.blocks = nn.ModuleList(
            TransformerBlock(d_model, num_heads, generator=generator, **kind, **kwargs)
            for _ in range(_checks.positive_int("num_layers", num_layers))
        )
        self.norm = nn.LayerNorm(d_model, **kind)

        def embeddings(count: int) -> nn.Parameter:
            vectors = torch.empty(count, d_model, dtype=dtype, device=device)
            return nn.Parameter(nn.init.normal_(vectors, std=0.02, generator=generator))

        self.embed_tokens = embeddings(vocab_size)
        self.embed_positions = None if max_length is None else embeddings(max_length)

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
        that sequence. `caches` (`new_caches`), one a block, do so in place, without gradients.

        Raises TypeError or ValueError for tokens that are no indices into the vocabulary, for sequences longer than
        `max_length`, and for caches beside a state or of another number than the blocks.
        """
        if caches is not None:
            return self._read_out(self._decoded(tokens, caches, initial_state is None and not return_state))
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

    def new_caches(self, capacity: int | None = None) -> list[Cache]:
        """An empty cache for each block, with room for `capacity` tokens, by default `max_length`."""
        capacity = self.max_length if capacity is None else capacity
        return [cast(TransformerBlock, block).attention.new_cache(capacity) for block in self.blocks]

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

        Raises TypeError or ValueError for a `count` or a temperature that is none, and for more than `max_length`
        tokens in all.
        """
        _checks.positive_int("count", count)
        if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 <= temperature < inf:
            raise ValueError(f"temperature: expected a number of at least 0, got {_checks.describe(temperature)}")
        self._check(tokens, 0)
        self._check_length(tokens.shape[1] + count - 1, 0)  # the last one is not read
        caches = self.new_caches(tokens.shape[1] + count)
        drawn = [tokens]
        for _ in range(count):
            logits = self(drawn[-1], caches=caches)[:, -1]  # (B, vocab)
            if temperature == 0:
                drawn.append(logits.argmax(-1, keepdim=True))
            else:
                drawn.append(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        return torch.cat(drawn, 1)

    def _decoded(self, tokens: Tensor, caches: Sequence[Cache], alone: bool) -> Tensor:
        if not alone:
            raise ValueError("caches: expected None beside initial_state or return_state")
        if len(caches) != len(self.blocks):
            raise ValueError(f"caches: expected {len(self.blocks)}, one a block, got {len(caches)}")
        x = self._embed(tokens, caches[0].length)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, is_causal=True, cache=cache)
        return x

    def _embed(self, tokens: Tensor, past: int) -> Tensor:
        self._check(tokens, past)
        x = embedding(tokens, self.embed_tokens)
        return x if self.embed_positions is None else x + self.embed_positions[past : past + tokens.shape[1]]

    def _read_out(self, x: Tensor) -> Tensor:
        return linear(self.norm(x), self.embed_tokens)  # (B, N, vocab)

    def _check(self, tokens: Tensor, past: int) -> None:
        if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"tokens: expected int32 or int64 indices, got {_checks.describe(tokens)}")
        if tokens.dim() != 2 or 0 in tokens.shape:
            raise ValueError(f"tokens: expected shape (B, N) with B, N >= 1, got {tuple(tokens.shape)}")
        self._check_length(tokens.shape[1], past)
        _checks.indices("tokens", tokens, self.vocab_size)

    def _check_length(self, length: int, past: int) -> None:
        if self.max_length is not None and past + length > self.max_length:
            raise ValueError(f"tokens: expected at most {self.max_length - past} positions, got {length}")
