"""Whole models built from the blocks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import embedding, linear

from ortho import _checks
from ortho._typing import Int, State, Tensor
from ortho.gates import Gate
from ortho.layers import TransformerBlock

__all__ = ["LanguageModel"]


class LanguageModel(nn.Module):
    """A causal language model: token and position embeddings, `num_layers` pre-norm blocks, a norm, a tied read-out.

    The architecture of GPT-2 (Radford et al. 2019) without biases. `projection`, `attention` and `gates` are passed to
    every block; each block draws its own frozen matrices. Each of `max_length` places has a learned embedding; with
    `max_length=None` there are no position embeddings, order is the attention's own matter, and any length is served.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        num_heads: int,
        num_layers: int,
        *,
        max_length: int | None,
        d_ff: int | None = None,
        projection: str = "learned",
        attention: str = "softmax",
        form: str = "fast",
        gates: Mapping[str, type[Gate]] | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size = _checks.positive_int("vocab_size", vocab_size)
        self.max_length = None if max_length is None else _checks.positive_int("max_length", max_length)
        self.blocks = nn.ModuleList(
            TransformerBlock(
                d_model,
                num_heads,
                d_ff=d_ff,
                projection=projection,
                attention=attention,
                form=form,
                gates=gates,
                generator=generator,
                dtype=dtype,
                device=device,
            )
            for _ in range(_checks.positive_int("num_layers", num_layers))
        )
        self.norm = nn.LayerNorm(d_model, bias=False, dtype=dtype, device=device)

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
    ) -> Any:
        """Token indices (B, N) -> logits (B, N, vocab_size), or (logits, state) with `return_state`.

        The state is the number of tokens seen and each block's own state; given as `initial_state`, the call continues
        that sequence. Raises TypeError or ValueError for tokens that are no indices into the vocabulary and for
        sequences longer than `max_length`.
        """
        past, states = initial_state or (0, [None] * len(self.blocks))  # type: ignore[list-item]
        self._check(tokens, past)
        x = embedding(tokens, self.embed_tokens)  # (B, N, d)
        if self.embed_positions is not None:
            x = x + self.embed_positions[past : past + tokens.shape[1]]
        new_states = []
        for block, state in zip(self.blocks, states, strict=True):
            x = block(x, is_causal=True, initial_state=state, return_state=return_state)
            if return_state:
                x, state = x
                new_states.append(state)
        logits = linear(self.norm(x), self.embed_tokens)  # (B, N, vocab)
        return (logits, (past + tokens.shape[1], new_states)) if return_state else logits

    def _check(self, tokens: Tensor, past: int) -> None:
        if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"tokens: expected int32 or int64 indices, got {_checks.describe(tokens)}")
        if tokens.dim() != 2 or 0 in tokens.shape:
            raise ValueError(f"tokens: expected shape (B, N) with B, N >= 1, got {tuple(tokens.shape)}")
        if self.max_length is not None and past + tokens.shape[1] > self.max_length:
            raise ValueError(f"tokens: expected at most {self.max_length - past} positions, got {tokens.shape[1]}")
        _checks.indices("tokens", tokens, self.vocab_size)
