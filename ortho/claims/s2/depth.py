"""How large gradients are through the depth of a stack, with learned and with frozen queries and keys.

In float64, and trained for seconds, so that the figures are the same on every machine once they are rounded.
"""

from collections.abc import Callable
from functools import cache, partial
from math import log10
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding, linear

from ortho._checks import unchecked_values
from ortho.experiments.resampling import paired_difference
from ortho.experiments.statistics import Decision, Interval, decide
from ortho.layers import TransformerBlock
from ortho.projections import FrozenProjection
from ortho.tasks import induction
from ortho.tasks.task import NONE, Task

# Fixed before anything was run: the gradient's size changes by less than twofold more, or less, through the stack.
DECISION = Decision(margin=log10(2), level=0.05, higher_is_better=False)
ARMS: dict[str, Any] = {
    "learned": "learned",
    "frozen": "frozen",
    "frozen Gaussian": partial(FrozenProjection, draw="gaussian"),
    "stopped": "stopped",
}
SEEDS = (1, 2, 3, 4, 5)
D, H, L, B = 32, 4, 8, 4
STEPS, RATE = 20, 5e-3


@cache
def task() -> Task:
    return induction.task(length=16, symbols=8)


class Stack(nn.Module):
    """Blocks of attention and feed-forward network, each half behind a norm, with residual sums or without."""

    def __init__(self, arm: str, residual: bool, *, generator: torch.Generator) -> None:
        super().__init__()
        options: dict[str, Any] = {"projection": ARMS[arm], "generator": generator, "dtype": torch.float64}
        self.residual = residual
        self.blocks = nn.ModuleList(TransformerBlock(D, H, attention="rotary", **options) for _ in range(L))
        self.norm = nn.LayerNorm(D, bias=False, dtype=torch.float64)
        drawn = torch.randn(task().vocab_size, D, generator=generator, dtype=torch.float64)
        self.embed_tokens = nn.Parameter(drawn)

    def forward(self, tokens: Tensor) -> list[Tensor]:
        """Tokens (B, N) -> what each block is given, what the last one makes, and the logits."""
        x = embedding(tokens, self.embed_tokens)
        found = [x]
        for block in self.blocks:
            x = block(x, is_causal=True) if self.residual else _bare(block, x)
            found.append(x)
        return [*found, linear(self.norm(x), self.embed_tokens) / D**0.5]


def _bare(block: Any, x: Tensor) -> Tensor:
    y = block.attention(block.norm_attention(x), is_causal=True)
    made: Tensor = block.feed_forward(block.norm_feed_forward(y))
    return made


def _loss(model: Stack, generator: torch.Generator) -> tuple[Tensor, list[Tensor]]:
    batch = task().train(B, generator)
    *found, logits = model(*batch.inputs)
    return cross_entropy(logits.flatten(0, 1), batch.answers.flatten(), ignore_index=NONE), found


@torch.enable_grad()
def train(model: Stack, steps: int, generator: torch.Generator) -> None:
    """AdamW on fresh batches, in place."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=RATE, fused=True)
    with unchecked_values():  # a number that is not finite would show in the gradients
        for _ in range(steps):
            loss, _ = _loss(model, generator)
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimiser.step()


@torch.enable_grad()
def gradients(model: Stack, generator: torch.Generator) -> list[float]:
    """The gradient's length at what each block is given, and at what the last one makes."""
    loss, found = _loss(model, generator)
    return [float(one.norm()) for one in torch.autograd.grad(loss, found)]


@cache
def sizes(arm: str, residual: bool, steps: int, seed: int) -> tuple[float, ...]:
    """`gradients` of one stack, after so many steps. The arms of a seed see the same batches."""
    weights, batches, tested = (torch.Generator().manual_seed(100 * seed + i) for i in range(3))
    model = Stack(arm, residual, generator=weights)
    train(model, steps, batches)
    return tuple(gradients(model, tested))


def decades(arm: str, residual: bool, steps: int, seed: int) -> float:
    """By how many powers of ten the gradient's length differs between the two ends of the stack, up or down."""
    first, *_, last = sizes(arm, residual, steps, seed)
    return abs(log10(first / last))


def compared(
    arm: str, residual: bool, steps: int, *, measure: Callable[..., float] = decades
) -> tuple[tuple[float, Interval], str]:
    """What an arm has more of them than learned heads, with its interval, and what the rule says of that."""
    ours, theirs = ([measure(name, residual, steps, seed) for seed in SEEDS] for name in (arm, "learned"))
    found = paired_difference(ours, theirs, confidence=DECISION.confidence())
    return (found.mean, found.interval), decide(found.interval, DECISION)
