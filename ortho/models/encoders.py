"""Whole encoders built from the blocks, for text (BERT) and images (ViT). Each gives one vector for its input."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from ortho._typing import Bool, Float, Int
from ortho.checks import expect
from ortho.heads import new_bias, new_weight
from ortho.layers.block import TransformerBlock, stack
from ortho.models.embeddings import check_length, mask_of_tokens, new_embeddings, token_indices


class TextEncoder(nn.Module):
    """BERT (Devlin et al. 2019, arXiv:1810.04805, section 3): embeddings of tokens, segments and places, post-norm
    blocks with biases, and a pooler on the first token.

    `kwargs` go to every block (`projection`, `attention`, `form`, `d_ff`, `dropout`, ...); each block draws its
    own frozen matrices. The norms' epsilon is PyTorch's.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        num_heads: int,
        num_layers: int,
        *,
        max_length: int,
        num_segments: int = 2,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        kind: dict[str, Any] = {"dtype": dtype, "device": device}
        self.vocab_size, self.max_length, self.num_segments = vocab_size, max_length, num_segments
        self.blocks = _blocks(num_layers, d_model, num_heads, norm_first=False, generator=generator, **kind, **kwargs)
        self.embed_tokens = new_embeddings(vocab_size, d_model, generator=generator, **kind)
        self.embed_segments = new_embeddings(num_segments, d_model, generator=generator, **kind)
        self.embed_positions = new_embeddings(max_length, d_model, generator=generator, **kind)
        self.norm = nn.LayerNorm(d_model, **kind)
        self.weight_pool = new_weight(d_model, d_model, generator=generator, **kind)
        self.bias_pool = new_bias(self.weight_pool)

    def forward(
        self,
        tokens: Int[Tensor, "B N"],
        segments: Int[Tensor, "B N"] | None = None,
        *,
        key_padding_mask: Bool[Tensor, "B N"] | None = None,
    ) -> Float[Tensor, "B d"]:
        """One vector for the whole input, (B, d): the first token's after a linear map and tanh.

        The arguments, and the errors for bad ones, are those of `encode`.
        """
        x = self.encode(tokens, segments, key_padding_mask=key_padding_mask)
        return linear(x[:, 0], self.weight_pool, self.bias_pool).tanh()

    def encode(
        self,
        tokens: Int[Tensor, "B N"],
        segments: Int[Tensor, "B N"] | None = None,
        *,
        key_padding_mask: Bool[Tensor, "B N"] | None = None,
    ) -> Float[Tensor, "B N d"]:
        """A vector for each token: indices (B, N) -> (B, N, d).

        `segments` gives each token's segment, by default the first. `key_padding_mask` is True where there is padding,
        to which nothing attends.

        Raises ValueError, naming the argument, for more than `max_length` tokens, and for a mask that is not boolean or
        not of the tokens' shape.
        """
        token_indices("tokens", tokens)
        check_length("tokens", tokens.shape[1], 0, self.max_length)
        segments = torch.zeros_like(tokens) if segments is None else segments
        token_indices("segments", segments)
        if segments.shape != tokens.shape:
            raise ValueError(f"segments: expected shape {tuple(tokens.shape)} like tokens, got {tuple(segments.shape)}")
        x = embedding(tokens, self.embed_tokens) + embedding(segments, self.embed_segments)  # (B, N, d)
        x = self.norm(x + self.embed_positions[: tokens.shape[1]])
        padded = mask_of_tokens("key_padding_mask", key_padding_mask, "tokens", tokens.shape)
        for block in self.blocks:
            x = block(x, attn_mask=None if padded is None else ~padded)
        return x


class VisionTransformer(nn.Module):
    """ViT (Dosovitskiy et al. 2021, arXiv:2010.11929, section 3.1): patches as tokens, a class token before them,
    pre-norm blocks with biases, a norm, and a linear head on the class token.

    Images have `channels` x `image_size` x `image_size` numbers, patches `channels` x `patch_size` x `patch_size`.
    `weight_patch` (d, channels * patch_size^2) is the weight of a convolution with the patch as kernel and stride, its
    last axes flattened. `kwargs` go to every block. The norms' epsilon is PyTorch's.

    Raises ValueError for a patch that does not divide the image.
    """

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        d_model: int,
        num_heads: int,
        num_layers: int,
        *,
        num_classes: int,
        channels: int = 3,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        kind: dict[str, Any] = {"dtype": dtype, "device": device}
        expect(not image_size % patch_size, "patch_size", f"a divisor of image_size = {image_size}", patch_size)
        self.image_shape = (channels, image_size, image_size)
        self.patch_size = patch_size
        self.blocks = _blocks(num_layers, d_model, num_heads, generator=generator, **kind, **kwargs)
        self.weight_patch = new_weight(d_model, channels * patch_size**2, generator=generator, **kind)
        self.bias_patch = new_bias(self.weight_patch)
        self.class_token = nn.Parameter(self.bias_patch.new_zeros(d_model))
        self.embed_positions = new_embeddings(1 + (image_size // patch_size) ** 2, d_model, generator=generator, **kind)
        self.norm = nn.LayerNorm(d_model, **kind)
        self.weight_head = new_weight(num_classes, d_model, generator=generator, **kind)
        self.bias_head = new_bias(self.weight_head)

    def forward(self, images: Float[Tensor, "B channels S S"]) -> Float[Tensor, "B classes"]:
        """Images (B, channels, S, S) -> logits (B, num_classes).

        Raises ValueError for images of another shape or size.
        """
        return linear(self.encode(images)[:, 0], self.weight_head, self.bias_head)

    def encode(self, images: Float[Tensor, "B channels S S"]) -> Float[Tensor, "B N d"]:
        """A vector for the class token and for each patch, row by row: (B, channels, S, S) -> (B, N, d)."""
        fits = images.dim() == 4 and images.shape[1:] == self.image_shape and len(images) > 0
        wanted = f"shape (B, {', '.join(map(str, self.image_shape))}) with B >= 1"
        expect(fits, "images", wanted, tuple(images.shape))
        p = self.patch_size
        patches = images.unflatten(-2, (-1, p)).unflatten(-1, (-1, p))  # (B, channels, rows, p, columns, p)
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # (B, rows * columns, channels * p * p)
        x = linear(patches.contiguous(), self.weight_patch, self.bias_patch)  # patches of one pixel are still a view
        x = torch.cat([self.class_token.expand(x.shape[0], 1, -1), x], 1) + self.embed_positions  # (B, N, d)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def _blocks(num_layers: int, d_model: int, num_heads: int, generator: Any, **settings: Any) -> nn.ModuleList:
    make = partial(TransformerBlock, d_model, num_heads, bias=True, generator=generator)
    return stack(num_layers, make, **settings)
