"""The order of cases on a GPU, and what its first stage records."""

from dataclasses import replace

import pytest
import torch

from ortho import MECHANISMS
from paper import experiments
from paper.experiments import campaign
from paper.experiments.speed import agreement


def test_whether_kernels_are_right_comes_first_and_everything_is_complete_in_the_end():
    order = campaign.staged(experiments.EXPERIMENTS)
    assert order[0].name == "agreement"
    for stage, one in zip(campaign.STAGES, order, strict=False):
        assert 0 < len(one.cases("cuda")) == (stage.first or len(one.cases("cuda")))
    for name, experiment in experiments.EXPERIMENTS.items():
        last = [one for one in order if one.name == name][-1]
        assert last.cases("cuda") == experiment.cases("cuda")


def small(mechanism, causal=True):
    return agreement.case(mechanism, causal, device="cpu", N=32, d=32, H=2)


@pytest.mark.parametrize("mechanism", ["softmax", "linear", "gated-delta", "window"])
def test_the_first_stage_records_the_errors_of_each_precision(mechanism, monkeypatch):
    monkeypatch.setattr(agreement, "COMPILED", ())
    found = agreement.run(small(mechanism))
    assert not found["failures"]
    assert found["repetitions"].keys() == set(agreement.DTYPES)
    for name, errors in found["repetitions"].items():
        # Some dozens of roundings in a row, each of at most eps / 2; gradients have twice as many. In float32 the
        # definition rounds as coarsely as the fast form, so that the errors of both count.
        most = (200 if name == "float32" else 100) * torch.finfo(getattr(torch, name)).eps
        assert all(0 <= error[0] < most for error in errors.values()), (name, errors)


def test_a_form_that_is_wrong_or_raises_is_seen(monkeypatch):
    mechanism = MECHANISMS["linear"]
    wrong = replace(mechanism, fast=lambda *args, **kwargs: 1.1 * mechanism.fast(*args, **kwargs))
    monkeypatch.setitem(MECHANISMS, "linear", wrong)
    monkeypatch.setattr(agreement, "COMPILED", ())
    found = agreement.run(small("linear"))["repetitions"]["float32"]
    assert found["output_fraction"][0] == pytest.approx(0.1, rel=1e-3)

    def broken(*args, **kwargs):
        raise RuntimeError("no kernel for this device")

    monkeypatch.setitem(MECHANISMS, "linear", replace(mechanism, fast=broken))
    assert set(agreement.run(small("linear"))["failures"].values()) == {"RuntimeError: no kernel for this device"}


def test_a_precision_that_overflows_is_a_failure_that_names_what_overflowed(monkeypatch):
    monkeypatch.setattr(agreement, "COMPILED", ())
    honest = agreement._results

    def overflowing(case, form, dtype, **options):
        found = honest(case, form, dtype, **options)
        if dtype == torch.float16:
            found["gradient of x"].fill_(torch.inf)
        return found

    monkeypatch.setattr(agreement, "_results", overflowing)
    found = agreement.run(small("linear"))
    assert found["failures"] == {"float16": "not finite: gradient of x"}
    assert found["repetitions"].keys() == {"float32", "bfloat16"}


def test_every_mechanism_is_compared_in_each_direction():
    cases = {(case["mechanism"], case["causal"]) for case in agreement.cases("cuda")}
    assert cases == {
        (name, causal)
        for name, one in MECHANISMS.items()
        for causal, served in ((True, one.causal), (False, one.bidirectional))
        if served
    }
