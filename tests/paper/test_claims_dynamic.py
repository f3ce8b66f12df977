"""The evidence on dynamic sparsity, in two documents: its figures against others that are found independently."""

from itertools import pairwise
from math import exp, inf, sqrt

import pytest
import torch

from ortho.attention.selected.sparse_linear import sparse_linear_cost
from paper.claims import Verdict, judge
from paper.claims.evidence import dynamic_sparsity as data
from paper.claims.evidence import dynamic_sparsity as s1
from paper.claims.evidence import dynamic_sparsity as s4

CONFIRMED, CONDITIONAL, REFUTED = Verdict.CONFIRMED, Verdict.CONDITIONAL, Verdict.REFUTED

# --------------------------------------------------------------------------------------------------------- document S1


def test_choices_by_content():
    assert judge("S1.2.3b").verdict == CONFIRMED
    q, k = s1.operands(2)
    for choose in s1.BY_CONTENT.values():
        mask = choose(q, k)
        assert not mask.triu(1).any()
        assert int(mask.sum(1).max()) == s1.KEPT


def test_a_fixed_pattern_is_noticed(monkeypatch):
    monkeypatch.setitem(s1.BY_CONTENT, "clusters", lambda q, k: torch.eye(len(q)).bool())
    assert s1.chosen_by_content().verdict == CONDITIONAL
    monkeypatch.setattr(s1, "BY_CONTENT", {"clusters": lambda q, k: torch.eye(len(q)).bool()})
    assert s1.chosen_by_content().verdict == REFUTED


def test_pairs_across_clusters_are_noticed(monkeypatch):
    assert s1.strangers() == 0
    monkeypatch.setattr(s1, "by_clusters", s1.by_sample)
    assert s1.strangers() > 0
    assert s1.chosen_by_content().verdict == REFUTED


@pytest.mark.parametrize("power", [0, 2])
def test_a_sample_by_something_else_is_noticed(monkeypatch, power):
    """By other powers of the lengths: shares of 4,000 draws have standard errors of 0.008, and are off by 0.05 or more
    somewhere."""
    drawn = s1.sampled_importance
    monkeypatch.setattr(s1, "sampled_importance", lambda k, generator: drawn(k**power, generator=generator))
    assert s1.off_by() > s1.SIGMAS
    assert s1.chosen_by_content().verdict == REFUTED


# --------------------------------------------------------------------------------------------------------- document S4


@pytest.mark.parametrize("kind", data.INPUTS)
def test_weights_by_hand(kind):
    q, k, _ = data.drawn(kind)
    for i in (0, 1, 40, data.TOKENS - 1):
        numbers = [exp(float(q[3, i] @ k[3, j]) / sqrt(data.WIDTH)) for j in range(i + 1)]
        expected = torch.tensor(numbers, dtype=torch.float64) / sum(numbers)
        torch.testing.assert_close(data.weights(kind)[3, i, : i + 1], expected, rtol=1e-12, atol=1e-15)
        assert not data.weights(kind)[3, i, i + 1 :].any()


def test_inputs_are_what_they_are_called():
    """Correlations of unit vectors: random ones of width 32 have some 0.2."""
    q, k, _ = data.drawn("one far key")
    copies = (q[..., None, :] - 2 * k[:, None]).abs().amax(-1) == 0
    assert (copies.sum(-1) == 1).all()
    assert not copies.triu(1).any()
    _, k, _ = data.drawn("topics")
    unit = k / k.norm(dim=-1, keepdim=True)
    stretch = unit.unflatten(1, (-1, data.STRETCH))
    assert (stretch @ stretch.mT).mean() > 0.7
    _, k, _ = data.drawn("drifting")
    unit = k / k.norm(dim=-1, keepdim=True)
    near, far = ((unit[:, gap:] * unit[:, :-gap]).sum(-1).mean() for gap in (1, 128))
    assert near > 0.6
    assert abs(far) < 0.2
    q, k, _ = data.drawn("flat")
    scores = q @ k.mT / sqrt(data.WIDTH)
    assert abs(scores.std() - 0.5) < 0.01


@pytest.mark.parametrize("kind", data.INPUTS)
def test_choices_have_no_more_pairs_than_the_window(kind):
    most = int(s4.by_window(kind).sum())
    for name, choice in s4.CHOICES.items():
        mask = choice(kind)
        assert not mask.triu(1).any()
        assert int(mask.sum((-2, -1)).max()) <= most, name
        rows = (data.weights(kind) * choice(kind)).sum(-1)[:, s4.WINDOW :]
        torch.testing.assert_close(s4.held(choice, kind), rows.mean(1))
        assert (s4.held(choice, kind) <= s4.held(s4.by_top_k, kind) + 1e-12).all()  # sums of 256 weights


def test_a_choice_that_is_a_window_is_noticed(monkeypatch):
    """It is a choice of nothing, and gains nothing."""
    assert judge("S4.4a").verdict == CONDITIONAL

    def the_first(kind):
        return s4.by_window(kind).flip(0, 1).mT.expand(data.DRAWS, -1, -1)

    monkeypatch.setattr(s4, "CHOICES", {"none": the_first})
    monkeypatch.setitem(s4.SIZES, "none", ())
    assert s4.depends_on_input(the_first) == 0
    assert s4.chosen_region().verdict == REFUTED
    monkeypatch.setattr(s4, "CHOICES", {"top-k": s4.by_top_k})
    assert s4.chosen_region().verdict == CONFIRMED


def test_the_window_by_hand():
    q, k, v = data.drawn("peaked")
    i, low = 100, 101 - s4.WINDOW
    expected = (q[2, i] @ k[2, low : i + 1].T / sqrt(data.WIDTH)).softmax(-1) @ v[2, low : i + 1]
    torch.testing.assert_close(s4.windowed("peaked", s4.WINDOW)[2, i], expected)


@pytest.mark.parametrize("name", s4.MAPS)
def test_both_by_hand(name):
    q, k, v = data.drawn("topics")
    i = 200
    t = q[2, i] @ k[2, : i + 1].T / sqrt(data.WIDTH)
    if name == "Taylor":
        far = 1 + t + t**2 / 2
    else:
        f = [torch.where(x > 0, x + 1, x.exp()) for x in (q[2, i], k[2, : i + 1])]
        far = f[0] @ f[1].T / data.WIDTH
    near = torch.arange(i + 1) > i - s4.WINDOW
    w = torch.where(near, t.exp(), far)
    torch.testing.assert_close(s4.both("topics", s4.MAPS[name])[2, i], w / w.sum() @ v[2, : i + 1])


@pytest.mark.parametrize("kind", data.INPUTS)
def test_beside_the_window(kind):
    """With the window as its choice it is the mechanism of the package; without a map, the window alone."""
    for feature_map in s4.MAPS.values():
        torch.testing.assert_close(s4.beside(s4.by_window, kind, feature_map), s4.both(kind, feature_map))
    torch.testing.assert_close(s4.beside(s4.by_window, kind), s4.windowed(kind, s4.WINDOW))


def test_a_query_without_keys_puts_out_zeros():
    def nothing(kind):
        return torch.zeros_like(s4.by_window(kind))

    assert not s4.beside(nothing, "flat").any()


def test_a_linear_part_of_nothing_gains_nothing(monkeypatch):
    """With the window alone in place of both, no error is saved."""
    assert judge("S4.4c").verdict == CONDITIONAL
    monkeypatch.setattr(s4, "both", lambda kind, _: s4.windowed(kind, s4.WINDOW))
    assert set(s4.less_than_window(s4.MAPS["Taylor"], s4.WINDOW).values()) == {(0, 0)}
    assert s4.sparse_and_linear().verdict == REFUTED


def test_growth_by_running_the_closed_form():
    """Steps of equal length cost the same: no power of N above the first; a masked form has one, and is noticed."""
    for feature_map in s4.MAPS.values():
        costs = [s4.flops(n, feature_map) for n in range(1024, 9 * 1024, 1024)]
        assert len({b - a for a, b in pairwise(costs)}) == 1


def test_a_quadratic_form_is_noticed(monkeypatch):
    def materialised(*sizes, **options):
        return sparse_linear_cost(*sizes, form="reference", **options)

    monkeypatch.setattr(s4, "sparse_linear_cost", materialised)
    assert s4.sparse_and_linear().verdict == REFUTED


def test_intervals_cover():
    """Of 1,000 means of 16 normal draws each, 16 - 1 degrees of freedom leave 0.5 in 1,000 outside: 8 have a
    probability below 1e-6."""
    generator = torch.Generator().manual_seed(0)
    outside = 0
    for _ in range(1000):
        low, high = s4.percent_interval(torch.randn(data.DRAWS, generator=generator, dtype=torch.float64))
        assert -inf < low < high < inf
        outside += not low <= 0 <= high
    assert outside < 8
