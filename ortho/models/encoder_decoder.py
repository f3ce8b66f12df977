"""The encoder-decoder: it reads one text as a whole and writes another, token by token."""

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from ortho._typing import Bool, Float, Int
from ortho.layers.block import DecoderBlock, DecoderCache, Settings, TransformerBlock, stack
from ortho.layers.multihead import MultiheadAttention
from ortho.models.embeddings import (
    add_positions,
    check_length,
    check_token,
    mask_of_tokens,
    new_embeddings,
    token_indices,
)
from ortho.models.generation import check_sampling, continued


class EncoderDecoder(nn.Module):
    """A model of pairs of texts (Vaswani et al. 2017, arXiv:1706.03762, section 3), with pre-norm blocks.

    Encoder and decoder have `num_layers` blocks each, with a norm after each stack. `encoder`, `decoder` and `cross`
    hold arguments for the encoder's attention, the decoder's self-attention and its attention to the source. They are
    those of `MultiheadAttention`, or of another `layer`, and `num_heads` if it differs:
    `encoder={"layer": HybridAttention, "heads": {"learned": 1, "positional": 7}}`. Each draws its own frozen matrices.

    Both languages have one vocabulary; source, target and read-out share its vectors. Source and target each have
    embeddings of `max_length` places, with the `positions` of `LanguageModel`; with `max_length=None` they have none.
    `dropout` applies to the embeddings and to what every part of a block adds.

    Raises TypeError or ValueError, naming the argument, for invalid sizes, shares or kinds of positions, and for a
    `cross` layer that `DecoderBlock` refuses.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        num_heads: int,
        num_layers: int,
        *,
        max_length: int | None,
        positions: str = "learned",
        encoder: Settings | None = None,
        decoder: Settings | None = None,
        cross: Settings | None = None,
        d_ff: int | None = None,
        dropout: float = 0.0,
        bias: bool = False,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        kind: dict[str, Any] = {"dtype": dtype, "device": device}
        parts: dict[str, Any] = {"d_ff": d_ff, "dropout": dropout, "bias": bias, "generator": generator, **kind}
        reading = {"layer": MultiheadAttention, "num_heads": num_heads, **(encoder or {})}
        self.encoder = stack(num_layers, partial(_encoder_block, d_model, **parts), reading=reading)
        write = partial(DecoderBlock, d_model, num_heads, **parts)
        self.decoder = stack(num_layers, write, attention=decoder, cross=cross)
        self.norm_source, self.norm_target = (nn.LayerNorm(d_model, bias=bias, **kind) for _ in range(2))
        vectors: dict[str, Any] = {"max_length": max_length, "positions": positions, "generator": generator, **kind}
        self.embed_target = _Embedding(vocab_size, d_model, **vectors)
        self.embed_source = _Embedding(vocab_size, d_model, **vectors)
        self.embed_source.tokens = None  # it reads the target's
        self.vocab_size, self.max_length = vocab_size, max_length
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        source: Int[Tensor, "B M"],
        target: Int[Tensor, "B N"],
        source_mask: Bool[Tensor, "B M"] | None = None,
        *,
        caches: "DecoderCaches | None" = None,
    ) -> Float[Tensor, "B N vocab"]:
        """Token indices of the source (B, M) and of the target so far (B, N) -> logits (B, N, vocab_size) of the tokens
        that follow each.

        `source_mask` is True where the source has a token, and False where it is padded. Padding after the target
        does not change the logits before it. With `caches` (`new_caches`) the target follows the tokens that they have
        read, without gradients, and the source is encoded in the first call alone.

        Raises ValueError, naming the argument, for more than `max_length` tokens, for batches of different size, and
        for a mask of another shape than the source.
        """
        if caches is None:
            return self.decode(target, self.encode(source, source_mask), source_mask)
        with torch.no_grad():
            if caches.memory is None:
                caches.memory = self.encode(source, source_mask)
            return self.decode(target, caches.memory, source_mask, caches=caches)

    def new_caches(self, capacity: int | None = None) -> "DecoderCaches":
        """Empty caches for decoding, with room for `capacity` tokens, by default `max_length`."""
        most = cast(int, self.max_length if capacity is None else capacity)
        return DecoderCaches([cast(DecoderBlock, block).new_cache(most) for block in self.decoder])

    def encode(
        self, source: Int[Tensor, "B M"], source_mask: Bool[Tensor, "B M"] | None = None
    ) -> Float[Tensor, "B M d"]:
        """What the decoder reads: a vector for each token of the source, (B, M) -> (B, M, d)."""
        x = self.dropout(self.embed_source("source", source, vectors=self.embed_target.tokens))
        mask = mask_of_tokens("source_mask", source_mask, "source", source.shape)
        for block in self.encoder:
            x = block(x, attn_mask=mask)
        return self.norm_source(x)

    def decode(
        self,
        target: Int[Tensor, "B N"],
        memory: Float[Tensor, "B M d"],
        source_mask: Bool[Tensor, "B M"] | None = None,
        *,
        caches: "DecoderCaches | None" = None,
    ) -> Float[Tensor, "B N vocab"]:
        """The logits after each token of the target, given an encoded source, the `memory`."""
        blocks = [None] * len(self.decoder) if caches is None else caches.blocks
        past = 0 if blocks[0] is None else blocks[0].attention.length
        x = self.dropout(self.embed_target("target", target, past))
        if len(memory) != len(target):
            raise ValueError(f"target: expected batch {len(memory)} like the source, got shape {tuple(target.shape)}")
        mask = mask_of_tokens("source_mask", source_mask, "source", memory.shape[:2])
        for block, cache in zip(self.decoder, blocks, strict=True):
            x = block(x, memory, context_mask=mask, cache=cache)
        return linear(self.norm_target(x), cast(Tensor, self.embed_target.tokens))  # (B, N, vocab)

    @torch.no_grad()
    def generate(
        self,
        source: Int[Tensor, "B M"],
        source_mask: Bool[Tensor, "B M"] | None = None,
        *,
        start: int,
        stop: int,
        max_length: int | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Int[Tensor, "B n"]:
        """The likeliest tokens, one after the other: (B, n), without `start`, with `stop`, which also fills the
        places after it. At a `temperature` above 0 tokens are drawn (`ortho.models.generation.next_token`).

        A row without `stop` ends after `max_length` tokens, by default and at most the model's. Keys and values of the
        source are computed once.

        Raises TypeError or ValueError like `forward`, and for a start or a stop outside the vocabulary or a missing or
        too large `max_length`.
        """
        check_sampling(temperature, top_k)
        how: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "generator": generator}
        for name, token in (("start", start), ("stop", stop)):
            check_token(name, token, self.vocab_size)
        most = self.max_length if max_length is None else max_length
        if most is None:
            raise ValueError("max_length: expected a number of tokens, as the model has none of its own, got None")
        check_length("max_length", most, 0, self.max_length)
        read = partial(self, source, source_mask=source_mask, caches=self.new_caches(most))
        return continued(read, source.new_full((len(source), 1), start), most, stop, **how)


@dataclass
class DecoderCaches:
    """What an `EncoderDecoder` keeps for decoding: each block's cache, and the encoded source."""

    blocks: list[DecoderCache]
    memory: Tensor | None = None


def _encoder_block(d_model: int, *, reading: Settings, **parts: Any) -> TransformerBlock:
    """A block of the encoder, whose attention is made as `reading` says; the rest of the block is not concerned."""
    own = dict(reading)
    layer, num_heads = own.pop("layer"), own.pop("num_heads")

    def made(*sizes: int, **settings: Any) -> nn.Module:
        return layer(*sizes, **{**settings, **own})

    return TransformerBlock(d_model, num_heads, layer=made, **parts)


class _Embedding(nn.Module):
    """The sum of a token's vector and its position's."""

    tokens: Tensor | None
    places: Tensor | None

    def __init__(
        self, vocab_size: int, d_model: int, *, max_length: int | None, positions: str, **vectors: Any
    ) -> None:
        super().__init__()
        self.tokens = new_embeddings(vocab_size, d_model, **vectors)
        self.max_length = max_length
        add_positions(self, "places", positions, max_length, d_model, **vectors)

    def forward(
        self, name: str, tokens: Int[Tensor, "B N"], past: int = 0, *, vectors: Tensor | None = None
    ) -> Float[Tensor, "B N d"]:
        """Token indices (B, N), which errors call `name`, after `past` others -> (B, N, d); `vectors` are those of the
        tokens if it has none."""
        token_indices(name, tokens)
        check_length(name, tokens.shape[1], past, self.max_length)
        x = embedding(tokens, cast(Tensor, vectors if self.tokens is None else self.tokens))
        return x if self.places is None else x + self.places[past : past + tokens.shape[1]]

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *args: Any) -> None:
        """Earlier checkpoints hold shared vectors twice."""
        if self.tokens is None:
            state.pop(f"{prefix}tokens", None)
        super()._load_from_state_dict(state, prefix, *args)
