"""Published models at their sizes: the module, its inputs, and what a step of training it costs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ortho.cost import Cost, feed_forward, model, text_encoder, vision_transformer
from ortho.models.encoders import TextEncoder, VisionTransformer
from ortho.models.language_model import LanguageModel


@dataclass(frozen=True)
class Configuration:
    """A model of L blocks of width d with H heads that reads N tokens, and the number of parameters it was published
    with.

    `sizes` are further arguments of the model's class, `module`, and of its closed form, `declared`; `draw` makes the
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
        return self.declared(B=B, N=self.N, d=self.d, H=self.H, L=self.L, **self.sizes, **kwargs)

    def step_by_part(self, B: int, **kwargs: Any) -> dict[str, int]:
        """FLOPs of the matrix products in one step, both passes, by part; the arguments are those of `cost`."""
        whole = self.cost(B, **kwargs).step
        block = replace(self, L=self.L + 1).cost(B, **kwargs).step - whole  # what one more adds
        network = feed_forward(B, self.N, self.d, kwargs.get("d_ff")).step
        tokens, outputs = self.read_out
        read_out = 3 * 2 * B * tokens * self.d * outputs  # forward, into the weights, into the tokens
        return {
            "embeddings": whole - self.L * block - read_out,
            "attention": self.L * (block - network),
            "networks": self.L * network,
            "read-out": read_out,
        }


def _tokens(of: Configuration, B: int, **kind: Any) -> Tensor:
    return torch.randint(of.sizes["vocab_size"], (B, of.N), **{**kind, "dtype": torch.long})


def _images(of: Configuration, B: int, **kind: Any) -> Tensor:
    size = of.sizes["image_size"]
    return torch.randn(B, of.sizes["channels"], size, size, **kind)


def _of_images(**sizes: Any) -> Cost:
    del sizes["N"]  # N follows from the sizes of images and patches
    return vision_transformer(**sizes)


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
            declared=text_encoder,
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
            declared=model,
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
            declared=_of_images,
            draw=_images,
            sizes={"image_size": 224, "patch_size": 16, "num_classes": 1000, "channels": 3},
            read_out=(1, 1000),
        ),
    )
}
