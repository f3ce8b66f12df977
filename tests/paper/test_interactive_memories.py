"""The steppers of chapters 11 and 12 show what the package computes."""

import html
import json
import re

import torch

from ortho.attention.recurrent.delta import delta_rule
from paper.interactive import chunk_solve, delta_writes
from paper.theory import delta_memory

CELL = re.compile(r"<t[hd][^>]*>(.*?)</t[hd]>")


def body(page):
    """The texts of each row's cells, without the column headers."""
    return [CELL.findall(row) for row in re.findall("<tr>(.*?)</tr>", page.split("<tbody>")[1])]


def numbers(text):
    return [float(number.replace("−", "-")) for number in text.split(", ")]


def test_each_write_is_the_package_s():
    page = delta_writes.delta_writes()
    figures = json.loads(html.unescape(re.search('data-figures="(.*?)"', page)[1]))
    rows = body(page)
    assert len(rows) == len(figures["steps"]) == len(delta_writes.WRITES)
    both = torch.tensor(list(delta_writes.KEYS.values()), dtype=torch.float64)
    for t, (row, shown) in enumerate(zip(rows, figures["steps"], strict=True), 1):
        written = delta_writes.WRITES[:t]
        keys = torch.tensor([delta_writes.KEYS[name] for name, _ in written], dtype=torch.float64)
        values = torch.tensor([[value] for _, value in written], dtype=torch.float64)
        for memory, place in (("linear", 3), ("delta", 6)):
            answered = delta_memory.answers(memory, keys, values)[-1, 0]
            last = list(delta_writes.KEYS).index(written[-1][0])
            # Four digits are shown: the error is at most half a unit of the last
            assert abs(numbers(row[place])[last] - answered) <= 5e-4 * abs(answered)
            assert abs(shown[memory][last] - answered) < 1e-4
        # Read with both keys, the row's memories give the answers in the row.
        for place in (2, 5):
            memory = torch.tensor(numbers(row[place]), dtype=torch.float64)
            found = torch.tensor(numbers(row[place + 1]), dtype=torch.float64)
            assert torch.allclose(both @ memory, found, rtol=2e-3, atol=0)
        assert shown["wanted"][last] == written[-1][1]


def test_the_errors_are_those_of_the_recurrence():
    keys, values, beta, start = (
        torch.tensor(
            [[float(x) for x in row] if isinstance(row, tuple) else float(row) for row in rows], dtype=torch.float64
        )
        for rows in (chunk_solve.KEYS, chunk_solve.VALUES, chunk_solve.BETA, chunk_solve.START)
    )
    system = chunk_solve.solved()
    gates = {"beta": beta, "qk_l2norm": False, "initial_state": (start[:, None],), "return_state": True}
    _, (after,) = delta_rule(keys, keys, values[:, None], **gates)
    errors = torch.tensor([float(e) for e in system.errors], dtype=torch.float64)
    # Fractions on one side, six roundings of numbers up to 20 on the other
    assert (start + keys.T @ (beta * errors) - after[:, 0]).abs().max() < 1e-13
