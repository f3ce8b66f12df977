"""Experiments run what has no record, keep to the budget, go on after a kill, and run from a bare source tree."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import experiment_fakes
import pytest
from experiment_fakes import SLUG, fake, go, indices, outcome

from paper import experiments
from paper.experiments.engine import cli, provenance, records, runner
from paper.experiments.engine.runner import UnwritableError, checkpoint, missing
from paper.experiments.speed import attention, attention_variants

ROOT = Path(experiments.__file__).parents[2]


@pytest.fixture
def call(tmp_path, capsys):
    """A function that calls the command with some experiments; it returns the status, what was printed, and errors."""

    def called(*arguments, known=None):
        known = known or {"fake": fake()}
        status = cli.main([*arguments, "--device", "cpu", "--results", str(tmp_path / "results")], known)
        said = capsys.readouterr()
        return status, said.out, said.err

    return called


def test_runs_what_is_missing_and_nothing_twice(tmp_path):
    ran = []
    experiment = fake(lambda case: ran.append(case["index"]) or outcome())
    assert len(go(experiment, tmp_path).done) == 3
    assert go(experiment, tmp_path).done == []
    assert ran == [0, 1, 2]
    assert len(go(experiment, tmp_path, rerun=True).done) == 3
    assert indices(tmp_path) == [0, 1, 2]


def test_which_records_stand(tmp_path):
    """Not those of another version; a variant more changes nothing. Any CPU may have trained a model, and each has its
    own timings, which are old but never stale."""
    go(fake(), tmp_path)
    stored = records.read_all(tmp_path, "fake")
    assert [case["index"] for case in missing(fake(works=(1,) * 5), "cpu", stored, SLUG)] == [3, 4]
    assert len(missing(fake(version=2), "cpu", stored, SLUG)) == 3
    assert missing(fake(version=2, is_timing=True), "cpu", stored, SLUG) == []
    stored = [one | {"device": "cpu-abacus"} for one in stored]
    assert missing(fake(), "cpu", stored, SLUG) == []
    assert len(missing(fake(is_timing=True), "cpu", stored, SLUG)) == len(missing(fake(), "cuda", stored, None)) == 3


def test_no_case_starts_after_the_budget(tmp_path):
    now = [0.0]

    def one(case):
        now[0] += case["work"]
        return outcome()

    report = go(fake(one, works=(1, 3, 2, 1)), tmp_path, budget=5.0, clock=lambda: now[0])
    assert report.left == ["fake: index=3 work=1"] and indices(tmp_path) == [0, 1, 2]


def test_a_case_goes_on_from_its_checkpoint_which_then_is_removed(tmp_path):
    def resuming(case, checkpoint):
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        if not checkpoint.exists():
            checkpoint.touch()
            raise KeyboardInterrupt
        return outcome()

    experiment = fake(resuming, works=(1,))
    with pytest.raises(KeyboardInterrupt):
        go(experiment, tmp_path)
    assert checkpoint(tmp_path, experiment, {"index": 0, "work": 1}).exists() and indices(tmp_path) == []
    assert len(go(experiment, tmp_path).done) == 1
    assert list(tmp_path.rglob("*.pt")) == []


def test_a_failing_case_is_reported_and_the_others_run(call, tmp_path):
    def broken(case):
        if case["index"] == 0:
            raise ConnectionError("expected a network")
        return outcome(1.0 if case["index"] == 1 else float("nan"))

    status, _, errors = call(known={"fake": fake(broken)})
    assert status == 1 and indices(tmp_path / "results") == [1]
    assert "index=0 work=1: ConnectionError: expected a network" in errors
    assert "index=2 work=1: ValueError: repetitions.arm.forward_s: expected finite numbers" in errors


def test_a_full_disk_ends_the_run_in_a_sentence(call, tmp_path, monkeypatch):
    def full(file, record):
        raise OSError(28, "No space left on device")

    call()
    monkeypatch.setattr(records, "write", full)
    status, _, errors = call("--rerun")
    assert status == 1 and re.fullmatch(r"error: .*\.json: the record could not be written: No space .*\n", errors)
    assert indices(tmp_path / "results") == [0, 1, 2], "the old ones"
    with pytest.raises(UnwritableError):
        go(fake(), tmp_path / "others")


def test_cases_side_by_side_each_in_its_process(tmp_path, monkeypatch):
    """The process of one case ends without a word: it alone is lost."""
    monkeypatch.setattr(runner, "ENTRY", "experiment_fakes")
    report = go(experiment_fakes.KNOWN["dying"], tmp_path, jobs=2)
    assert indices(tmp_path, "dying") == [0, 2] and len(report.done) == 2
    assert report.errors == ["dying: index=1 work=1: its process ended with status 3"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["KILL", "TERM"])
def test_a_kill_costs_at_most_the_cases_at_hand(number, tmp_path):
    command = [sys.executable, experiment_fakes.__file__, "slow", "--device", "cpu", "--results", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(Path(__file__).parents[1])))}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while len(list(tmp_path.glob("slow/*/*.json"))) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate()
    assert 2 <= len(indices(tmp_path, "slow")) <= 6  # each is whole, or reading raises
    if number == signal.SIGTERM and process.returncode:
        assert process.returncode == 130 and errors.startswith("interrupted: the cases that were running are lost")
    assert subprocess.run(command, env=environment, check=False).returncode == 0
    assert indices(tmp_path, "slow") == list(range(6))


@pytest.mark.bad_input
def test_bad_options_exit_with_2(tmp_path, capsys):
    for arguments in (["--budget", "nan"], ["--slurm", "partition=gpu"], ["--case", "one"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(["--device", "cpu", "--results", str(tmp_path), *arguments], {"fake": fake()})
        assert caught.value.code == 2 and f"{arguments[0]}: " in capsys.readouterr().err


def test_one_case_is_run_by_its_label_and_compared_with_the_stored_one(call, tmp_path):
    """Also by its configuration, and where it is no longer asked for. What is compared is not stored."""
    value, known = [0.5], {}
    known["fake"] = fake(lambda case: outcome() | {"facts": {"loss": value[0]}})
    assert call("fake", "--case", "index=1 work=1", known=known)[0] == 0
    assert indices(tmp_path / "results") == [1]
    known["fake"] = replace(known["fake"], cases=lambda _: [])
    compare = ("fake", "--case", records.key({"index": 1, "work": 1}), "--compare")
    status, said, _ = call(*compare, known=known)
    assert status == 0 and said.splitlines()[-1] == "  equal to the bit"
    value[0] = 0.4
    assert call(*compare, known=known)[1].splitlines()[-1] == "  facts.loss: differs by 0.2"
    assert records.read_all(tmp_path / "results", "fake")[0]["facts"] == {"loss": 0.5}
    status, _, errors = call("fake", "--case", "nothing", known=known)
    assert status == 1 and "expected the label of one case of fake for cpu, as --list has them" in errors


def test_every_experiment_has_cases_with_labels_that_differ():
    for experiment in experiments.EXPERIMENTS.values():
        for device in cli.DEVICES:
            cases = experiment.cases(device)
            assert cases or device == "cuda"
            assert len({records.mark(case) for case in cases}) == len({*map(experiment.label, cases)}) == len(cases)
            assert all(case["device"] == device for case in cases)
            if experiment.name in ("attention-speed", "flash-speed"):
                assert all(attention_variants.YARDSTICK in attention_variants.arms_of(case) for case in cases)
    assert experiments.EXPERIMENTS["attention-speed"].run is attention.run


def test_runs_from_a_bare_source_tree_on_few_packages(tmp_path):
    """The environment of CPU runs is not set, so the command starts itself over with it."""
    for package in ("ortho", "paper"):
        shutil.copytree(ROOT / package, tmp_path / package)
    script = """
import runpy, sys
for name in ("scipy", "matplotlib", "yaml", "IPython", "jaxtyping", "submitit"):
    sys.modules[name] = None
import paper.experiments.speed.training_step as step
step._cpu_cases = lambda: [step.case("layer", 24, 32, H=2)]
step.BUDGETS["cpu"] = step.Budget(0.1, 7, 31)
sys.argv = ["paper", "experiments", "training-step", "--budget", "60", "--device", "cpu"]
runpy.run_module("paper", run_name="__main__", alter_sys=True)
"""
    unset = ("PYTHON", "ORTHO", "GIT", *provenance.CPU_ENVIRONMENT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    command = [sys.executable, "-c", script]
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    (record,) = records.read_all(tmp_path / "results", "training-step")
    assert record["provenance"]["environment"] == provenance.CPU_ENVIRONMENT
    assert record["provenance"]["commit"] is None
