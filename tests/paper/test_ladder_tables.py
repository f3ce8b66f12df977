"""Tables of the last bytes that are stored beside the ladder."""

import pytest
import torch

from paper.experiments.learning import ladder, ladder_tables
from paper.tasks import counting, text
from paper.tasks.text import Parts


@pytest.fixture
def short(monkeypatch):
    """A text of 4,000 bytes in place of the longer ones, in windows of 16."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(97, 101, (4000,), generator=generator, dtype=torch.uint8).numpy().tobytes()
    parts = Parts(drawn[:3000], drawn[3000:3500], drawn[3500:])
    monkeypatch.setitem(ladder.TEXTS, "python", lambda: parts)
    monkeypatch.setitem(ladder.SIZES, "python", {"B": 2, "N": 16, "tested": 20})
    monkeypatch.setattr(ladder_tables, "BASE", 5)
    return parts


def test_as_many_windows_as_a_run_draws(short):
    """The stored figures are those of tables counted on B windows for each step."""
    found = ladder_tables.run(ladder_tables.case("python", 4))
    task = text.language_modelling("python", "the next byte", short, 16)
    assert found["repetitions"]["tables"]["test_bits"] == pytest.approx(counting.task_bits(task, 40, 20, 5), abs=1e-6)


def test_read_back():
    """By budget, whatever the order of the records."""
    records = [
        {"configuration": {"text": name, "budget": budget}, "repetitions": {"tables": {"test_bits": [budget, 1.0]}}}
        for name, budget in (("python", 4), ("novels", 1), ("python", 2))
    ]
    assert list(ladder_tables.bits(records, "python").items()) == [(2, (2, 1.0)), (4, (4, 1.0))]
    assert ladder_tables.line(records[0]) == "the last 2 bytes: 1.0000 bits a byte"


def test_counted_once():
    """There is a case for every budget of the ladder."""
    budgets = [case["budget"] for case in ladder_tables.cases("cpu") if case["text"] == "python"]
    assert sorted(budgets) == [1, 2, 4, 8, 16, 32, ladder.LONGEST]


def test_refused():
    with pytest.raises(ValueError, match=r"^name: "):
        ladder_tables.case("poems", 1)
    with pytest.raises(ValueError, match=r"^budget: "):
        ladder_tables.case("python", 0)
