"""How long converted models take at inference, over the time of the plain ones.

    python -m tools.converted_speed              # a torch encoder and a GPT-2, one token and 128
    python -m tools.converted_speed --rounds 400

The two models of a pair run in turn, the order drawn anew in each round, so that what else the machine does falls on
both alike. Printed are the median of the rounds' ratios, its 95 % interval (by order statistics) and the bound.
"""

import argparse
import copy
import random
import sys
from collections.abc import Callable
from math import sqrt
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from ortho.adapters import freeze_qk

BOUND = 1.03
TOKENS = (1, 128)
WIDTH, HEADS, LAYERS = 768, 12, 4
Call = Callable[[nn.Module, int], Any]


def encoder() -> tuple[nn.Module, Call]:
    """PyTorch's own, and its call on so many tokens."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
    given: dict[int, Tensor] = {n: torch.randn(1, n, WIDTH) for n in TOKENS}
    return nn.TransformerEncoder(layer, LAYERS), lambda model, n: model(given[n])


def gpt2() -> tuple[nn.Module, Call]:
    """That of transformers, with random weights."""
    from transformers import GPT2Config, GPT2Model

    model = GPT2Model(GPT2Config(n_embd=WIDTH, n_head=HEADS, n_layer=LAYERS))
    given: dict[int, Tensor] = {n: torch.randint(50257, (1, n)) for n in TOKENS}
    return model, lambda model, n: model(given[n], use_cache=False)


@torch.inference_mode()
def ratios(plain: nn.Module, converted: nn.Module, call: Call, tokens: int, rounds: int) -> list[float]:
    """Time of the converted model over that of the plain one, a number a round."""
    found, order = [], random.Random(0)
    for number in range(-5, rounds):  # the first few warm up
        pair = [("plain", plain), ("converted", converted)]
        order.shuffle(pair)
        times = {}
        for name, model in pair:
            start = perf_counter()
            call(model, tokens)
            times[name] = perf_counter() - start
        if number >= 0:
            found.append(times["converted"] / times["plain"])
    return found


def interval(values: list[float]) -> tuple[float, float]:
    """95 % for the median: between the order statistics 1.96 sqrt(n) / 2 places from the middle."""
    ordered, reach = sorted(values), 0.98 * sqrt(len(values))
    low, high = len(values) / 2 - reach, len(values) / 2 + reach
    return ordered[max(int(low), 0)], ordered[min(int(high) + 1, len(values) - 1)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    within = True
    for name, make in (("torch encoder", encoder), ("GPT-2", gpt2)):
        torch.manual_seed(0)
        plain, call = make()
        converted = freeze_qk(copy.deepcopy(plain))
        plain.eval(), converted.eval()
        for tokens in TOKENS:
            found = ratios(plain, converted, call, tokens, rounds)
            low, high = interval(found)
            within &= low <= BOUND
            print(
                f"{name}, {tokens:3} tokens: {median(found):.3f} ({low:.3f} to {high:.3f}), bound {BOUND}", flush=True
            )
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
