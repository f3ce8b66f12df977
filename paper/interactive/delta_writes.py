"""Writes into a memory of one column, step by step: what the linear memory and the delta rule answer to each key."""

from html import escape
from typing import NamedTuple

import torch

from ortho.attention.recurrence import token_by_token
from paper.interactive.markup import attribute, decimal

__all__ = ["KEYS", "STORY", "WRITES", "Step", "delta_writes", "steps"]

KEYS = {"k": (1.0, 0.0), "k′": (0.6, 0.8)}
STORY = 3  # the write that the chapter speaks of first: a key has a second value
WRITES = (("k", 3.0), ("k′", 10.0), ("k", 5.0), ("k′", 10.0), ("k", 5.0), ("k′", 10.0))


class Step(NamedTuple):
    """A write, and each memory after it. `linear` and `delta` are their answers to the keys, in the order of `KEYS`."""

    written: str
    linear_memory: list[float]
    linear: list[float]
    error: float
    delta_memory: list[float]
    delta: list[float]
    wanted: list[float | None]  # the last value of each key, None before it has one


def steps() -> list[Step]:
    """All `WRITES`, in their order, into two memories that are empty at first."""
    keys = torch.tensor([KEYS[name] for name, _ in WRITES], dtype=torch.float64)
    values = torch.tensor([[value] for _, value in WRITES], dtype=torch.float64)
    linear = delta = torch.zeros(2, 1, dtype=torch.float64)
    wanted: dict[str, float | None] = dict.fromkeys(KEYS)
    found = []
    for t, (name, value) in enumerate(WRITES):
        key, new = keys[t : t + 1], values[t : t + 1]
        error = float(new - key @ delta)
        linear, delta = (
            token_by_token(key, key, new, None, None, S, is_causal=False, erase=erase)[1]
            for S, erase in ((linear, False), (delta, True))
        )
        wanted[name] = value
        written = f"{value:g} at {name}"
        sums, corrected = ([float(S[0]), float(S[1])] for S in (linear, delta))
        found.append(Step(written, sums, _answers(linear), error, corrected, _answers(delta), list(wanted.values())))
    return found


def delta_writes() -> str:
    """The table of all steps; a script adds a control that goes through it from `STORY`, and draws the answers as
    bars."""
    found = steps()
    rows = "".join(
        f'<tr><th scope="row">{i}</th><td>{escape(step.written)}</td><td>{_numbers(step.linear_memory)}</td>'
        f"<td>{_numbers(step.linear)}</td><td>{_numbers([step.error])}</td><td>{_numbers(step.delta_memory)}</td>"
        f"<td>{_numbers(step.delta)}</td></tr>"
        for i, step in enumerate(found, 1)
    )
    answers = f"answers {', '.join(KEYS)}"
    figures = [
        {"wanted": step.wanted, **{name: [round(x, 4) for x in getattr(step, name)] for name in ("linear", "delta")}}
        for step in found
    ]
    data = attribute({"keys": list(KEYS), "steps": figures})
    return (
        f'<div class="stepper delta-writes" data-figures="{data}" data-start="{STORY}">'
        '<table><caption>Every write, and both memories after it</caption><thead><tr><th scope="col">step</th>'
        '<th scope="col">written</th><th scope="col">linear <i>S</i></th>'
        f'<th scope="col">linear: {answers}</th><th scope="col">error</th><th scope="col">delta rule’s <i>S</i>'
        f'</th><th scope="col">delta rule: {answers}</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _answers(S: torch.Tensor) -> list[float]:
    return [float(torch.tensor(key, dtype=S.dtype) @ S[:, 0]) for key in KEYS.values()]


def _numbers(values: list[float]) -> str:
    return ", ".join(decimal(value, ".1f") for value in values)
