"""The evidence on position DeltaNet: its figures against others found independently, and that they can fail."""

import math

import pytest
import torch

from paper.claims import judge
from paper.claims.evidence import gates_and_losses as forms
from paper.claims.evidence import positions as s3
from paper.claims.verdicts import Verdict
from paper.tasks import flip_flop


def test_the_bias_by_loops():
    gates = s3.gates(s3.normal(9, s3.INPUT, seed=2))
    u, u_keys, w, beta = (gates[name] for name in ("bias_queries", "bias_keys", "directions", "beta"))
    expected = torch.zeros(9, 9, dtype=torch.float64)
    for i in range(9):
        for j in range(i + 1):
            x = u[i]
            for t in range(i, j, -1):
                # Of the length 1 up to the 1e-6 that is added to its square.
                direction = w[t] / torch.sqrt(w[t] @ w[t] + 1e-6)
                x = x - beta[t] * (direction @ x) * direction
            expected[i, j] = u_keys[j] @ x / math.sqrt(s3.WIDTH)
    torch.testing.assert_close(s3.bias(**gates), expected, atol=1e-13, rtol=1e-13)


def test_the_identities_can_fail(monkeypatch):
    assert s3.unlike_delta_rule() < s3.EXACT
    assert s3.unlike_alibi() < s3.EXACT
    monkeypatch.setattr(s3, "slopes", lambda heads: [2.0**-7])
    assert s3.unlike_alibi() > 1e-3
    monkeypatch.setattr(s3, "unit", lambda x: x / 4)
    assert s3.unlike_delta_rule() > 1e-3


def test_what_another_input_changes():
    """Tokens enter through the gates; so do positions, which are the same in both inputs."""
    assert [s3.changed(of) for of in ("tokens", "sum", "positions")] == [100, 100, 0]
    with pytest.raises(KeyError):
        s3.changed("nothing")


def test_verdict_without_and_with_records(monkeypatch):
    """What the measured gains add: that nothing was measured, or the verdict of the gain."""

    def found(gains):
        monkeypatch.setattr(forms, "gained", lambda *arms: gains)
        return s3.position_delta_net()

    without = found({})
    assert without.verdict == Verdict.UNTESTABLE
    assert "'flip-flop' has no records of 5 runs each of 'position-delta' and 'softmax'" in without.ours
    better = found({"far": (30, 45)})
    assert better.verdict == Verdict.CONDITIONAL  # by the positions that gates are made of
    assert "far: 30 to 45 % (confirmed)" in better.ours
    assert found({"far": (-5, 0)}).verdict == Verdict.REFUTED
    assert found({"far": (-20, 90)}).verdict == Verdict.UNTESTABLE


def test_the_tests_are_those_beyond_training():
    task = flip_flop.TASK
    assert set(s3.BEYOND) == {test for test, draw in task.tests.items() if draw.keywords["first"] > task.longest}
    assert len(s3.BEYOND) == 6


def test_the_records_are_there():
    """A record that is lost takes a part of the claim's evidence with it."""
    gains = forms.gained("flip-flop", "position-delta", "softmax", s3.BEYOND)
    for test in s3.BEYOND:
        assert any(label.startswith(f"{test} on ") for label in gains)


def test_positions_alone_are_what_is_wrong_with_it():
    found = judge("S3.3d")
    assert "not at gates made of position embeddings alone: 0 %" in found.ours
