"""Gradients through the depth of stacks: what is measured, and what a record holds."""

import pytest
import torch

from paper.experiments import load
from paper.experiments.engine.records import key
from paper.experiments.learning import depth as stacks


@pytest.mark.parametrize("residual", [True, False])
def test_freezing_changes_no_gradient_that_passes(residual):
    learned, frozen = (stacks.Stack("learned", residual, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    for block in frozen.blocks:
        block.attention.projection.requires_grad_(False)
    passed = [stacks.gradients(model, torch.Generator().manual_seed(2)) for model in (learned, frozen)]
    assert passed[0] == passed[1] and len(passed[0]) == stacks.L + 1


def test_stopped_queries_and_keys_pass_less(monkeypatch):
    """With equal weights; the gradient at the last block's output does not depend on what queries and keys pass."""
    monkeypatch.setitem(stacks.ARMS, "stopped", "stopped")
    learned, stopped = (
        stacks.Stack(arm, True, generator=torch.Generator().manual_seed(1)) for arm in ("learned", "stopped")
    )
    stopped.load_state_dict(learned.state_dict())
    ours, theirs = (stacks.gradients(model, torch.Generator().manual_seed(2)) for model in (stopped, learned))
    assert ours[-1] == theirs[-1] and ours[0] != theirs[0]


def test_a_run_is_whole():
    """The arms of a seed see the same batches, and the same seed gives the same bits."""
    case = stacks.case("frozen", False, 3) | {"steps": 2}
    found = stacks.run(case)
    assert found == stacks.run(case)
    assert list(found["repetitions"]) == list(stacks.STAGES)
    for stage, lengths in found["facts"]["gradients"].items():
        assert len(lengths) == stacks.L + 1
        assert found["repetitions"][stage] == {"first_over_last_fraction": [lengths[0] / lengths[-1]]}
    assert found["facts"]["gradients"]["at first"] != found["facts"]["gradients"]["trained"]
    assert found["seeds"] == stacks.run(stacks.case("learned", False, 3) | {"steps": 0})["seeds"]


def test_every_case_is_recorded():
    assert {key(record["configuration"]) for record in load("depth")} == {key(case) for case in stacks.cases("cpu")}
    assert stacks.cases("cuda") == []
