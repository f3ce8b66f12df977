"""The experiment on fine-tuning: its texts, its two stages, and what an arm trains."""

import dataclasses
import sys

import pytest
import torch
from experiment_fakes import without_seconds

from ortho.layers.multihead import MultiheadAttention
from paper.experiments.learning import fine_tuning, fitting, language, rates
from paper.experiments.learning.fine_tuning import SCRATCH
from paper.tasks import text
from paper.training import CheckpointError, trainer

TINY = {"first_steps": 3, "steps": 2, "B": 2, "N": 16, "d": 16, "L": 2, "tested": 4}
FIT = fitting.fit
PRETRAINED = [arm for arm in fine_tuning.ARMS if arm != SCRATCH]


def tiny(arm, seed=1, **more):
    return fine_tuning.case(arm, seed, **{**TINY, **more})


def watch(patch):
    """Note what is trained from now on: for each call the model, its weights before, and the task's name."""
    found = []

    def watched(model, task, *arguments, **options):
        found.append((model, {name: weight.clone() for name, weight in model.state_dict().items()}, task.name))
        return FIT(model, task, *arguments, **options)

    patch.setattr(fitting, "fit", watched)
    return found


def test_the_parts_of_the_help_share_no_paragraph():
    parts = fine_tuning.help_parts()
    paragraphs = [part.decode(errors="ignore").split("\n\n") for part in parts]
    every = [one for part in paragraphs for one in part]
    assert len(set(every)) == len(every)
    sizes = [len(part) for part in parts]
    assert [size / sum(sizes) for size in sizes] == pytest.approx([0.9, 0.05, 0.05], abs=1e-4)
    assert sum(sizes) > 200_000
    facts = parts.facts()
    assert len({fact["sha256"] for fact in facts.values()}) == 3


def test_the_texts_are_two_kinds():
    """The first stage has not seen the second's text; only docstrings may repeat some of it."""
    assert "pydoc_data" in text.LEFT_OUT
    first, second = text.python_parts(), fine_tuning.help_parts()
    assert b'The "yield" statement' in b"".join(second)
    windows = [second.test[i : i + 100] for i in range(0, len(second.test) - 100, 1000)]
    assert sum(window in first.train for window in windows) <= len(windows) // 10
    share = [part.test.count(b"self.") / len(part.test) for part in (first, second)]
    assert share[0] > 10 * share[1]
    assert [task.name for task in fine_tuning.tasks(16)] == ["python-sources", "python-help"]


@pytest.mark.bad_input
def test_a_python_without_the_help_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ImportError, match="pydoc_data: expected the texts of Python's help"):
        fine_tuning.help_parts.__wrapped__()


@pytest.fixture(scope="module")
def runs():
    """Arm -> the outcome of a tiny run, and what it trained."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for arm in fine_tuning.ARMS:
            trained = watch(patch)
            found[arm] = fine_tuning.run(tiny(arm)), trained
    return found


@pytest.mark.parametrize("arm", fine_tuning.ARMS)
def test_an_arm_trains_what_it_says(arm, runs):
    case = tiny(arm)
    outcome, (*first, (model, begun, name)) = runs[arm]
    assert [one[2] for one in first] == ([] if arm == SCRATCH else ["python-sources"])
    assert name == "python-help"
    parts = {"QK": ("weight_q", "weight_k"), "VO": ("weight_v", "weight_o")}.get(arm.partition(" ")[0], ())
    for key, weight in model.state_dict().items():
        assert torch.equal(weight, begun[key]) == key.endswith(tuple(parts)) if parts else True
        assert parts or not torch.equal(weight, begun[key]) or "norm" in key
    every = sum(p.numel() for p in fine_tuning.build(case, torch.Generator()).parameters())
    assert outcome["facts"]["parameters"] == every - (2 * case["L"] * case["d"] ** 2 if parts else 0)
    layers = [one for one in model.modules() if isinstance(one, MultiheadAttention)]
    assert len(layers) == case["L"]
    for layer in layers:
        assert getattr(layer.projection, "stop_gradient", False) == (arm == "QK stopped")
        assert layer.attention == "rotary"


def test_the_arms_of_a_seed_begin_with_the_same_model_where_its_first_stage_ended(runs):
    """Only an arm that says so has redrawn queries and keys; another seed shares no random numbers."""
    outcomes = {arm: outcome for arm, (outcome, _) in runs.items()}
    (_, at_first, _), (_, begun, _) = runs["all trained"][1]
    assert any(not torch.equal(at_first[key], begun[key]) for key in begun)
    for arm in PRETRAINED:
        (_, first, _), (_, weights, _) = runs[arm][1]
        assert all(torch.equal(first[key], at_first[key]) for key in begun)
        for key, weight in begun.items():
            redrawn = arm == "QK redrawn" and key.endswith(("weight_q", "weight_k"))
            assert torch.equal(weight, weights[key]) != redrawn
            if redrawn:
                eye = weights[key] @ weights[key].T
                torch.testing.assert_close(eye, torch.eye(16), rtol=0, atol=1e-5)  # 16 products of float32
        assert outcomes[arm]["seeds"] == outcomes["all trained"]["seeds"]
    before = {arm: outcome["repetitions"]["old, before"] for arm, outcome in outcomes.items()}
    assert all((found == before["all trained"]) is (arm != SCRATCH) for arm, found in before.items())
    seeds = [*outcomes[SCRATCH]["seeds"].values(), *fine_tuning.seeds_of(tiny("all trained", 2)).values()]
    assert len(set(seeds)) == len(seeds)


def test_the_first_stage_is_made_once(tmp_path, runs, monkeypatch):
    fits = watch(monkeypatch)
    for arm in PRETRAINED:
        found = fine_tuning.run(tiny(arm), checkpoint=tmp_path / f"{arm}.pt")
        assert without_seconds(found) == without_seconds(runs[arm][0])
    assert [name for _, _, name in fits].count("python-sources") == 1
    # It is used whatever the second stage is; another first stage is made anew.
    fits.clear()
    for case in (tiny("QK frozen", rate=0.01, steps=1), tiny("QK frozen", 2), tiny("QK frozen", first_steps=4)):
        fine_tuning.run(case, checkpoint=tmp_path / "another.pt")
    assert [name for _, _, name in fits].count("python-sources") == 2


def test_a_damaged_first_stage_is_found(tmp_path):
    fine_tuning.run(tiny("QK frozen"), checkpoint=tmp_path / "run.pt")
    (file,) = tmp_path.glob("first-*.pt")
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="first-.*damaged or not a checkpoint"):
        fine_tuning.run(tiny("QK frozen"), checkpoint=tmp_path / "run.pt")


def test_a_run_that_was_killed_in_its_first_stage_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "EVERY_S", -1.0)  # a checkpoint after each step
    case, file = tiny("QK redrawn", first_steps=4, steps=4), tmp_path / "run.pt"
    whole = without_seconds(fine_tuning.run(case))
    real, drawn = fine_tuning.tasks(16), []

    def interrupted(count, generator):
        drawn.append(count)
        if len(drawn) == 3:
            raise KeyboardInterrupt
        return real[0].train(count, generator)

    watched = dataclasses.replace(real[0], train=interrupted), real[1]
    monkeypatch.setattr(fine_tuning, "tasks", lambda N: watched)
    with pytest.raises(KeyboardInterrupt):
        fine_tuning.run(case, checkpoint=file)
    assert without_seconds(fine_tuning.run(case, checkpoint=file)) == whole
    assert len(drawn) == 3 + 2  # the third step is repeated, then the fourth is made


def test_the_stages_are_learnt_from():
    """600 and 300 steps teach more; these are enough to tell each text from the other's model."""
    case = fine_tuning.case("QK frozen", 1, 1e-2, first_steps=60, steps=40, N=32, d=32, tested=64)
    record = fine_tuning.run(case)
    begun, ended = (fine_tuning.MEASURES[name](record) for name in ("new, before", "new"))
    assert ended < begun - 0.1 and begun < 6  # bits; a guess has 8
    curve = [look["loss_nats"] for look in record["facts"]["validation"]]
    assert curve[-1] < curve[0]


def test_the_first_stage_is_that_of_the_strong_baseline():
    for device, sizes in fine_tuning.SIZES.items():
        theirs = language.case("learned", device=device)
        own = fine_tuning.case("all trained", device=device)
        assert {name: own[name] for name in ("B", "N", "d", "H", "L")} == {name: theirs[name] for name in "BNdHL"}
        assert sizes["first_steps"] == theirs["steps"]
        assert rates.chosen("bytes", theirs) in (None, own["first_rate"])
        for task in fine_tuning.tasks(own["N"]):  # there are enough windows
            for draw in (task.validation, task.tests["test"]):
                assert len(draw(own["tested"], torch.Generator()).answers) == own["tested"]
    assert fine_tuning.DECISION == language.DECISION
