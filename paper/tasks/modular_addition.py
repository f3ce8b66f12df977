"""Addition modulo p of two numbers; a part of all pairs is never trained on.

The task of Power et al. (2022, arXiv:2201.02177), who saw models answer unseen pairs long after they knew those trained
on. There is nothing to search for: three tokens always stand in the same places, so that fixed attention weights are
enough, and so are random ones (Zhong & Andreas 2024, arXiv:2410.04368). The task does not separate forms of attention,
and is the control for tasks that do; it measures whether a rule was found, or pairs were learnt by heart.

Both orders of a pair belong to the same part: an answer cannot be had from a + b = b + a.
"""

from functools import partial

import torch

from paper.tasks.task import NONE, Batch, Task, any_of, first_of


def task(*, modulus: int = 97, trained: float = 0.5) -> Task:
    """The task modulo `modulus`: a sequence is a, b and an equals sign, which is token `modulus`, with the answer.

    A share `trained` of the pairs, orders not counted, is trained on, with replacement. Of the others one half is for
    validation and one for the test, which give their first examples whatever the generator, and raise ValueError for
    more than there are.
    """
    total = modulus * (modulus + 1) // 2
    most = round(trained * total)
    middle = most + (total - most) // 2
    generator = torch.Generator().manual_seed(0)  # says which pair is in which part
    pairs = torch.triu_indices(modulus, modulus).T[torch.randperm(total, generator=generator)]
    seen, chosen_by, unseen = (_both(part, generator) for part in pairs.tensor_split([most, middle]))
    return Task(
        name="modular-addition",
        title=f"addition modulo {modulus}, trained on a share of {trained:g} of all pairs",
        vocab_size=modulus + 1,
        longest=3,
        train=partial(any_of, len(seen), partial(_batch, seen, modulus)),
        validation=partial(first_of, len(chosen_by), partial(_batch, chosen_by, modulus)),
        tests={"unseen pairs": partial(first_of, len(unseen), partial(_batch, unseen, modulus))},
        solve=partial(_solve, modulus=modulus),
    )


def _both(pairs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """These pairs (n, 2) in both orders, mixed; equal numbers have only one."""
    every = torch.cat([pairs, pairs[pairs[:, 0] != pairs[:, 1]].flip(-1)])
    return every[torch.randperm(len(every), generator=generator)]


def _batch(part: torch.Tensor, modulus: int, picks: torch.Tensor) -> Batch:
    pairs = part[picks]
    tokens = torch.cat([pairs, torch.full_like(pairs[:, :1], modulus)], -1)
    answers = torch.full_like(tokens, NONE)
    answers[:, -1] = pairs.sum(-1) % modulus
    return Batch((tokens,), answers)


def _solve(tokens: list[int], *, modulus: int) -> list[int]:
    """The answer to one sequence, by counting on from one number by the other."""
    answer, left, _ = tokens
    for _ in range(left):
        answer = 0 if answer == modulus - 1 else answer + 1
    return [NONE, NONE, answer]
