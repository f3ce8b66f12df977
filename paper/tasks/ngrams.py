"""A language of its own in each sequence: which symbol has followed the last few ones most often so far?

In-context n-grams, as in Akyürek et al. (2024, arXiv:2401.12973) and Edelman et al. (2024, arXiv:2402.11004). In each
sequence every context, the last `order` symbols, has a favourite that follows it with probability `likely`; else any
symbol follows. Favourites are drawn uniformly, anew for each sequence, so that only the sequence says anything about
them: the Bayes predictor's likeliest next symbol is the one that has followed the context most often. That is the
answer, and not the symbol that was drawn, which nobody can know; so all answers can be right. A place is asked for if
its context stood before and one symbol leads.

The task takes several matches at once, while copying takes one, and contexts of several symbols. The more contexts
there are, the more keys have to be told apart.
"""

from collections import Counter
from functools import partial

import torch
from torch.nn.functional import one_hot

from paper.tasks.task import NONE, Batch, Task

LIKELY = 0.75  # how often a favourite follows where it could


def task(*, order: int = 2, length: int = 64, symbols: int = 4) -> Task:
    """The task with contexts of `order` symbols, in sequences of `length` tokens."""
    draw = partial(_draw, order=order, length=length, symbols=symbols)
    return Task(
        name="ngrams",
        title=f"likeliest symbol after {order} others, in {length} tokens of {symbols} symbols",
        vocab_size=symbols,
        longest=length,
        train=draw,
        validation=draw,
        tests={f"order: {order}": draw},
        solve=partial(_solve, order=order),
    )


def _draw(count: int, generator: torch.Generator, *, order: int, length: int, symbols: int) -> Batch:
    contexts = symbols**order
    favourites = torch.randint(symbols, (count, contexts), generator=generator)
    tokens = torch.randint(symbols, (length, count), generator=generator)  # what follows where the favourite does not
    kept = torch.rand(length, count, generator=generator) < LIKELY
    context = torch.zeros(count, dtype=torch.long)
    codes = []  # of the context that each token ends
    for t in range(length):
        if t >= order:
            tokens[t] = torch.where(kept[t], favourites.gather(1, context[:, None])[:, 0], tokens[t])
        context = (context * symbols + tokens[t]) % contexts
        codes.append(context)
    return Batch((tokens.mT.contiguous(),), _answers(tokens.mT, torch.stack(codes, 1), order, symbols))


def _answers(tokens: torch.Tensor, codes: torch.Tensor, order: int, symbols: int) -> torch.Tensor:
    """The leading symbol of each place, (count, N), from which symbols came after the same context before."""
    same = (codes[:, :, None] == codes[:, None, :]).tril(-1)[:, :, :-1]
    same[:, :, : order - 1] = False  # no whole context yet
    counts = same.float() @ one_hot(tokens[:, 1:], symbols).float()  # (count, N, symbols): numbers, and exact
    best = counts.max(-1)
    leads = (best.values > 0) & ((counts == best.values[..., None]).sum(-1) == 1)
    leads[:, : order - 1] = False
    return torch.where(leads, best.indices, NONE)


def _solve(tokens: list[int], *, order: int) -> list[int]:
    """The answers to one sequence, by a dictionary of counts."""
    followers: dict[tuple[int, ...], Counter[int]] = {}
    answers = []
    for t in range(len(tokens)):
        context = tuple(tokens[max(0, t - order) : t])
        if len(context) == order:
            followers.setdefault(context, Counter())[tokens[t]] += 1
        seen = followers.get(tuple(tokens[max(0, t - order + 1) : t + 1]), Counter()).most_common(2)
        leads = len(seen) == 1 or (len(seen) == 2 and seen[0][1] > seen[1][1])
        answers.append(seen[0][0] if leads else NONE)
    return answers
