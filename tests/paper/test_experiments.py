"""Experiments run what is missing, keep to the budget, resume after a kill, and run from a bare source tree."""

import io
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from experiment_fakes import SLUG, Clock, fake, go, indices, of_other_code, outcome, stored

from paper import experiments
from paper.experiments.engine import cli, provenance, records
from paper.experiments.engine.runner import estimate
from paper.experiments.speed import attention, attention_variants, decoding

ROOT = Path(experiments.__file__).parents[2]


def test_runs_what_is_missing_and_nothing_twice(tmp_path):
    ran = []
    experiment = fake(lambda case: ran.append(case["index"]) or outcome())
    assert len(go(experiment, tmp_path).done) == 3
    assert go(experiment, tmp_path).done == []
    assert ran == [0, 1, 2]
    assert len(go(experiment, tmp_path, rerun=True).done) == 3
    assert indices(tmp_path) == [0, 1, 2]


def test_a_record_is_complete_on_its_own(tmp_path):
    go(fake(), tmp_path)
    record = json.loads(stored(tmp_path).read_text())["records"][1]
    assert record["experiment"] == "fake"
    assert record["configuration"] == {"index": 1, "work": 1}
    assert record["repetitions"] == {"arm": {"forward_s": [1.0, 1.0]}}
    origin = record["provenance"]
    assert origin["torch"] == torch.__version__
    assert origin["threads"] == torch.get_num_threads()
    assert origin["date_utc"].endswith("+00:00")
    assert origin["clean"] is True
    assert records.read(stored(tmp_path))[1]["provenance"]["code"] == provenance.code_of(fake().run)


def test_a_kill_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    go(fake(works=(1,)), tmp_path)
    before = stored(tmp_path).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            go(fake(), tmp_path)
    assert stored(tmp_path).read_bytes() == before
    assert len(records.read_all(tmp_path, "fake")) == 1  # the half-made file is not taken for records
    assert len(go(fake(), tmp_path).done) == 2


@pytest.mark.parametrize(
    ("takes", "works", "budget", "kept", "left"),
    [
        (lambda work: work, (1, 2, 10, 1, 1), 5.0, [0, 1, 3, 4], [2]),  # smaller cases still run
        (lambda _: 100, (1, 1, 1), 10.0, [0], [1, 2]),  # a second of work was expected of the first
        (lambda work: work, (12, 3, 12), 3.0, [1], [0, 2]),  # though nothing was measured before
        (lambda work: work, (12, 12), 3.0, [], [0, 1]),
    ],
)
def test_the_budget_is_kept(tmp_path, takes, works, budget, kept, left):
    clock = Clock()

    def one(case):
        clock.now += takes(case["work"])
        return outcome()

    report = go(fake(one, works=works), tmp_path, budget=budget, clock=clock)
    assert report.left == [f"fake: index={index} work={works[index]}" for index in left]
    assert (indices(tmp_path) if kept else stored(tmp_path).exists()) == (kept or False)
    assert len(go(fake(one, works=works), tmp_path, clock=clock).done) == len(left)


def test_a_case_finds_what_it_kept_before_it_was_interrupted(tmp_path):
    """Each case has a file of its own, which is not a record and is removed when the record is stored."""
    found = {}

    def resuming(case, checkpoint):
        found.setdefault(case["index"], []).append(checkpoint.read_text() if checkpoint.exists() else None)
        checkpoint.write_text(f"half of {case['index']}")
        if len(found[case["index"]]) == 1 and case["index"]:
            raise KeyboardInterrupt if case["index"] == 1 else ValueError("expected another")
        return outcome()

    with pytest.raises(KeyboardInterrupt):
        go(fake(resuming, resumes=True), tmp_path)
    (kept,) = tmp_path.glob(".checkpoints/fake/*/*")
    case = {"index": 1, "work": 1}
    assert kept == records.checkpoint(tmp_path, "fake", case, provenance.code_of(resuming))
    assert kept != records.checkpoint(tmp_path, "fake", case, provenance.code_of(outcome)), "that of other code"
    assert indices(tmp_path) == [0]
    assert len(go(fake(resuming, resumes=True), tmp_path).done) == 1
    assert len(list(tmp_path.glob(".checkpoints/fake/*/*"))) == 1, "a case that failed keeps its own"
    assert len(go(fake(resuming, resumes=True), tmp_path).done) == 1
    assert found == {0: [None], 1: [None, "half of 1"], 2: [None, "half of 2"]}
    assert list(tmp_path.glob(".checkpoints/fake/*/*")) == []


def test_how_far_a_run_is_shows_on_a_terminal_alone(tmp_path, monkeypatch, capsys):
    pytest.importorskip("tqdm")
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    arguments = ["--results", str(tmp_path), "--device", "cpu"]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        assert cli.main(arguments, {"fake": fake()}) == 0
    shown = terminal.getvalue()
    assert all(f"{ended}/3" in shown and f"index={ended} work=1" in shown for ended in range(3))
    lines = capsys.readouterr().out.splitlines()
    assert cli.main([*arguments, "--rerun"], {"fake": fake()}) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert lines[1:] == said.out.splitlines()[1:]


def test_estimates_come_from_the_nearest_case_and_never_shrink():
    measured = [(1.0, 2.0), (100.0, 50.0)]
    assert estimate(fake(), {"work": 2}, measured) == 4
    assert estimate(fake(), {"work": 80}, measured) == 50
    assert estimate(fake(), {"work": 7}, []) == 7


def test_a_failing_case_is_reported_and_the_others_run(tmp_path, capsys):
    def broken(case):
        if case["index"] == 0:
            raise AssertionError("output: expected a relative error of at most 1e-05, got 0.3")
        return outcome() if case["index"] == 1 else outcome(math.nan)

    experiment = fake(broken)
    assert cli.main(["--results", str(tmp_path), "--device", "cpu"], {"fake": experiment}) == 1
    assert indices(tmp_path) == [1]
    said = capsys.readouterr()
    assert "index=0 work=1: AssertionError: output: expected a relative error" in said.err
    assert "index=2 work=1: ValueError: record.repetitions.arm.forward_s: expected a finite number" in said.err


def test_unknown_names_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        experiments.main(["trainingstep"])
    assert caught.value.code == 2
    assert "did you mean 'training-step'?" in capsys.readouterr().err
    with pytest.raises(ValueError, match="expected one of 'training-step'.*, got 'nothing'"):
        experiments.load("nothing")
    assert experiments.load("training-step", tmp_path) == []


BAD_USAGE = [
    *((["--budget", budget], "expected a positive number of seconds") for budget in ("0", "nan", "inf", "soon")),
    (["--jobs", "0"], "--jobs: expected a positive number of cases, got '0'"),
    (["--jobs", "1.5"], "--jobs: expected a positive number of cases, got '1.5'"),
    (["--launcher", "slurm", "--slurm", "gpu"], "--slurm: expected KEY=VALUE, got 'gpu'"),
    (["--slurm", "partition=gpu"], "--slurm: expected --launcher slurm with it, got --launcher local"),
    (["--logs", "logs"], "--logs: expected --launcher slurm with it, got --launcher local"),
    (["fake", "--campaign"], "--campaign: expected no names with it, got fake"),
    pytest.param(
        ["--device", "cuda"],
        "--device: expected cpu, got cuda",
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
    ),
]
UNDER_TORCHRUN = [
    (["fake", "--jobs", "2"], "torchrun: expected neither --jobs nor --launcher slurm"),
    (["fake", "--launcher", "slurm"], "torchrun: expected neither --jobs nor --launcher slurm"),
    (["--list"], "torchrun: expected cases to run"),
    (["fake", "quiet"], "torchrun: expected no timings, which its processes would disturb, got quiet"),
]


def refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--device", "cpu", *arguments], {"fake": fake(), "quiet": fake(quiet=True)})
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.bad_input
@pytest.mark.parametrize(("arguments", "message"), BAD_USAGE)
def test_bad_options_exit_with_2(arguments, message, capsys):
    refused(arguments, message, capsys)


@pytest.mark.bad_input
@pytest.mark.parametrize(("arguments", "message"), UNDER_TORCHRUN)
def test_what_does_not_go_with_torchrun_is_refused(arguments, message, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    refused(arguments, message, capsys)


def test_every_experiment_has_cases_that_differ():
    """The cases also have what the readers of their records need."""
    for experiment in experiments.EXPERIMENTS.values():
        for device in cli.DEVICES:
            cases = experiment.cases(device)
            assert cases or (experiment.name in ("agreement", "ladder-large")) == (device == "cpu")  # for a GPU alone
            assert len({records.key(case) for case in cases}) == len(cases)
            assert all(experiment.work(case) > 0 and case["device"] == device for case in cases)
            if experiment.run is attention.run:
                assert all(set(experiment.needs.arms) <= set(attention_variants.arms_of(case)) for case in cases)
            if experiment.run is decoding.run:
                assert all(decoding.YARDSTICK in decoding.arms_of(case) for case in cases)


@pytest.mark.parametrize("action", [[], ["--list"], ["--show"]], ids=str)
def test_results_that_are_no_folder_are_refused(action, tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as caught:
        cli.main([*action, "--device", "cpu", "--results", str(tmp_path / "file")], {"fake": fake()})
    assert caught.value.code == 2
    assert "--results: expected a folder, got the file" in capsys.readouterr().err.splitlines()[-1]
    below = str(tmp_path / "file" / "below")
    assert cli.main(["--device", "cpu", "--results", below], {"fake": fake()}) == 1
    assert capsys.readouterr().err == f"error: {below}: expected a folder for the results (Not a directory)\n"


def test_list_and_show_measure_nothing(tmp_path, capsys):
    known, arguments = {"fake": fake(works=(1, 1))}, ["--results", str(tmp_path), "--device", "cpu"]
    assert cli.main(["--show", "fake", *arguments], known) == 0
    assert "no records in" in capsys.readouterr().out
    go(fake(works=(1,)), tmp_path)
    assert cli.main(["--list", *arguments], known) == 0
    assert capsys.readouterr().out.split()[:4] == ["fake:", "a", "title", "fresh"]
    assert cli.main(["--show", *arguments], known) == 0
    assert "index=0 work=1" in capsys.readouterr().out
    assert indices(tmp_path) == [0]


@pytest.mark.parametrize("own", [{}, {"show": lambda found: f"{len(found)} of my own"}], ids=["lines", "a table"])
def test_records_of_an_earlier_code_are_counted_below_what_is_shown(tmp_path, capsys, own):
    known, arguments = {"fake": fake(**own)}, ["--show", "--results", str(tmp_path)]
    go(known["fake"], tmp_path)
    assert cli.main(arguments, known) == 0
    assert "earlier state of the code" not in capsys.readouterr().out
    found = records.read(stored(tmp_path))
    found[1] = of_other_code(found[1])
    records.write(stored(tmp_path), found)
    other = {**found[0], "device": "cpu-other"}
    records.write(records.path(tmp_path, "fake", "cpu-other"), [other])  # another device, with nothing to note
    assert cli.main(arguments, known) == 0
    lines = capsys.readouterr().out.splitlines()
    noted = f"{SLUG}: 1 of 3 records were measured with an earlier state of the code"
    assert [line for line in lines if "earlier state" in line] == [lines[-1]] == [noted]


def test_only_the_command_starts_over_for_cpu_timing(tmp_path, monkeypatch):
    """Neither this process nor a notebook starts over; the next test shows that the command does."""
    started = []
    monkeypatch.setattr(os, "execve", lambda *arguments: started.append(arguments))
    monkeypatch.setattr(provenance, "in_cpu_environment", lambda: False)
    assert cli.main(["--results", str(tmp_path), "--device", "cpu"], {"fake": fake(quiet=True)}) == 0
    assert started == []


def test_runs_from_a_bare_source_tree_on_torch_and_numpy_alone(tmp_path):
    """The environment of CPU timings is not set, so the command starts itself over with it."""
    for package in ("ortho", "paper"):
        shutil.copytree(ROOT / package, tmp_path / package)
    script = """
import runpy, sys
for name in ("sympy", "scipy", "matplotlib", "yaml", "IPython", "jaxtyping", "submitit", "tqdm"):
    sys.modules[name] = None
import paper.experiments.speed.training_step as step
del sys.modules["sympy"]  # PyTorch's own dependency, which its backward pass imports
step._cpu_cases = lambda: [step.case("layer", 24, 32, H=2)]
step.BUDGETS["cpu"] = step.Budget(0.1, 7, 31)
sys.argv = ["paper", "experiments", "training-step", "--budget", "60", "--device", "cpu"]
runpy.run_module("paper", run_name="__main__", alter_sys=True)
"""
    unset = ("PYTHON", "ORTHO", "GIT", *provenance.CPU_ENVIRONMENT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    process = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert "FLOP bound" in process.stdout
    (record,) = records.read_all(tmp_path / "results", "training-step")
    assert record["provenance"]["environment"] == provenance.CPU_ENVIRONMENT
    assert record["provenance"]["commit"] is None
