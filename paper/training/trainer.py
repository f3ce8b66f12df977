"""A training loop that can be killed anywhere, and then goes on exactly, to the bit, from where it was."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paper.tasks.task import NONE, Batch, Draw
from paper.training import checkpoints
from paper.training.recipe import Recipe

__all__ = ["Trainer"]

# Read when cuBLAS is first used: without it two products of the same numbers need not be the same.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

EVERY_S = 20.0  # between checkpoints


class Trainer:
    """Trains `model` in place, by a recipe, on batches that `draw` makes with `generator`.

    `losses` are those of the steps made so far, in nats an answer. `watch(step)` is called after each of the steps
    named in `at`, counted from 1, and its result, any JSON, is kept in `watched`. `keep_best` names a number in that
    result; the weights with the lowest one are put back at the end.

    With a `checkpoint` file a run goes on where an earlier one was killed: weights, optimiser, random numbers, losses
    and what was watched are as they were, and the result is the same to the bit on the same device (on CUDA where its
    kernels have a deterministic form; PyTorch warns of one that has none). `identity` says which run it is; the
    checkpoint of another run is not used. The caller removes the file when it has the result.

    Raises CheckpointError for a damaged checkpoint, and FloatingPointError if a loss is not a finite number.
    """

    def __init__(
        self,
        model: nn.Module,
        draw: Draw,
        recipe: Recipe,
        generator: torch.Generator,
        *,
        at: Sequence[int] = (),
        watch: Callable[[int], Any] | None = None,
        keep_best: str | None = None,
        checkpoint: Path | None = None,
        identity: str = "",
    ) -> None:
        self.model, self.draw, self.recipe, self.generator = model, draw, recipe, generator
        self.at, self.watch, self.keep_best = set(at), watch, keep_best
        self.checkpoint, self.identity = checkpoint, identity
        self.device = next(model.parameters()).device
        self.optimiser = torch.optim.AdamW(_groups(model, recipe.weight_decay), recipe.rate, fused=True)
        self.step, self.seconds = 0, 0.0
        self.watched: list[Any] = []
        self._losses: list[Tensor] = []
        self._best: dict[str, Tensor] | None = None
        stored = None if checkpoint is None else checkpoints.load(checkpoint, identity)
        if stored is not None:
            self._resume(stored)

    @property
    def losses(self) -> list[float]:
        """The loss of each step so far, in nats an answer."""
        return torch.stack(self._losses).tolist() if self._losses else []

    def run(self, until: int | None = None) -> None:
        """Train up to a step, by default the recipe's last, and leave the model in evaluation mode, without dropout."""
        until = self.recipe.steps if until is None else min(until, self.recipe.steps)
        saved = time.monotonic()
        with _deterministic(self.device):
            while self.step < until:
                self._make_steps(until, saved)
                if self.step in self.at and self.watch is not None:
                    self._look(self.watch)
                if self._is_due(saved) or self.step == until < self.recipe.steps:
                    self._save()
                    saved = time.monotonic()
        if self.step == self.recipe.steps and self._best is not None:
            self.model.load_state_dict(self._best)
        self.model.eval()

    def _make_steps(self, until: int, saved: float) -> None:
        """Make steps up to the next look, the next checkpoint or the last step, and add the time of the steps alone."""
        self.model.train()
        began, first = time.monotonic(), self.step
        while self.step == first or not (self.step in self.at or self.step == until or self._is_due(saved)):
            self._make_step()
        if not torch.stack(self._losses[first:]).isfinite().all():  # which waits for the device
            raise FloatingPointError(f"steps {first} to {self.step}: expected finite losses, got NaN or infinity")
        self.seconds += time.monotonic() - began

    def _make_step(self) -> None:
        rate = self.recipe.rate * self.recipe.share_of_rate(self.step)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        batch = self.draw(self.recipe.B, self.generator)
        loss = self._loss(batch.to(self.device), int(batch.asked.sum()))
        self.optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(_trained(self.model), self.recipe.clip)
        self.optimiser.step()
        self._losses.append(loss.detach())
        self.step += 1

    def _loss(self, batch: Batch, total: int) -> Tensor:
        """The mean cross-entropy of the `total` answers asked for."""
        half = self.recipe.precision == "bfloat16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
            logits: Tensor = self.model(*batch.inputs)
        sums = cross_entropy(
            logits.flatten(0, -2).float(),
            batch.answers.flatten(),
            ignore_index=NONE,
            reduction="sum",
            label_smoothing=self.recipe.smoothing,
        )
        return sums * (1 / total)

    def _look(self, watch: Callable[[int], Any]) -> None:
        self.model.eval()
        self.watched.append(watch(self.step))
        if self.keep_best is not None:
            lowest = min(range(len(self.watched)), key=lambda i: self.watched[i][self.keep_best])
            if lowest == len(self.watched) - 1:
                self._best = {name: t.detach().clone() for name, t in self.model.state_dict().items()}

    def _is_due(self, saved: float) -> bool:
        """Whether it is time for a checkpoint."""
        return time.monotonic() - saved > EVERY_S

    def _save(self) -> None:
        if self.checkpoint is not None:
            checkpoints.save(self.checkpoint, self._state(), self.identity)

    def _state(self) -> dict[str, Any]:
        cuda = self.device.type == "cuda"
        return {
            "step": self.step,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "best": self._best,
            "losses": torch.tensor(self.losses),
            "watched": self.watched,
            "generator": self.generator.get_state(),
            "dropout": torch.get_rng_state(),
            "dropout_cuda": torch.cuda.get_rng_state(self.device) if cuda else None,
        }

    def _resume(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.seconds, self.watched = state["step"], state["seconds"], state["watched"]
        self._best = state["best"]
        self._losses = list(state["losses"].to(self.device).unbind())
        self.generator.set_state(state["generator"])
        torch.set_rng_state(state["dropout"])
        if state["dropout_cuda"] is not None:
            torch.cuda.set_rng_state(state["dropout_cuda"], self.device)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trained parameters: matrices, which decay, and others, which do not."""
    trained = _trained(model)
    groups = [([p for p in trained if p.dim() > 1], weight_decay), ([p for p in trained if p.dim() < 2], 0.0)]
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """On CUDA, kernels that give the same bits every time."""
    if device.type != "cuda":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
