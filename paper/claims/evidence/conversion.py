r"""S0, sections 5.1 and 5.2: conversion to the standard form, fine-tuning, freezing further.

What is trained here is small on purpose: a two-block language model that learns to repeat eight random tokens, in
float64, so that the printed figures are the same on every machine.
"""

import copy
import io
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ortho import cost
from ortho.adapters.conversion import to_standard
from ortho.cost.counting import flops_of
from ortho.layers.multihead import MultiheadAttention
from ortho.models.language_model import LanguageModel
from paper import experiments
from paper.claims import figures
from paper.claims.ledger import evidence
from paper.claims.outcomes import BITS_A_BYTE, loses_nothing
from paper.claims.rules import all_of, counted, holds
from paper.claims.shared.common import Arms, relative_error, without_records
from paper.claims.verdicts import Finding
from paper.experiments.learning import fine_tuning

CHAPTER = "06-conversion"

VOCABULARY, HALF = 16, 8  # tokens to choose from, tokens to repeat
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 32, "num_heads": 2, "num_layers": 2, "max_length": 16}
STEPS = 150  # by then the task is solved
SEEDS = {"weights": 0, "training": 1, "fine-tuning": 2, "held out": 3, "renaming": 4, "redraw": 5}


def generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(SEEDS[name])


def sequences(task: str, count: int, draw: torch.Generator) -> Tensor:
    """(count, 16) tokens: eight at random, and then by `task` something made of them.

    'repeat': the same eight. 'rename': each replaced by its image under one permutation of the vocabulary. 'reverse':
    the same eight from the last to the first.
    """
    first = torch.randint(VOCABULARY, (count, HALF), generator=draw)
    if task == "rename":
        return torch.cat([first, torch.randperm(VOCABULARY, generator=generator("renaming"))[first]], 1)
    return torch.cat([first, first.flip(1) if task == "reverse" else first], 1)


def loss(model: LanguageModel, tokens: Tensor) -> Tensor:
    """Cross-entropy of the second half in nats a token; uniform guessing gives log 16."""
    return cross_entropy(model(tokens[:, :-1])[:, HALF - 1 :].flatten(0, 1), tokens[:, HALF:].flatten())


@torch.enable_grad()
def train(
    model: LanguageModel,
    steps: int,
    *,
    task: str = "repeat",
    seed: str = "training",
    learning_rate: float = 3e-3,
    watch: Callable[[LanguageModel], object] = lambda _: None,
) -> list[float]:
    """AdamW on fresh batches of 32, in place; returns the loss before each step. `watch` is called after each."""
    draw, losses = generator(seed), []
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=learning_rate, fused=True)
    for _ in range(steps):
        value = loss(model, sequences(task, 32, draw))
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
        losses.append(value.item())
        watch(model)
    return losses


def held_out(task: str = "repeat") -> Tensor:
    return sequences(task, 256, generator("held out"))


def untrained(projection: str, seed: str = "weights", **sizes: int) -> LanguageModel:
    """A model of `SIZES`, except for the sizes that are given."""
    return LanguageModel(**SIZES | sizes, projection=projection, generator=generator(seed), dtype=torch.float64)


@cache
def _trained(projection: str) -> LanguageModel:
    model = untrained(projection)
    train(model, STEPS)
    return model


def trained(projection: str) -> LanguageModel:
    """A copy of the model that has learnt to repeat, with 'learned' or 'frozen' queries and keys."""
    return copy.deepcopy(_trained(projection))


def checkpoint(model: torch.nn.Module) -> dict[str, Tensor]:
    """The state dict, written as a file would be and read back with nothing but tensors allowed in it."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def loaded(projection: str, weights: dict[str, Tensor]) -> LanguageModel:
    """A model of this kind with these weights; a name that is missing or left over raises."""
    model = untrained(projection)
    model.load_state_dict(weights)
    return model


def redrawn(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights with every W_Q and W_K replaced by a fresh random orthogonal matrix."""
    fresh = untrained("frozen", "redraw").state_dict()
    return {name: fresh[name] if ".projection." in name else weight for name, weight in weights.items()}


@torch.no_grad()
def decode(model: LanguageModel, tokens: Tensor) -> Tensor:
    """Logits (B, N, vocabulary) from one token at a time, with the keys and values of earlier ones cached."""
    state, logits = None, []
    for token in tokens.split(1, 1):
        one, state = model(token, initial_state=state, return_state=True)
        logits.append(one)
    return torch.cat(logits, 1)


def differing(a: Tensor, b: Tensor) -> int:
    """How many entries are not equal bit for bit."""
    return int((a != b).sum())


def torch_error(layer: MultiheadAttention) -> float:
    """Relative difference of a layer and its `nn.MultiheadAttention` on random causal input."""
    x = torch.randn(4, 12, layer.d_model, generator=generator("held out"), dtype=layer.weight_v.dtype)
    future = torch.ones(12, 12, dtype=torch.bool).triu(1)
    with torch.no_grad():
        return relative_error(
            layer.to_torch()(x, x, x, attn_mask=future, need_weights=False)[0], layer(x, is_causal=True)
        )


def torch_tolerance(d_model: int = SIZES["d_model"]) -> float:
    """What the order of summation can change in float64: d roundings in each of four products in a row."""
    return 4 * d_model * torch.finfo(torch.float64).eps


def defect(model: LanguageModel) -> float:
    """How far the model's W_Q and W_K are from orthogonal: the mean of |W^T W - I| / |I|, Frobenius."""
    weights = [w for name, w in model.state_dict().items() if ".projection." in name]
    identity = torch.eye(len(weights[0]), dtype=weights[0].dtype)
    return sum(float((w.T @ w - identity).norm() / identity.norm()) for w in weights) / len(weights)


def inference_cost(model: LanguageModel) -> dict[str, int]:
    """Counted: FLOPs of reading 16 tokens, of one token decoded after 15, the cache's bytes, the weights' bytes."""
    tokens = held_out()[:1]
    with torch.no_grad():
        _, state = model(tokens[:, :-1], return_state=True)
    return {
        "forward": flops_of(model, tokens),
        "decode": flops_of(model, tokens[:, -1:], initial_state=state, return_state=True),
        "cache": sum(t.nbytes for block in state[1] for t in block),
        "weights": sum(t.nbytes for t in model.state_dict().values()),
    }


def freeze(model: LanguageModel, blocks: int, *, embeddings: bool = True) -> LanguageModel:
    """Freeze the lowest `blocks` blocks, and with `embeddings` the token and position embeddings; in place."""
    for block in model.blocks[:blocks]:
        block.requires_grad_(False)
    if embeddings:
        model.embed_tokens.requires_grad_(False)
        if model.embed_positions is not None:
            model.embed_positions.requires_grad_(False)
    return model


def backward_flops(
    N: int, d: int, H: int, L: int, *, vocab_size: int, projection: str, blocks: int = 0, embeddings: bool = False
) -> int:
    """FLOPs of a model's backward pass, one sequence, with the lowest `blocks` blocks (and the `embeddings`) frozen.

    A frozen matrix saves its weight gradient, 2 FLOPs a token and entry. A frozen block saves the whole of its
    backward pass if nothing below it is trained.
    """
    one = cost.block(1, N, d, H, projection=projection, causal=True)
    weight_gradients = 2 * N * (one.trained - 2 * d)  # the two norms' gains need no product
    passed = 0 if embeddings else one.backward - weight_gradients
    read_out = 2 * N * d * vocab_size
    return (L - blocks) * one.backward + blocks * passed + (1 if embeddings else 2) * read_out


def backward_counted(projection: str, *, blocks: int = 0, embeddings: bool = False, layers: int = 4) -> tuple[int, int]:
    """(counted, declared) FLOPs of the backward pass of a small model, see `backward_flops`."""
    model = freeze(untrained(projection, num_layers=layers), blocks, embeddings=embeddings)
    tokens = sequences("repeat", 1, generator("held out"))
    sizes = tokens.shape[1], SIZES["d_model"], SIZES["num_heads"], layers
    frozen: dict[str, Any] = {"projection": projection, "blocks": blocks, "embeddings": embeddings}
    return cost.of(model, tokens).backward, backward_flops(*sizes, vocab_size=VOCABULARY, **frozen)


def freezable(layers: int = 4) -> int:
    """How many further blocks of an ORA model can be frozen so that a step trains exactly what is left."""
    possible = 0
    for blocks in range(1, layers + 1):
        model = freeze(untrained("frozen", num_layers=layers), blocks)
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        train(model, 1)
        moved = {name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])}
        possible += moved == {name for name, weight in model.named_parameters() if weight.requires_grad}
    return possible


# Second stages with frozen W_Q and W_K, compared in bits a byte with one that trains everything.
TUNED = {"frozen as they were trained": "QK frozen", "drawn anew, orthogonal": "QK redrawn"}


def tuned() -> Finding:
    """What fine-tuning loses with frozen queries and keys, by the records."""
    statement = "fine-tuning loses nothing with frozen $W_Q$ and $W_K$"
    records = experiments.load("fine-tuning")
    runs = fine_tuning.by_arm(records, experiments.judged_device(records)) if records else {}
    arms = Arms(runs, "new", BITS_A_BYTE)
    found = {label: arms.reported(arm, "all trained") for label, arm in TUNED.items()}
    told = {label: one for label, one in found.items() if one is not None}
    if not told:
        return without_records(statement, "fine-tuning")
    bits = {name: f"{runs[name].mean('new'):.2f}" for name in ("all trained", *TUNED.values(), "from scratch")}
    return loses_nothing(statement, told, unit=" bits a byte").noting(f"Bits a byte: {figures.listing(bits)}")


@torch.no_grad()
def pretrained_losses() -> dict[str, tuple[float, float]]:
    """Held-out loss before and after each way to turn a trained model into ORA, before any further training."""
    standard, ora, tokens = trained("learned"), trained("frozen"), held_out()
    weights = checkpoint(standard)
    ways = {
        "an ORA model as it is": (ora, ora),
        "a standard model with $W_Q$ and $W_K$ frozen as trained": (standard, loaded("frozen", weights)),
        "a standard model with random orthogonal ones in their place": (standard, loaded("frozen", redrawn(weights))),
    }
    return {name: (float(loss(old, tokens)), float(loss(new, tokens))) for name, (old, new) in ways.items()}


@evidence("S0.5.1b", chapter=CHAPTER)
def frozen_in_tuning() -> Finding:
    attention = {p: cost.layer(1, 1, 768, 12, projection=p).trained for p in ("learned", "frozen")}
    parts = {
        "fits": tuned(),
        "attention's weights that are trained": counted(
            {"$d = 768$": attention["learned"] // 2}, {"$d = 768$": attention["frozen"]}
        ),
        "further layers": counted({"blocks frozen besides, of 4": 4}, {"blocks frozen besides, of 4": freezable()}),
    }
    return all_of(parts).noting("A standard model allows the same: neither needs an orthogonal matrix")


@evidence("S0.5.2a", chapter=CHAPTER)
def conversion() -> Finding:
    model, tokens = trained("frozen"), held_out()
    standard, restored = to_standard(model), loaded("learned", checkpoint(model))
    with torch.no_grad():
        expected = model(tokens)
        pairs = {
            "a whole sequence": differing(standard(tokens), expected),
            "token by token": differing(decode(standard, tokens), decode(model, tokens)),
            "from a checkpoint": differing(restored(tokens), expected),
        }
    error = max(torch_error(layer) for layer in model.modules() if isinstance(layer, MultiheadAttention))
    ours, theirs = inference_cost(model), inference_cost(standard)
    parts = {
        f"logits that differ, of {expected.numel():,}": counted(dict.fromkeys(pairs, 0), pairs),
        "as PyTorch's own layer": holds("the same outputs", error, torch_tolerance()),
    }
    return all_of(parts).noting(f"It saves nothing: {theirs['forward']:,} FLOPs converted, {ours['forward']:,} before")
