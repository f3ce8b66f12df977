"""Evidence on fixed, dynamic and positional patterns: its figures against others found independently."""

import math
from fractions import Fraction
from math import exp, sqrt

import pytest
import torch
from learning_fakes import along_budgets

from paper.claims import Verdict
from paper.claims.evidence import positional_patterns as positional
from paper.claims.shared import inputs

CONFIRMED, CORRECTED, REFUTED = Verdict.CONFIRMED, Verdict.CORRECTED, Verdict.REFUTED
CONDITIONAL, UNTESTABLE = Verdict.CONDITIONAL, Verdict.UNTESTABLE

# ----------------------------------------------------------------------------------------- Inputs to choose keys for


@pytest.mark.parametrize("kind", inputs.INPUTS)
def test_weights_by_hand(kind):
    q, k, _ = inputs.drawn(kind)
    for i in (0, 1, 40, inputs.TOKENS - 1):
        numbers = [exp(float(q[3, i] @ k[3, j]) / sqrt(inputs.WIDTH)) for j in range(i + 1)]
        expected = torch.tensor(numbers, dtype=torch.float64) / sum(numbers)
        torch.testing.assert_close(inputs.weights(kind)[3, i, : i + 1], expected, rtol=1e-12, atol=1e-15)
        assert not inputs.weights(kind)[3, i, i + 1 :].any()


def test_inputs_are_what_they_are_called():
    """Checked by correlations of unit vectors; for random vectors of width 32 these are about 0.2."""
    q, k, _ = inputs.drawn("one far key")
    copies = (q[..., None, :] - 2 * k[:, None]).abs().amax(-1) == 0
    assert (copies.sum(-1) == 1).all()
    assert not copies.triu(1).any()
    _, k, _ = inputs.drawn("topics")
    unit = k / k.norm(dim=-1, keepdim=True)
    stretch = unit.unflatten(1, (-1, inputs.STRETCH))
    assert (stretch @ stretch.mT).mean() > 0.7
    _, k, _ = inputs.drawn("drifting")
    unit = k / k.norm(dim=-1, keepdim=True)
    near, far = ((unit[:, gap:] * unit[:, :-gap]).sum(-1).mean() for gap in (1, 128))
    assert near > 0.6
    assert abs(far) < 0.2
    q, k, _ = inputs.drawn("flat")
    scores = q @ k.mT / sqrt(inputs.WIDTH)
    assert abs(scores.std() - 0.5) < 0.01


# ---------------------------------------------------------------------------------- The evidence on positional patterns


def test_empty_rows_by_hand():
    assert positional.empty_rows(5) == {"previous": [0], "next": [4], "left": [0, 1], "right": [3, 4]}
    assert positional.empty_rows(1) == {name: [0] for name in ("previous", "next", "left", "right")}


def test_the_printed_cubes():
    """They are 1, 8 and 27 of 36."""
    assert [positional.printed_left(4, j) for j in range(5)] == [Fraction(x, 36) for x in (1, 8, 27, 0, 0)]
    assert [positional.printed_left(1, j) for j in range(3)] == [0, 0, 0]
    assert [positional.printed_previous(2, j) for j in range(4)] == [0, 1, 0, 0]


def test_printed_positions():
    assert positional.printed_position(3, 0, 8) == pytest.approx(math.sin(3), abs=1e-15)
    assert positional.printed_position(3, 5, 8) == pytest.approx(math.cos(3 / 10000**0.5), abs=1e-15)


def record(task, shares, device="abacus", stage="trained"):
    right = {"correct_fraction": [0.9], "correct_without_fraction": [0.5]}
    return {
        "device": device,
        "configuration": {"task": task, "arm": "softmax", "seed": 1},
        "repetitions": {f"{stage}, head {i}": {"absolute_fraction": [x], **right} for i, x in enumerate(shares)},
        "facts": {"nearest": {f"{stage}, head {i}": "start" for i in range(len(shares))}},
    }


def test_heads_are_counted_by_task(stored):
    records = [record("recall", [0.2, 0.6]), record("recall", [0.7]), record("parity", [0.1])]
    for other in records:
        other["repetitions"]["untrained, head 0"] = other["repetitions"]["trained, head 0"]
        other["facts"]["nearest"]["untrained, head 0"] = "start"
    stored(positional_heads=records)
    found = positional.heads()
    assert found.verdict == UNTESTABLE
    assert "recall 2 and 0 of 3, parity 0 and 0 of 1 (abacus)" in found.remark


def pruned(*shares):
    """A record of an encoder of two layers of two heads: shares of faultless sentences by number of heads removed."""
    tests = {f"{n} removed, least needed first": {"faultless_fraction": [share]} for n, share in enumerate(shares)}
    return {"device": "abacus", "configuration": {"seed": 1, "H": 2, "L": 2}, "repetitions": tests}


@pytest.mark.parametrize(
    ("positions", "pruning", "verdict"),
    [
        ([0.9, 0.6, 0.1], pruned(1.0, 1.0, 0.99), CONFIRMED),
        ([0.9, 0.1, 0.1], pruned(1.0, 1.0, 0.99), REFUTED),
        ([0.9, 0.6, 0.1], pruned(1.0, 0.5, 0.5), REFUTED),
    ],
)
def test_encoders_are_judged_once_there_are_records(stored, positions, pruning, verdict):
    """Encoders of one layer of three heads. Only standard ones count, once all seeds have run."""
    trained = along_budgets("8 learned", (3.0,), (10,), positional=[positions])
    others = along_budgets("8 frozen", (3.0,), (10,), positional=[[1.0]])
    stored(positional_heads=[record("recall", [0.5])], pruning=[pruning], translation_budgets=[*trained, *others])
    assert positional.heads().verdict == verdict
    stored(positional_heads=[record("recall", [0.5])], pruning=[pruning], translation_budgets=[*trained[1:], *others])
    assert "no records of the attention maps of a trained encoder" in positional.heads().ours


def test_without_a_record_nothing_is_counted(stored):
    assert positional.heads().verdict == UNTESTABLE
    assert "more than half" not in positional.heads().ours
