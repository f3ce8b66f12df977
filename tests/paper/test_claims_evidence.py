"""Evidence of `paper.claims.shared`: its figures against others found independently."""

from math import sqrt

import pytest
import torch
from experiment_fakes import made_up

from paper.claims.shared import gates_and_losses as forms
from paper.claims.shared import inputs, methods
from paper.claims.shared.printed_models import whole_limit


def test_limits_of_whole_models_by_hand():
    """Each model's products, with pairs of tokens as either form counts them; the form that allows more is the
    bound."""
    N, d = 512, 768
    pooler = 3 * 2 * d * d
    step = 12 * (72 * N * d**2 + 12 * N**2 * d) + pooler
    assert whole_limit("BERT-base") == pytest.approx(100 * (step / (step - 12 * 4 * N * d**2) - 1))
    N, d = 1024, 1024
    read_out, pairs = 3 * 2 * N * d * 50257, 14 * d * N * (N + 1) / 2  # fused: forward 4, backward 10, by pairs
    step = 24 * (72 * N * d**2 + pairs) + read_out
    assert whole_limit("GPT-2 medium") == pytest.approx(100 * (step / (step - 24 * 4 * N * d**2) - 1))
    N, d = 197, 768
    ends = 2 * 2 * 196 * d * d + 3 * 2 * 1000 * d  # patches (of the gradients only the weights'), and the head
    step = 12 * (72 * N * d**2 + 12 * N**2 * d) + ends
    assert whole_limit("ViT") == pytest.approx(100 * (step / (step - 12 * 4 * N * d**2) - 1))


def test_misplaced_weight():
    exact = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    assert methods.misplaced(exact, exact) == 0
    assert methods.misplaced(exact.flip(1), exact) == 50  # all of the first row, none of the second


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


# ------------------------------------------------------------------------------------------------- Gains in the records

BEYOND = ("tokens 17 to 32", "tokens 33 to 64", "tokens 65 to 128")


def records(product, one, device="cpu-x"):
    """Records with given shares of right answers by arm, as the experiment stores them, the longest test first."""
    for arm, shares in (("delta-product", product), ("delta, beta to 2", one)):
        for seed, share in enumerate(shares, 1):
            answered = {**dict.fromkeys(reversed(BEYOND), share), "tokens 1 to 16": 1.0}
            tests = {t: {"correct_fraction": [x], "faultless_fraction": [x]} for t, x in answered.items()}
            yield made_up("permutations", {"arm": arm, "seed": seed, "rate": 1e-2}, tests, device=device)


HIGH, LOW = (0.9, 0.92, 0.94, 0.96, 0.98), (0.3, 0.31, 0.32, 0.33, 0.34)
ARMS = ("permutations", "delta-product", "delta, beta to 2", BEYOND)


def test_the_interval_of_a_gain_by_hand(stored):
    """With three tests, each end may leave out two of the 25 differences: 4 of 252 choices have fewer than three."""
    stored(permutations=list(records(HIGH, LOW)))
    gains = forms.gained(*ARMS)
    assert list(gains) == [f"{test} on cpu-x" for test in BEYOND]
    assert set(gains.values()) == {(58.0, 66.0)}  # of the differences 56, 57, 58, ... 66, 67, 68
    stored(permutations=[*records(HIGH, LOW), *records(HIGH, LOW, "cuda-y")])
    assert set(forms.gained(*ARMS).values()) == {(57.0, 67.0)}
