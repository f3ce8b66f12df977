"""The evidence on position DeltaNet: its figures against others found independently, and that they can fail."""

import math

import pytest
import torch

from ortho.claims import judge
from ortho.claims.s3 import positions as s3
from ortho.claims.verdicts import Verdict


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
    """What the measured gains add: nothing where there are none, and a refutation where none shows."""

    def verdict(gains, control):
        monkeypatch.setattr(s3, "gained", lambda *arms: (gains, control))
        return s3.position_delta_net()

    assert "right answers" not in verdict({}, {}).source
    better = verdict({"far": (30, 45)}, {"far": (-15, 15)})
    assert better.verdict == Verdict.CONDITIONAL
    assert "30 to 45 % (control -15 to 15 %)" in better.ours
    assert verdict({"far": (-5, 0)}, {"far": (-15, 15)}).verdict == Verdict.REFUTED
    assert verdict({"far": (-20, 90)}, {"far": (-30, 30)}).verdict == Verdict.UNTESTABLE


def test_positions_alone_are_what_is_wrong_with_it():
    found = judge("S3.3d")
    assert "not at gates made of position embeddings alone: 0 %" in found.ours
