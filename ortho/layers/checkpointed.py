r"""Activations that are computed again for the gradient instead of being kept (Chen et al. 2016, arXiv:1604.06174).

L blocks in k segments keep the k inputs, i bytes each, and in the backward pass the inside of one segment at a time,
L/k times the a bytes of a block. The sum is least at $k = \sqrt{L a / i}$, and the price is one more forward pass.
With a = i this is the paper's $\sqrt L$. A Transformer's block keeps many times its input, so a segment for each block
is best up to L = a / i.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ortho._typing import Float
from ortho.attention import MECHANISMS
from ortho.checks import describe, expect, one_of, positive_int


class Checkpointed(nn.Module):
    """A sequence of blocks, in `segments` whose lengths differ by at most one; by default each block is a segment.

    Takes what a block takes, and replaces one: `model.blocks = nn.ModuleList([Checkpointed(model.blocks)])`. Such a
    model still reads with caches, which each block has for itself, and recomputes nothing then.

    Raises ValueError for no blocks, and for `segments` above the number of blocks.
    """

    def __init__(self, blocks: Iterable[nn.Module], segments: int | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        count = len(self.blocks)
        expect(count, "blocks", "at least one", "none")
        self.segments = count if segments is None else positive_int("segments", segments)
        expect(self.segments <= count, "segments", f"at most the {count} blocks", segments)

    def forward(
        self,
        x: Float[Tensor, "B N d"],
        *,
        initial_state: object = None,
        cache: object = None,
        **kwargs: Any,
    ) -> Float[Tensor, "B N d"]:
        """x (B, N, d) -> (B, N, d).

        Raises ValueError for a state or a cache: each block needs one of its own.
        """
        for name, given in {"initial_state": initial_state, "cache": cache}.items():
            expect(given is None, name, "None, as each block needs its own", describe(given))
        for places in torch.arange(len(self.blocks)).tensor_split(self.segments):
            segment = [self.blocks[place] for place in places.tolist()]
            x = checkpoint(partial(_run, segment, **kwargs), x, use_reentrant=False)
        return x


class CheckpointedAttention(nn.Module):
    """A mechanism without gates that keeps only q, k and v, for `MultiheadAttention(attention=...)`.

    What is large and cheap to compute is computed again (Korthikanti et al. 2022, arXiv:2205.05198, section 5).
    """

    def __init__(self, attention: str = "softmax", form: str = "reference") -> None:
        super().__init__()
        mechanism = MECHANISMS[one_of("attention", attention, MECHANISMS)]
        expect(not mechanism.gates, "attention", "a mechanism without gates", repr(attention))
        self.attend, self.same_tokens = mechanism.form(form), mechanism.same_tokens

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Any:
        if kwargs.get("initial_state") is not None or kwargs.get("return_state"):
            return self.attend(q, k, v, **kwargs)
        return checkpoint(partial(self.attend, **kwargs), q, k, v, use_reentrant=False)


def _run(blocks: Sequence[nn.Module], x: Tensor, **kwargs: Any) -> Tensor:
    for block in blocks:
        x = block(x, **kwargs)
    return x
