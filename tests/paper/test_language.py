"""A run of the experiments on bytes: what it stores, what it shares with others, that it resumes, what it runs."""

import dataclasses

import pytest
import torch
from experiment_fakes import SLUG, go, within

from paper.experiments import measure
from paper.experiments.engine import records
from paper.experiments.learning import fitting, language
from paper.experiments.learning.arms import arms, trained_parameters
from paper.experiments.learning.kinds import kinds
from paper.tasks import text
from paper.training import trainer

TINY = {"steps": 2, "B": 2, "N": 16, "d": 16, "H": 4, "L": 1, "tested": 4}
ARMS = arms(TINY["H"], TINY["N"])
# An arm of every kind of heads, of every embedding of places, and one of heads of two kinds.
FIRST = {kind: next(name for name, arm in ARMS.items() if arm.heads[0][0] == kind) for kind in kinds(TINY["N"])}
RUN = sorted({*FIRST.values(), "embeddings", "sinusoids", "1 learned + 3 positional"})


@pytest.fixture(autouse=True, scope="module")
def library(tmp_path_factory):
    """A small library in place of Python's own."""
    folder = tmp_path_factory.mktemp("library")
    for i in range(200):
        (folder / f"module_{i}.py").write_text(f"def power_{i}(x):\n    return x ** {i}\n" * 2)
    parts = text.python_parts(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "python_parts", lambda: parts)
        yield parts


def only(*cases):
    """The experiment of equal FLOPs with these cases."""
    return dataclasses.replace(language.BYTES, cases=lambda _: list(cases))


def stored(results):
    return records.read(records.path(results, "bytes", SLUG), language.BYTES.needs)


def without_times(record):
    found = {name: part for name, part in record.items() if name not in ("elapsed_s", "provenance")}
    return {**found, "facts": {name: fact for name, fact in record["facts"].items() if name != "train_s"}}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """A tiny run of an arm of each kind, through the runner: the folder, and the report."""
    results = tmp_path_factory.mktemp("results")
    return results, go(only(*(language.case(arm, 1, **TINY) for arm in RUN)), results)


def test_an_arm_of_each_kind_stores_a_whole_record(outcomes, library):
    results, report = outcomes
    assert not report.errors
    found = {record["configuration"]["arm"]: record for record in stored(results)}
    assert set(found) == set(RUN) and len(report.done) == len(RUN)
    for arm, record in found.items():
        case, facts, shares = record["configuration"], record["facts"], record["repetitions"]["test"]
        assert set(shares) == set(fitting.QUANTITIES) and all(0 <= shares[q][0] <= 1 for q in fitting.QUANTITIES[:2])
        assert facts["kinds"] == ARMS[arm].describe() and facts["text"] == library.facts()
        looks = sorted({round(case["steps"] * (i + 1) / language.LOOKS) for i in range(language.LOOKS)} - {0})
        assert [look["step"] for look in facts["validation"]] == looks and looks[-1] == case["steps"]
        assert len(facts["loss"]) == min(case["steps"], fitting.POINTS)
        with torch.device("meta"):
            built = ARMS[arm].build(text.VOCAB_SIZE, TINY["d"], TINY["L"], d_ff=case["d_ff"])
        assert facts["parameters"] == trained_parameters(built)
        assert "bits a byte" in language.BYTES.line(record)


def test_what_runs_execute_is_within_the_code_of_their_records(outcomes):
    cases = [language.case(arm, 1, **TINY) for arm in RUN]  # `outcomes` has imported and made what is made once
    with within(language.BYTES):
        for case in cases:
            language.run(case)


def test_a_run_follows_from_its_seed():
    one, again, other = (
        without_times(measure(only(), language.case("1 learned + 3 positional", seed, **TINY), "cpu"))
        for seed in (1, 1, 2)
    )
    assert one == again
    assert one["facts"]["loss"] != other["facts"]["loss"]


def test_the_arms_of_a_seed_share_batches_and_tests(monkeypatch):
    make, drawn = text.language_modelling, {}

    def watched(*arguments):
        task = make(*arguments)

        def train(count, generator):
            batch = task.train(count, generator)
            drawn.setdefault(running, []).append(batch.inputs[0])
            return batch

        return dataclasses.replace(task, train=train)

    monkeypatch.setattr(text, "language_modelling", watched)
    for running in (("learned", 1), ("frozen", 1), ("frozen", 2)):
        language.run(language.case(*running, matched="steps", **TINY))
    ours, theirs, others = (torch.stack(batches) for batches in drawn.values())
    assert torch.equal(ours, theirs) and not torch.equal(theirs, others)


def test_the_seeds_of_arms_differ_in_the_weights_and_those_of_seeds_in_all():
    one, other, next_seed = (
        language.seeds_of(language.case(*told)) for told in (("learned", 1), ("frozen", 1), ("frozen", 2))
    )
    assert {part for part in one if one[part] != other[part]} == {"weights"}
    everything = [*one.values(), other["weights"], *next_seed.values()]
    assert len(set(everything)) == len(everything)
    assert one == language.seeds_of(language.case("learned", 1, 1e-2, steps=9)), "whatever the rate and the budget"


def test_an_interrupted_run_goes_on_to_the_same_record(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "EVERY_S", -1.0)  # a checkpoint after every step
    make, steps = text.language_modelling, []

    def interrupting(*arguments):
        task = make(*arguments)

        def train(count, generator):
            steps.append(count)
            if len(steps) == 5:
                raise KeyboardInterrupt
            return task.train(count, generator)

        return dataclasses.replace(task, train=train)

    experiment = only(language.case("learned", 1, **{**TINY, "steps": 6}))
    go(experiment, tmp_path / "whole")
    monkeypatch.setattr(text, "language_modelling", interrupting)
    with pytest.raises(KeyboardInterrupt):
        go(experiment, tmp_path / "cut")
    assert not stored(tmp_path / "cut") and len(list((tmp_path / "cut").rglob("*.pt"))) == 1
    assert not go(experiment, tmp_path / "cut").errors
    assert len(steps) == 5 + 2, "four steps were not made again"
    (whole,), (cut,) = stored(tmp_path / "whole"), stored(tmp_path / "cut")
    assert without_times(cut) == without_times(whole)
    assert not list(tmp_path.rglob("*.pt"))


def test_dropout_is_for_training_alone():
    """Else the two forms of the model, each leaving out something else, would differ."""
    run = language.run(language.case("learned", 1, dropout=0.5, **TINY))
    plain = language.run(language.case("learned", 1, **TINY))
    assert run["facts"]["loss"] != plain["facts"]["loss"]


def test_the_weights_of_the_best_look_are_tested(monkeypatch):
    seen = []

    def evaluate(model, *_):
        seen.append({name: part.clone() for name, part in model.state_dict().items()})
        return {name: [float(len(seen))] for name in fitting.QUANTITIES}  # the first look has the lowest loss

    def same(one, other):
        return all(torch.equal(one[name], other[name]) for name in one)

    monkeypatch.setattr(fitting, "evaluate", evaluate)
    language.run(language.case("learned", 1, **{**TINY, "steps": language.LOOKS}))
    first, *_, last, tested = seen
    assert len(seen) == language.LOOKS + 1 and same(first, tested) and not same(last, tested)


def test_fewer_bytes_are_the_first(library):
    facts = language.run(language.case("learned", 1, limit=300, **TINY))["facts"]["text"]
    assert facts == library.limited(300).facts() and facts["train"]["bytes"] == 300


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("arm", RUN)
def test_a_case_runs_on_cuda(arm):
    record = measure(language.BYTES, language.case(arm, 1, device="cuda", **TINY), "cuda")
    assert set(record["repetitions"]) == {"test"}
