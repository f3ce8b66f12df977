"""The experiment on fine-tuning: its texts, its two stages, what an arm trains; and what its records say."""

import dataclasses
import sys

import pytest
import torch
from experiment_fakes import SLUG, go, within

from ortho.layers.multihead import MultiheadAttention
from paper.experiments import measure
from paper.experiments.engine import records
from paper.experiments.learning import fine_tuning, fitting, language, rates
from paper.experiments.learning.fine_tuning import SCRATCH
from paper.tasks import text
from paper.training import CheckpointError, trainer

EXPERIMENT = fine_tuning.FINE_TUNING
TINY = {"first_steps": 3, "steps": 2, "B": 2, "N": 16, "d": 16, "L": 2, "tested": 4}
PRETRAINED = [arm for arm in fine_tuning.ARMS if arm != SCRATCH]


def only(*cases):
    return dataclasses.replace(EXPERIMENT, cases=lambda _: list(cases))


def tiny(arm, seed=1, **more):
    return fine_tuning.case(arm, seed, **{**TINY, **more})


def stored(results):
    return records.read(records.path(results, EXPERIMENT.name, SLUG), EXPERIMENT.needs)


def without_seconds(outcome):
    return {**outcome, "facts": {name: fact for name, fact in outcome["facts"].items() if name != "train_s"}}


@pytest.fixture
def fits(monkeypatch):
    """What was trained: for each call the model, its weights before, and the task's name."""
    fit, found = fitting.fit, []

    def watched(model, task, *arguments, **options):
        found.append((model, {name: weight.clone() for name, weight in model.state_dict().items()}, task.name))
        return fit(model, task, *arguments, **options)

    monkeypatch.setattr(fitting, "fit", watched)
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


@pytest.mark.parametrize("arm", fine_tuning.ARMS)
def test_an_arm_is_trained_tested_and_stored_whole(arm, tmp_path):
    report = go(only(tiny(arm)), tmp_path)
    assert not report.errors
    (record,) = stored(tmp_path)
    assert list(record["repetitions"]) == ["old, before", "new, before", "old", "new"]
    assert len(record["facts"]["loss"]) == TINY["steps"]
    assert len(record["facts"]["validation"]) == min(fine_tuning.LOOKS, TINY["steps"])
    assert record["facts"]["texts"]["new"]["test"]["bytes"] == len(fine_tuning.help_parts().test)
    assert "bits a byte, old" in EXPERIMENT.line(record)
    assert f"\n{SLUG}" in EXPERIMENT.show([record])


@pytest.mark.parametrize("arm", fine_tuning.ARMS)
def test_an_arm_trains_what_it_says(arm, fits):
    case = tiny(arm)
    outcome = fine_tuning.run(case)
    *first, (model, begun, name) = fits
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


def test_the_second_stage_begins_where_the_first_ended(fits):
    for arm in PRETRAINED:
        fine_tuning.run(tiny(arm))
    firsts, seconds = fits[::2], fits[1::2]
    ended = firsts[0][0]  # trained in both stages
    begun = seconds[0][1]
    assert all(torch.equal(firsts[0][1][key], one[1][key]) for one in firsts for key in begun)
    for arm, (_, weights, _) in zip(PRETRAINED, seconds, strict=True):
        redrawn = ("weight_q", "weight_k") if arm == "QK redrawn" else ()
        for key, weight in begun.items():
            assert torch.equal(weight, weights[key]) != key.endswith(tuple(redrawn)) if redrawn else True
            assert redrawn or torch.equal(weight, weights[key])
        for key in (key for key in weights if redrawn and key.endswith(tuple(redrawn))):
            eye = weights[key] @ weights[key].T
            torch.testing.assert_close(eye, torch.eye(16), rtol=0, atol=1e-5)  # 16 products of float32
    assert any(not torch.equal(begun[key], weight) for key, weight in ended.state_dict().items())


def test_the_arms_of_a_seed_begin_with_the_same_model_and_see_the_same_batches(fits):
    outcomes = {arm: fine_tuning.run(tiny(arm)) for arm in fine_tuning.ARMS}
    other = fine_tuning.run(tiny("all trained", 2))
    before = {arm: (one["repetitions"]["old, before"], one["seeds"]) for arm, one in outcomes.items()}
    for arm in PRETRAINED:
        assert before[arm] == before["all trained"]
    assert before[SCRATCH][0] != before["all trained"][0]
    assert not set(other["seeds"].values()) & set(before["all trained"][1].values())
    assert other["repetitions"]["old, before"] != before["all trained"][0]
    assert len(set(before[SCRATCH][1].values())) == len(before[SCRATCH][1])


def test_the_first_stage_is_made_once(tmp_path, fits):
    alone = {arm: without_seconds(fine_tuning.run(tiny(arm))) for arm in PRETRAINED}
    fits.clear()
    for arm in PRETRAINED:
        found = fine_tuning.run(tiny(arm), checkpoint=tmp_path / f"{arm}.pt")
        assert without_seconds(found) == alone[arm]
    assert [name for _, _, name in fits].count("python-sources") == 1
    # Whatever the second stage is; but not for another first one.
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


@pytest.mark.parametrize("stage", [0, 1])
def test_a_run_that_was_killed_goes_on(stage, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "EVERY_S", -1.0)  # a checkpoint after each step
    case, file = tiny("QK redrawn", first_steps=4, steps=4), tmp_path / "run.pt"
    whole = without_seconds(fine_tuning.run(case))
    real, drawn = fine_tuning.tasks(16), []

    def interrupted(count, generator):
        drawn.append(count)
        if len(drawn) == 3:
            raise KeyboardInterrupt
        return real[stage].train(count, generator)

    watched = list(real)
    watched[stage] = dataclasses.replace(real[stage], train=interrupted)
    monkeypatch.setattr(fine_tuning, "tasks", lambda N: tuple(watched))
    with pytest.raises(KeyboardInterrupt):
        fine_tuning.run(case, checkpoint=file)
    assert without_seconds(fine_tuning.run(case, checkpoint=file)) == whole
    assert len(drawn) == 3 + 2  # the third step is made anew, and the fourth


def test_the_stages_are_learnt_from():
    """600 and 300 steps teach more; these are enough to tell each text from the other's model."""
    case = fine_tuning.case("QK frozen", 1, 1e-2, first_steps=60, steps=40, N=32, d=32, tested=64)
    record = {**fine_tuning.run(case)}
    begun, ended = fine_tuning.new_before(record), fine_tuning.new(record)
    assert ended < begun - 0.1 and begun < 6  # bits; a guess has 8
    curve = [look["loss_nats"] for look in record["facts"]["validation"]]
    assert curve[-1] < curve[0]


def test_a_fast_form_that_is_off_is_not_stored(monkeypatch, tmp_path):
    def off(*_):
        raise AssertionError("fast form: expected a relative error of at most 1e-10, got 1")

    monkeypatch.setattr(fitting, "check_forms", off)
    report = go(only(tiny("all trained")), tmp_path)
    assert len(report.errors) == 1 and not stored(tmp_path)


def test_the_first_stage_is_that_of_the_strong_baseline():
    for device, sizes in fine_tuning.SIZES.items():
        theirs = language.case("learned", device=device)
        own = fine_tuning.case("all trained", device=device)
        assert {name: own[name] for name in ("B", "N", "d", "H", "L")} == {name: theirs[name] for name in "BNdHL"}
        assert sizes["first_steps"] == theirs["steps"]
        assert rates.chosen("bytes", theirs) in (None, own["first_rate"])
    assert fine_tuning.WEIGHT_DECAY == language.WEIGHT_DECAY
    assert fine_tuning.DECISION == language.DECISION


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_arm_has_every_seed_and_the_tuning_seed_every_rate(device, monkeypatch):
    monkeypatch.setattr(rates, "chosen", lambda *_: None)
    tuning = fine_tuning.cases(device)
    monkeypatch.setattr(rates, "chosen", lambda name, case: 0.5 if name == EXPERIMENT.name else None)
    cases = fine_tuning.cases(device)
    assert cases[: len(tuning)] == tuning
    runs = {(case["arm"], case["seed"], case["rate"]) for case in cases}
    assert len(runs) == len(cases) == len(fine_tuning.ARMS) * (2 + len(fine_tuning.SEEDS))
    assert {seed for _, seed, rate in runs if rate == 0.5} == set(fine_tuning.SEEDS)
    assert {seed for _, seed, rate in runs if rate != 0.5} == {rates.TUNING}
    for task in fine_tuning.tasks(cases[0]["N"]):  # there are as many windows
        task.validation(cases[0]["tested"], torch.Generator())
        task.tests["test"](cases[0]["tested"], torch.Generator())


def test_the_sources_are_all_that_a_run_runs(tmp_path):
    for arm in fine_tuning.ARMS:
        # What is imported late, or made once, need not be watched.
        case, file = tiny(arm), tmp_path / f"{arm}.pt"
        fine_tuning.run(case, checkpoint=file)
        with within(EXPERIMENT):
            fine_tuning.run(case)
            fine_tuning.run(case, checkpoint=file)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("arm", fine_tuning.ARMS)
def test_a_case_runs_on_cuda(arm):
    assert measure(EXPERIMENT, tiny(arm, device="cuda"), "cuda")["facts"]["parameters"]


BAD = [
    ({"arm": "frozen"}, ValueError, "arm: expected one of 'all trained', 'QK frozen'"),
    ({"device": "tpu"}, ValueError, "device: expected one of 'cpu', 'cuda'"),
    ({"first_steps": 0}, ValueError, "first_steps: expected an integer of at least 1, got 0"),
    ({"tested": 1.5}, TypeError, "tested: expected an integer of at least 1"),
    ({"d_ff": 2}, TypeError, "sizes: expected some of B, N, d, H, L, first_steps, steps, tested, got d_ff"),
]


@pytest.mark.bad_input
@pytest.mark.parametrize(("given", "error", "message"), BAD)
def test_an_impossible_case_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        fine_tuning.case(**{"arm": "all trained", **given})
