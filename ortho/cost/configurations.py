"""Published models at their sizes: the module, its inputs, and what a step of training it costs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ortho._cost import linear_map
from ortho.cost import Cost, block, feed_forward, model
from ortho.models.encoders import TextEncoder, VisionTransformer
from ortho.models.language_model import LanguageModel


@dataclass(frozen=True)
class Configuration:
    """A model of L blocks of width d with H heads that reads N tokens, and the number of parameters it was published
    with.

    `sizes` are further arguments of the model's class, `module`, and `declared` is its closed form; `draw` makes the
    inputs. `read_out` says how many tokens the last linear map reads, and how many numbers it makes of each.
    """

    name: str
    source: str
    N: int
    d: int
    H: int
    L: int
    parameters: int
    module: Callable[..., nn.Module]
    declared: Callable[..., Cost]
    draw: Callable[..., Tensor]
    sizes: dict[str, Any]
    read_out: tuple[int, int]

    def build(self, **kwargs: Any) -> nn.Module:
        """The model; `kwargs` are further arguments of its class (`generator`, `device`, `projection`, ...)."""
        return self.module(d_model=self.d, num_heads=self.H, num_layers=self.L, **self.sizes, **kwargs)

    def inputs(self, B: int, **kind: Any) -> tuple[Tensor, ...]:
        """Random arguments for a call of the model: tokens (B, N), or images, which alone have a `dtype`; `kind` is
        `torch.randn`'s (`generator`, `device`, `dtype`)."""
        return (self.draw(self, B, **kind),)

    def cost(self, B: int, **kwargs: Any) -> Cost:
        """What one step on B sequences or images costs, to the model's output, without the loss; `kwargs` are further
        arguments of the closed form (`projection`, `itemsize`, `form`, ...)."""
        return self.declared(self, B, **kwargs)

    def step_by_part(self, B: int, **kwargs: Any) -> dict[str, int]:
        """FLOPs of the matrix products in one step, both passes, by part; the arguments are those of `cost`."""
        whole = self.cost(B, **kwargs).step
        one = replace(self, L=self.L + 1).cost(B, **kwargs).step - whole  # what one more block adds
        network = feed_forward(B, self.N, self.d, kwargs.get("d_ff")).step
        tokens, outputs = self.read_out
        read_out = 3 * 2 * B * tokens * self.d * outputs  # forward, into the weights, into the tokens
        return {
            "embeddings": whole - self.L * one - read_out,
            "attention": self.L * (one - network),
            "networks": self.L * network,
            "read-out": read_out,
        }


def _tokens(of: Configuration, B: int, **kind: Any) -> Tensor:
    return torch.randint(of.sizes["vocab_size"], (B, of.N), **{**kind, "dtype": torch.long})


def _images(of: Configuration, B: int, **kind: Any) -> Tensor:
    size = of.sizes["image_size"]
    return torch.randn(B, of.sizes["channels"], size, size, **kind)


def _text_cost(of: Configuration, B: int, **kwargs: Any) -> Cost:
    return model(B, of.N, of.d, of.H, of.L, **of.sizes, **kwargs)


def _tokens_cost(of: Configuration, B: int, **kwargs: Any) -> Cost:
    vectors = of.sizes["vocab_size"] + 2 + of.N  # tokens, segments, places
    return _encoder_cost(of, B, of.d, vectors, **kwargs)


def _images_cost(of: Configuration, B: int, **kwargs: Any) -> Cost:
    numbers = of.sizes["channels"] * of.sizes["patch_size"] ** 2
    patches = linear_map(B, of.N - 1, numbers, of.d, bias=True, input_grad=False)  # images need no gradient
    own = _encoder_cost(of, B, of.sizes["num_classes"], 1 + of.N, **kwargs)  # a class token, places
    return own + replace(patches, decode=0)


def _encoder_cost(of: Configuration, B: int, outputs: int, vectors: int, **kwargs: Any) -> Cost:
    """Blocks with biases, a norm, a linear map of the first token, and vectors that are added. Nothing is decoded."""
    blocks = block(B, of.N, of.d, of.H, bias=True, **kwargs) * of.L
    whole = blocks + linear_map(B, 1, of.d, outputs, bias=True) + Cost(trained=(2 + vectors) * of.d)
    return replace(whole, decode=0, state_bytes=0)


CONFIGURATIONS = {
    made.name: made
    for made in (
        Configuration(
            "BERT-base",
            "Devlin et al. 2019, arXiv:1810.04805",
            N=512,
            d=768,
            H=12,
            L=12,
            parameters=109_482_240,
            module=TextEncoder,
            declared=_tokens_cost,
            draw=_tokens,
            sizes={"vocab_size": 30522, "max_length": 512},
            read_out=(1, 768),
        ),
        Configuration(
            "GPT-2 medium",
            "Radford et al. 2019",
            N=1024,
            d=1024,
            H=16,
            L=24,
            parameters=354_823_168,
            module=LanguageModel,
            declared=_text_cost,
            draw=_tokens,
            sizes={"vocab_size": 50257, "max_length": 1024, "bias": True},
            read_out=(1024, 50257),
        ),
        Configuration(
            "ViT-Base",
            "Dosovitskiy et al. 2021, arXiv:2010.11929, patches of 16 x 16",
            N=197,
            d=768,
            H=12,
            L=12,
            parameters=86_567_656,
            module=VisionTransformer,
            declared=_images_cost,
            draw=_images,
            sizes={"image_size": 224, "patch_size": 16, "num_classes": 1000, "channels": 3},
            read_out=(1, 1000),
        ),
    )
}
