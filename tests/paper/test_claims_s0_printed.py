"""The rules found behind S0's printed tables, and the limits that they are held against."""

from dataclasses import replace

import pytest

from ortho.cost import block, layer
from paper.claims import Verdict
from paper.claims.evidence import printed_models as scenarios
from paper.claims.evidence import printed_speed_ups as printed
from paper.claims.evidence.printed_models import SCENARIOS, even_length, memory, millions, saved_megabytes, whole_limit
from paper.claims.evidence.printed_speed_ups import (
    SPEED_UPS,
    limit,
    needed_share,
    ratios_that_fit,
    step_gain,
    weights_that_fit,
)


def test_the_search_finds_one_ratio_and_it_is_the_rule():
    assert ratios_that_fit(60) == [(9, 1, 14, 14)]
    assert ratios_that_fit(13) == []


def test_the_search_finds_a_planted_ratio(monkeypatch):
    planted = {(n, d): f"{100 * (2 * d + 3 * n) / (7 * d + 5 * n):.1f}" for n, d in SPEED_UPS}
    monkeypatch.setattr(printed, "SPEED_UPS", planted)
    assert (2, 3, 7, 5) in ratios_that_fit(12)


def test_the_weights_give_the_rule():
    found = weights_that_fit()
    assert ("saved", "N d^2", printed.BACKWARD, printed.OPTIMISER, printed.DROPPED) in found
    assert {(reading, part) for reading, part, *_ in found} == {("saved", "N d^2")}
    for n, d in SPEED_UPS:
        gain = step_gain(n / d, printed.BACKWARD, printed.OPTIMISER, printed.DROPPED)
        assert gain == pytest.approx(printed.table_rule(n, d), rel=1e-12)
    total = 1 + printed.BACKWARD + printed.OPTIMISER
    assert printed.OPTIMISER / total == pytest.approx(float(printed.OPTIMISER_SHARE), rel=1e-12)


def test_speed_up_and_share_saved_say_the_same():
    saved, speed_up = (step_gain(1.5, 2, 0.5, 1, reading=reading) / 100 for reading in ("saved", "speed-up"))
    assert 1 / (1 - saved) == pytest.approx(1 + speed_up, rel=1e-12)
    assert step_gain(1.0, 0, 0, 2, reading="speed-up") == float("inf")


@pytest.mark.parametrize("n", [128, 768, 8192])
def test_limits_in_closed_form(n):
    r = n / 768
    assert limit(n, 768, optimiser=0) == pytest.approx(100 / (5 + 3 * r), rel=1e-12)
    assert float(limit(n, 768)) == pytest.approx(100 * (6 + r) / (22 + 13 * r), rel=1e-12)
    assert limit(n, 768, optimiser=0, of=block) == pytest.approx(100 / (17 + 3 * r), rel=1e-12)
    assert limit(n, 768, optimiser=0, form="fast") < limit(n, 768, optimiser=0) < float(limit(n, 768))


def test_the_needed_share_is_just_enough():
    share = needed_share(30.0, 512, 768)
    assert limit(512, 768, optimiser=share) == pytest.approx(30.0, rel=1e-12)


@pytest.mark.parametrize("form", ["fast", "reference"])
def test_even_length_is_the_shortest(form):
    length = even_length(128, form=form)
    # The definition keeps float32; the sources' bytes are those of half precision.
    itemsize = {"fast": 2, "reference": 4}[form]
    kept = [layer(1, n, 128, 2, form=form, itemsize=itemsize).saved_bytes * 2 // itemsize for n in (length - 1, length)]
    assert kept[0] < sum(memory(128).values()) <= kept[1]


def test_limits_of_whole_models_by_hand():
    """Products by model, with the two forms' ways to count pairs of tokens; the kinder one is the bound."""
    N, d = 512, 768
    pooler = 3 * 2 * d * d
    step = 12 * (72 * N * d**2 + 12 * N**2 * d) + pooler
    assert whole_limit("BERT-base", optimiser=0) == pytest.approx(100 * (step / (step - 12 * 4 * N * d**2) - 1))
    N, d = 1024, 1024
    read_out, pairs = 3 * 2 * N * d * 50257, 14 * d * N * (N + 1) / 2  # fused: forward 4, backward 10, by pairs
    step = 24 * (72 * N * d**2 + pairs) + read_out
    assert whole_limit("GPT-2 medium", optimiser=0) == pytest.approx(100 * (step / (step - 24 * 4 * N * d**2) - 1))
    N, d = 197, 768
    ends = 2 * 2 * 196 * d * d + 3 * 2 * 1000 * d  # patches, of which only the weights' gradient; head
    step = 12 * (72 * N * d**2 + 12 * N**2 * d) + ends
    assert whole_limit("ViT", optimiser=0) == pytest.approx(100 * (step / (step - 12 * 4 * N * d**2) - 1))


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_whole_model_gains_less_than_its_layers(name):
    at = SCENARIOS[name]
    alone = limit(at.length, at.width)
    assert 0 < whole_limit(name, optimiser=0) < whole_limit(name) < alone < at.speed_up
    assert whole_limit(name, optimiser=0) < whole_limit(name, "stopped", optimiser=0)


def test_weights_of_whole_models():
    """Two matrices and their biases a layer are frozen; in FP16 a gradient and two moments of each are saved."""
    for name, layers, d, published in (("BERT-base", 12, 768, 109_482_240), ("GPT-2 medium", 24, 1024, 354_823_168)):
        frozen = layers * 2 * (d * d + d)
        for whole in (False, True):
            fall = millions(name, whole=whole) - millions(name, "frozen", whole=whole)
            assert fall == pytest.approx(frozen / 1e6, rel=1e-12)
        assert millions(name, whole=True) == published / 1e6
        assert saved_megabytes(name) == 3 * 2 * frozen / 1e6


def test_a_possible_speed_up_would_be_noticed(monkeypatch):
    modest = replace(SCENARIOS["BERT-base"], speed_up=12)
    monkeypatch.setitem(scenarios.SCENARIOS, "BERT-base", modest)
    assert scenarios.bert().verdict == Verdict.INCONSISTENT  # with the source's own table, and with that alone
    monkeypatch.setitem(scenarios.SCENARIOS, "BERT-base", replace(modest, speed_up=14))
    assert scenarios.bert().verdict == Verdict.REFUTED
