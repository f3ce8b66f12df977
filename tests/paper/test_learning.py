"""What every experiment with training has: whole records, repeatable bits, resumption, paired seeds, rates first."""

from collections import Counter
from functools import partial

import pytest
import torch
from experiment_fakes import go, only, without_seconds
from sample import some

from paper import experiments
from paper.experiments import measure
from paper.experiments.engine import records
from paper.experiments.learning import (
    fine_tuning,
    fitting,
    images,
    language,
    pruning,
    rates,
    studies,
    study,
    synthetic,
    translating,
)
from paper.experiments.learning.arms import arms
from paper.experiments.learning.kinds import kinds
from paper.experiments.statistics import Decision
from paper.training import Trainer, trainer

STUDIES = {
    one.name: one
    for one in (studies.RECALL_STUDY, studies.PARITY_STUDY, studies.PERMUTATIONS_STUDY, studies.FLIP_FLOP_STUDY)
}
FEW = {"steps": 2, "B": 2, "tested": 4}
TINY = {**FEW, "d": 16, "L": 1}
# Experiment -> a function that makes a tiny case of an arm; below, the arms. The models of bytes have one arm for each
# kind of heads and for each embedding of positions, and one with heads of two kinds.
MAKE = {
    **{name: partial(study.case, one, **FEW) for name, one in STUDIES.items()},
    "images": partial(images.case, **TINY),
    "bytes": partial(language.case, N=16, **TINY),
    "synthetic": partial(synthetic.case, "induction", **TINY),
    "fine-tuning": partial(fine_tuning.case, first_steps=3, N=16, **TINY),
    "transduction": partial(translating.case, "transduction", pairs=0, looked=2, **TINY),
    "pruning": lambda _, *own, **more: pruning.case(*own, looked=2, **{**TINY, "rate": 0.01, **more}),
}
BYTES = arms(4, 16)
FIRST = {kind: next(name for name, arm in BYTES.items() if arm.heads[0][0] == kind) for kind in kinds(16)}
ARMS = {
    **{name: list(one.arms) for name, one in STUDIES.items()},
    "images": list(images.ARMS),
    "bytes": sorted({*FIRST.values(), "embeddings", "sinusoids", "1 learned + 3 positional"}),
    "synthetic": list(synthetic.ARMS),
    "fine-tuning": list(fine_tuning.ARMS),
    "transduction": list(translating.arms(16)),
    "pruning": [pruning.ARM],
}
EVERY = some([(name, arm) for name, names in ARMS.items() for arm in names], 4)
every_experiment = pytest.mark.parametrize("name", MAKE)
# Where the best evaluation counts: the number of those on the validation part, and of others before them.
BEST = {
    "images": (images.LOOKS, 0),
    "bytes": (language.LOOKS, 0),
    "fine-tuning": (fine_tuning.LOOKS, 2),
    "transduction": (translating.LOOKS, 0),
    "pruning": (translating.LOOKS, 0),
}


pytestmark = pytest.mark.usefixtures("library")


@pytest.mark.parametrize(("name", "arm"), EVERY)
def test_a_run_is_stored_whole_and_again_gives_the_same(name, arm, tmp_path):
    case, experiment = MAKE[name](arm, 1), experiments.EXPERIMENTS[name]
    assert not go(only(name, case), tmp_path).errors
    (record,) = records.read_all(tmp_path, name)
    facts = record["facts"]
    for shares in record["repetitions"].values():
        assert set(shares) == set(fitting.QUANTITIES)
        assert all(0 <= shares[one][0] <= 1 for one in fitting.QUANTITIES[:2])
    assert len(facts["loss"]) == min(case["steps"], fitting.POINTS) and facts["parameters"] > 0
    evaluations = BEST.get(name, (synthetic.LOOKS if name == "synthetic" else 0,))[0]
    wanted = {round(case["steps"] * (i + 1) / evaluations) for i in range(evaluations)} - {0}
    assert [one["step"] for one in facts["validation"]] == sorted(wanted)
    assert without_seconds(experiment.run(case)) == without_seconds(record)


@every_experiment
def test_a_run_that_was_killed_goes_on_to_the_same_bits(name, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "EVERY_S", -1.0)  # a checkpoint after every step
    run, step, made = experiments.EXPERIMENTS[name].run, Trainer._make_step, []
    case = MAKE[name](ARMS[name][0], 1, steps=4)
    whole = without_seconds(run(case))
    first = case.get("first_steps", 0)

    def interrupted(self):
        made.append(self.step)
        if len(made) == first + 3:
            raise KeyboardInterrupt
        step(self)

    monkeypatch.setattr(Trainer, "_make_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(case, checkpoint=tmp_path / "run.pt")
    assert without_seconds(run(case, checkpoint=tmp_path / "run.pt")) == whole
    assert made == [*range(first), 0, 1, 2, *range(first), 2, 3], "two steps were not made again"


@every_experiment
def test_a_fast_form_that_is_off_is_not_stored(name, tmp_path, monkeypatch):
    def off(*_):
        raise AssertionError("fast form: expected a relative error of at most 1e-10, got 1")

    monkeypatch.setattr(fitting, "check_forms", off)
    report = go(only(name, MAKE[name](ARMS[name][0], 1)), tmp_path)
    assert len(report.errors) == 1 and "fast form: expected" in report.errors[0]
    assert not records.read_all(tmp_path, name)


@pytest.mark.parametrize("name", BEST)
def test_the_weights_of_the_best_evaluation_are_tested(name, monkeypatch):
    seen = []

    def evaluate(model, *_):
        seen.append({name: part.clone() for name, part in model.state_dict().items()})
        return {name: [float(len(seen))] for name in fitting.QUANTITIES}  # the first one has the lowest loss

    def same(one, other):
        return all(torch.equal(one[name], other[name]) for name in one)

    monkeypatch.setattr(fitting, "evaluate", evaluate)
    evaluations, before = BEST[name]
    experiments.EXPERIMENTS[name].run(MAKE[name](ARMS[name][0], 1, steps=evaluations))
    assert same(seen[before], seen[-1]) and not same(seen[before + evaluations - 1], seen[-1])


def seeds(name, arm, seed):
    case = MAKE[name](arm, seed)
    modules = {"images": images, "bytes": language, "synthetic": synthetic, "transduction": translating}
    return study.seeds_of(STUDIES[name], case) if name in STUDIES else modules[name].seeds_of(case)


@pytest.mark.parametrize("name", ["images", "bytes", "synthetic", "transduction"])
def test_the_arms_of_a_seed_share_all_but_the_weights(name):
    """No other seed has any of these numbers."""
    runs = [seeds(name, arm, seed) for seed in (1, 2, 3) for arm in ARMS[name]]
    for part in ("training", "tests", "checks", "dropout"):
        assert len({run[part] for run in runs}) == 3
    assert len({run["weights"] for run in runs}) == len(runs)
    assert len({seed for run in runs for seed in run.values()}) == len(runs) + 4 * 3


def but(case, *names):
    """The entries of a case without those that are named."""
    return tuple((name, value) for name, value in case.items() if name not in names)


TUNED = [name for name in experiments.EXPERIMENTS if name in {*MAKE, "translation"} or name.startswith("bytes-")]
TUNED = [name for name in TUNED if name not in ("pruning", "bytes-speed")]


@pytest.mark.parametrize("device", fitting.DEVICES)
@pytest.mark.parametrize("name", TUNED)
def test_all_rates_are_tried_first_and_where_one_is_chosen_all_seeds_are_asked_for(name, device, monkeypatch):
    experiment = experiments.EXPERIMENTS[name]
    monkeypatch.setattr(rates, "chosen", lambda *_: None)
    tuning = experiment.cases(device)
    assert {case["seed"] for case in tuning} == {rates.TUNING}
    arms = Counter(but(case, "rate") for case in tuning)
    assert set(arms.values()) == {2}, "all have as many rates to choose from"
    monkeypatch.setattr(rates, "chosen", lambda found, case: 0.125 if found == name else None)
    cases = experiment.cases(device)
    assert [case for case in cases if case["seed"] == rates.TUNING] == tuning
    counting = [case for case in cases if case["seed"] != rates.TUNING]
    each = Counter(but(case, "seed", "rate") for case in counting)
    assert set(each) == {but(case, "seed", "rate") for case in tuning}
    assert set(each.values()) == {len({case["seed"] for case in counting})} and set(each.values()) <= {5, 9, 10}
    assert {case["rate"] for case in counting} == {0.125}
    assert len({records.key(case) for case in cases}) == len(cases)
    for case in cases:
        assert case["arm"] in experiment.label(case)
        assert "decision_margin" not in case or Decision.of(case)


def test_the_rates_are_those_that_the_stored_tuning_runs_chose():
    found = {name: experiments.load(name) for name in experiments.EXPERIMENTS}
    chosen = {name: rates.choose(some) for name, some in found.items() if some and "rate" in some[0]["configuration"]}
    assert {name: found for name, found in chosen.items() if found} == rates.table()
    for one in STUDIES.values():
        assert all(study.chosen_rate(one, arm) in one.tried for arm in one.arms), "choose it: python -m tools.rates"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(("name", "arm"), EVERY)
def test_a_case_runs_on_cuda(name, arm):
    record = measure(experiments.EXPERIMENTS[name], MAKE[name](arm, 1, device="cuda"), "cuda")
    assert record["facts"]["parameters"]
