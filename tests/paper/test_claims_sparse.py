"""Evidence on fixed, dynamic and positional patterns: its figures against others found independently."""

from math import exp, sqrt

import pytest
import torch

from paper.claims.shared import inputs

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
