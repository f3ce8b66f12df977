"""How large gradients are through the depth of a stack, with learned and with frozen queries and keys.

Stacks run in float64 and train for only seconds, so that the figures, once rounded, are the same on every machine.
"""

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding, linear

from ortho.checks import one_of
from ortho.layers.block import TransformerBlock
from ortho.projections import FrozenProjection
from paper.experiments.engine.records import Case
from paper.experiments.learning import fitting
from paper.tasks import induction
from paper.tasks.task import NONE, Task

ARMS: dict[str, Any] = {
    "learned": "learned",
    "frozen": "frozen",
    "frozen Gaussian": partial(FrozenProjection, draw="gaussian"),
}
STAGES = ("at first", "trained")
SEEDS = (1, 2, 3, 4, 5)
D, H, L, B = 32, 4, 8, 4
STEPS, RATE = 20, 5e-3


@cache
def task() -> Task:
    return induction.task(length=16, symbols=8)


class Stack(nn.Module):
    """Blocks of attention and feed-forward network, each half after a norm, with residual sums or without."""

    def __init__(self, arm: str, residual: bool, *, generator: torch.Generator) -> None:
        super().__init__()
        options: dict[str, Any] = {"projection": ARMS[arm], "generator": generator, "dtype": torch.float64}
        self.residual = residual
        self.blocks = nn.ModuleList(TransformerBlock(D, H, attention="rotary", **options) for _ in range(L))
        self.norm = nn.LayerNorm(D, bias=False, dtype=torch.float64)
        drawn = torch.randn(task().vocab_size, D, generator=generator, dtype=torch.float64)
        self.embed_tokens = nn.Parameter(drawn)

    def forward(self, tokens: Tensor) -> list[Tensor]:
        """Tokens (B, N) -> the input of each block, the output of the last one, and the logits."""
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
    """Train the model in place with AdamW, on fresh batches."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=RATE, fused=True)
    for _ in range(steps):
        loss, _ = _loss(model, generator)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()


@torch.enable_grad()
def gradients(model: Stack, generator: torch.Generator) -> list[float]:
    """The norm of the gradient at the input of each block, and at the output of the last one."""
    loss, found = _loss(model, generator)
    return [float(one.norm()) for one in torch.autograd.grad(loss, found)]


def case(arm: str, residual: bool, seed: int) -> Case:
    """One stack, looked at before training and after."""
    sizes: Case = {"steps": STEPS, "rate": RATE, "B": B, "d": D, "H": H, "L": L}
    one_of("arm", arm, ARMS)
    return {"device": "cpu", "arm": arm, "residual": residual, "seed": seed, **sizes}


def cases(device: str) -> list[Case]:
    """All arms with residual sums and without, seed after seed; only on the CPU."""
    if device != "cpu":
        return []
    return [case(arm, residual, seed) for seed in SEEDS for arm in ARMS for residual in (True, False)]


def run(case: Case) -> dict[str, Any]:
    """The gradients of one stack, at first and after training. The arms of a seed see the same batches."""
    seeds = {name: 100 * case["seed"] + i for i, name in enumerate(("weights", "batches", "tests"))}
    draws = fitting.generators(seeds)
    model = Stack(case["arm"], case["residual"], generator=draws["weights"])
    found = [gradients(model, draws["tests"])]
    train(model, case["steps"], draws["batches"])
    found.append(gradients(model, fitting.generators(seeds)["tests"]))
    stages = dict(zip(STAGES, found, strict=True))
    ends = {stage: {"first_over_last_fraction": [sizes[0] / sizes[-1]]} for stage, sizes in stages.items()}
    return {"seeds": seeds, "repetitions": ends, "facts": {"gradients": stages}}


label = "{arm}, residual={residual}, seed={seed}".format_map
