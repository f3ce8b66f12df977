"""The campaign on a GPU, rehearsed on a CPU: its order, its resumption after a kill, what its first stage records."""

from dataclasses import replace

import pytest
import torch
from experiment_fakes import fake, outcome

from ortho import MECHANISMS
from paper import experiments
from paper.experiments import campaign
from paper.experiments.campaign import Stage, staged
from paper.experiments.engine import cli
from paper.experiments.speed import agreement


def test_the_stages_name_experiments_with_so_many_cases():
    for stage in campaign.STAGES:
        cases = experiments.EXPERIMENTS[stage.experiment].cases("cuda")
        assert cases
        assert stage.first is None or stage.first <= len(cases)


def test_whether_kernels_are_right_comes_first_and_every_timing_is_complete_in_the_end():
    assert campaign.STAGES[0] == Stage("agreement")
    complete = {stage.experiment for stage in campaign.STAGES if stage.first is None}
    assert {stage.experiment for stage in campaign.STAGES} == complete
    assert {name for name, one in experiments.EXPERIMENTS.items() if one.quiet} <= complete


def test_a_campaign_that_is_cut_off_goes_on_where_it_was(tmp_path, capsys):
    """The first call is cut off in its third stage; the second call runs the rest, and nothing twice."""
    ran = []

    def run(case):
        ran.append((case["name"], case["index"]))
        if len(ran) == 3:
            raise KeyboardInterrupt
        return outcome()

    def named(name):
        def cases(device):
            return [{"name": name, "device": device, "index": index, "work": 1} for index in range(3)]

        return replace(fake(run, name), cases=cases)

    known = {name: named(name) for name in ("first", "second")}
    stages = staged(known, (Stage("first", 1), Stage("second", 1), Stage("first"), Stage("second")))
    arguments = ["--campaign", "--device", "cpu", "--results", str(tmp_path)]
    assert cli.main(arguments, known, campaign=stages) == 130
    assert cli.main(arguments, known, campaign=stages) == 0
    order = [("first", 0), ("second", 0), ("first", 1)]
    assert ran == [*order, ("first", 1), ("first", 2), ("second", 1), ("second", 2)]
    assert capsys.readouterr().out.count("fresh") == 7  # three stages, the last one cut off, then four
    assert len(list(tmp_path.glob("*/*.json"))) == 2


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
