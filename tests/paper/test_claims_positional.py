"""The evidence on positional patterns: its figures against others found independently, and what would refute."""

import math
from fractions import Fraction

import pytest
import torch

from ortho.attention.untrained.patterns import Shift
from ortho.attention.untrained.positional_attention import PATTERNS
from ortho.layers.hybrid import HybridAttention
from paper import experiments
from paper.claims import Verdict
from paper.claims.evidence import positional_patterns as s2

CONFIRMED, REFUTED, UNTESTABLE = Verdict.CONFIRMED, Verdict.REFUTED, Verdict.UNTESTABLE


@pytest.fixture
def swapped(monkeypatch):
    """Puts another pattern in the place of a name."""
    return lambda name, pattern: monkeypatch.setitem(PATTERNS, name, pattern)


@pytest.mark.parametrize("name", s2.NAMED)
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_weights_are_the_definitions(name, is_causal):
    """Quotients of integers below 2^53, as `s2.ROUNDED` has it."""
    expected = PATTERNS[name].weights(9, is_causal=is_causal)
    torch.testing.assert_close(s2.weights(name, 9, is_causal=is_causal), expected, rtol=0, atol=s2.ROUNDED)


def test_a_pattern_that_is_off_is_noticed(swapped):
    assert [s2.off(name) for name in s2.NAMED] == [0] * 7
    swapped("left", Shift("left", -2))  # of i - 1 named keys it has one
    assert s2.off("left") == sum(max(0, i - 2) for n in range(1, s2.TOKENS + 1) for i in range(n))
    assert s2.seven().verdict == REFUTED


def test_ends_the_wrong_way_round_are_noticed(swapped):
    assert s2.not_heaviest() == 0
    swapped("end", PATTERNS["start"])
    assert s2.off("end") == 0
    assert s2.not_heaviest() == sum(range(2, s2.TOKENS + 1))


def test_a_learned_head_has_parameters():
    assert s2.trained(list(s2.NAMED)) == 0
    layer = HybridAttention(16, 4, heads={"positional": 2, "learned": 2})
    assert sum(p.numel() for p in layer.parameters()) == 2 * 16 * 16 + 2 * 16 * 8


def test_empty_rows_by_hand():
    assert s2.empty_rows(5) == {"previous": [0], "next": [4], "left": [0, 1], "right": [3, 4]}
    assert s2.empty_rows(1) == {name: [0] for name in ("previous", "next", "left", "right")}


@pytest.mark.parametrize(("name", "found"), [("previous", s2.previous), ("left", s2.left)])
def test_a_printed_pattern_is_held_against_the_package(name, found, swapped):
    assert found().verdict == CONFIRMED
    swapped(name, PATTERNS["start"])
    assert found().verdict == REFUTED


def test_the_printed_cubes():
    """1, 8 and 27 of 36."""
    assert [s2.printed_left(4, j) for j in range(5)] == [Fraction(x, 36) for x in (1, 8, 27, 0, 0)]
    assert [s2.printed_left(1, j) for j in range(3)] == [0, 0, 0]
    assert [s2.printed_previous(2, j) for j in range(4)] == [0, 1, 0, 0]


def test_printed_positions(monkeypatch):
    assert s2.printed_position(3, 0, 8) == pytest.approx(math.sin(3), abs=1e-15)
    assert s2.printed_position(3, 5, 8) == pytest.approx(math.cos(3 / 10000**0.5), abs=1e-15)
    assert s2.sinusoids().verdict == CONFIRMED
    right = s2.sinusoidal_positions
    monkeypatch.setattr(s2, "sinusoidal_positions", lambda *x, **o: right(*x, **o).flip(-1))
    assert s2.sinusoids().verdict == REFUTED


def record(task, shares, device="abacus", stage="trained"):
    return {
        "device": device,
        "configuration": {"task": task, "arm": "softmax", "seed": 1},
        "repetitions": {f"{stage}, head {i}": {"absolute_fraction": [x]} for i, x in enumerate(shares)},
        "facts": {"nearest": {f"{stage}, head {i}": "start" for i in range(len(shares))}},
    }


def test_heads_are_counted_by_task(monkeypatch):
    records = [record("recall", [0.2, 0.6]), record("recall", [0.7]), record("parity", [0.1])]
    for other in records:
        other["repetitions"]["untrained, head 0"] = {"absolute_fraction": [0.9]}
        other["facts"]["nearest"]["untrained, head 0"] = "start"
    monkeypatch.setattr(experiments, "load", lambda name: records if name == "positional-heads" else [])
    found = s2.heads()
    assert found.verdict == UNTESTABLE
    assert "more than half: 2 of 3 in recall, 0 of 1 in parity (abacus)" in found.ours


def test_without_a_record_nothing_is_counted(monkeypatch):
    monkeypatch.setattr(experiments, "load", lambda _: [])
    assert s2.heads().verdict == UNTESTABLE
    assert "more than half" not in s2.heads().ours
