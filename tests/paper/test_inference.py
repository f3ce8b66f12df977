"""The experiment inference: frozen against learned, with a control, checked before it is timed."""

import copy

import pytest
import torch
from experiment_fakes import SLUG

from paper import experiments
from paper.experiments import measure
from paper.experiments.engine import records
from paper.experiments.speed import inference, training_step

TINY = training_step.case("layer", 8, 32, H=2, input_grad=False)


@pytest.fixture(scope="module")
def measured():
    return measure(experiments.EXPERIMENTS["inference"], TINY, "cpu", seconds=0.01)


def test_every_arm_runs_once_a_repetition(measured):
    arms = {inference.STANDARD, inference.FROZEN, inference.CONTROL}
    orders = measured["facts"]["order"]
    assert all(set(order) == arms for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert measured["repetitions"].keys() == arms
    for quantities in measured["repetitions"].values():
        assert {len(values) for values in quantities.values()} == {len(orders)}
    assert len(orders) == inference.REPETITIONS[0]
    assert measured["facts"]["calls"] >= 1


def test_gains_are_medians_of_ratios_with_their_intervals(measured):
    record = copy.deepcopy(measured)
    record["provenance"]["threads"] = 1
    seconds = {"learned": [2.0] * 31, "frozen": [2 / (1 + i / 100) for i in range(31)], "learned-again": [2.0] * 31}
    record["repetitions"] = {arm: {"forward_cpu_s": values, "forward_s": [9.0] * 31} for arm, values in seconds.items()}
    (row,) = experiments.gains([record])
    assert row["frozen"] == pytest.approx((7, 15, 23))  # the 8th smallest and largest of 31 values
    assert row["control"] == (0, 0, 0)
    assert (row["N"], row["device"], row["repetitions"]) == (8, SLUG, 31)
    record["provenance"]["threads"] = 2  # the process's time then adds up threads
    assert experiments.gains([record])[0]["frozen"] == (0, 0, 0)


@pytest.mark.parametrize("n", [8, 31, 50, 61])
def test_the_interval_has_its_confidence_and_no_shorter_one_has(n):
    values = list(range(1, n + 1))
    low, middle, high = inference.median_interval(values)
    assert low + high == n + 1 and middle == (n + 1) / 2
    ties = torch.arange(n + 1.0)
    pmf = torch.exp(torch.lgamma(torch.tensor(n + 1.0)) - torch.lgamma(ties + 1) - torch.lgamma(n - ties + 1)) / 2**n
    assert 2 * pmf[:low].sum() <= 0.01 < 2 * pmf[: low + 1].sum()


def test_too_few_repetitions_have_no_interval():
    with pytest.raises(ValueError, match=r"values: expected enough for a confidence of 0\.99, got 7"):
        inference.median_interval([1.0] * 7)


def test_arms_that_differ_are_not_timed(monkeypatch):
    def wrong(module):
        standard = to_standard(module)
        with torch.no_grad():
            standard.weight_o[0, 0] += 1
        return standard

    to_standard = inference.to_standard
    monkeypatch.setattr(inference, "to_standard", wrong)
    with pytest.raises(AssertionError, match="learned: expected the frozen layer's output, bit for bit"):
        inference.run(TINY, seconds=0.01)


def test_the_view_prints_gain_and_control(measured, tmp_path, capsys):
    records.write(records.path(tmp_path, "inference", SLUG), [measured])
    assert experiments.main(["--show", "inference", "--results", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    (row,) = experiments.gains(experiments.load("inference", tmp_path))
    for low, middle, high in (row["frozen"], row["control"]):
        assert f"{middle:+.2f} % [{low:+.2f}, {high:+.2f}]" in text
