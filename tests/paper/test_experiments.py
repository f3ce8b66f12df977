"""Experiments are run: what is missing, within the budget, resumed after a kill, from a bare tree."""

import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from experiment_fakes import SLUG, Clock, fake, go, indices, of_other_code, outcome, stored

from paper import experiments
from paper.experiments.engine import cli, provenance, records
from paper.experiments.engine.runner import estimate

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


def test_an_interrupted_run_resumes(tmp_path):
    ran = []

    def interrupted(case):
        ran.append(case["index"])
        if ran == [0, 1]:
            raise KeyboardInterrupt
        return outcome()

    with pytest.raises(KeyboardInterrupt):
        go(fake(interrupted), tmp_path)
    assert indices(tmp_path) == [0]
    assert len(go(fake(interrupted), tmp_path).done) == 2


def test_a_killed_run_loses_the_case_in_flight_alone(tmp_path):
    script = """
import os, signal, sys
from pathlib import Path
from paper.experiments import Experiment, run
def one(case):
    if case["index"] == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"seeds": {}, "repetitions": {"arm": {"forward_s": [1.0]}}}
cases = lambda device: [{"index": i, "work": 1} for i in range(3)]
run([Experiment("fake", "", cases, one)], "cpu", Path(sys.argv[1]))
"""
    process = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert process.returncode == -signal.SIGKILL
    assert indices(tmp_path) == [0, 1]
    assert len(go(fake(works=(1,)), tmp_path).done) == 1  # of another code; and the dead run's lock is gone


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


def test_the_budget_is_kept_and_smaller_cases_still_run(tmp_path):
    clock = Clock()

    def one(case):
        clock.now += case["work"]
        return outcome()

    report = go(fake(one, works=(1, 2, 10, 1, 1)), tmp_path, budget=5.0, clock=clock)
    assert indices(tmp_path) == [0, 1, 3, 4]
    assert report.left == ["fake: index=2 work=10"]
    assert clock.now <= 5
    assert go(fake(one, works=(1, 2, 10, 1, 1)), tmp_path, clock=clock).done == ["fake: index=2 work=10"]


def test_nothing_starts_after_the_budget(tmp_path):
    clock = Clock()

    def slow(_):
        clock.now += 100
        return outcome()

    report = go(fake(slow), tmp_path, budget=10.0, clock=clock)
    assert len(report.done) == 1  # of which a second of work was expected
    assert len(report.left) == 2


def test_a_case_that_should_not_fit_is_left_though_nothing_was_measured(tmp_path):
    clock = Clock()

    def one(case):
        clock.now += case["work"]
        return outcome()

    report = go(fake(one, works=(12, 3, 12)), tmp_path, budget=3.0, clock=clock)
    assert indices(tmp_path) == [1]
    assert report.left == ["fake: index=0 work=12", "fake: index=2 work=12"]
    assert go(fake(name="other", works=(12, 12)), tmp_path, budget=3.0, clock=Clock()).done == []
    assert not stored(tmp_path, "other").exists()


def test_a_case_finds_what_it_kept_before_it_was_interrupted(tmp_path):
    """Each has a file of its own, which is no record, and is gone when the record is stored."""
    found = {}

    def resuming(case, checkpoint):
        found.setdefault(case["index"], []).append(checkpoint.read_text() if checkpoint.exists() else None)
        checkpoint.write_text(f"half of {case['index']}")
        if len(found) == 2 and len(found[1]) == 1:
            raise KeyboardInterrupt
        return outcome()

    with pytest.raises(KeyboardInterrupt):
        go(fake(resuming, resumes=True), tmp_path)
    (kept,) = tmp_path.glob(".checkpoints/fake/*/*")
    case = {"index": 1, "work": 1}
    assert kept == records.checkpoint(tmp_path, "fake", case, provenance.code_of(resuming))
    assert kept != records.checkpoint(tmp_path, "fake", case, provenance.code_of(outcome)), "that of other code"
    assert indices(tmp_path) == [0]
    assert len(go(fake(resuming, resumes=True), tmp_path).done) == 2
    assert found == {0: [None], 1: [None, "half of 1"], 2: [None]}
    assert list(tmp_path.glob(".checkpoints/fake/*/*")) == []


def test_a_failed_case_keeps_its_checkpoint(tmp_path):
    def failing(case, checkpoint):
        checkpoint.touch()
        raise ValueError("expected another")

    go(fake(failing, resumes=True, works=(1,)), tmp_path)
    assert len(list(tmp_path.glob(".checkpoints/fake/*/*"))) == 1


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
    said = capsys.readouterr().err
    assert "did you mean 'training-step'?" in said
    assert "did you mean 'training-step'?" in said
    with pytest.raises(ValueError, match="expected one of 'training-step'.*, got 'nothing'"):
        experiments.load("nothing")
    assert experiments.load("training-step", tmp_path) == []


@pytest.mark.parametrize("budget", ["0", "-1", "nan", "inf", "soon"])
def test_a_bad_budget_is_refused(budget, capsys):
    with pytest.raises(SystemExit) as caught:
        experiments.main(["--budget", budget])
    assert caught.value.code == 2
    assert "expected a positive number of seconds" in capsys.readouterr().err


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_missing_cuda_device_is_refused(capsys):
    with pytest.raises(SystemExit):
        experiments.main(["--device", "cuda"])
    assert "--device: expected cpu, got cuda" in capsys.readouterr().err


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


def test_the_command_alone_starts_over_for_cpu_timing(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(os, "execve", lambda *arguments: started.append(arguments))
    monkeypatch.setattr(provenance, "in_cpu_environment", lambda: False)
    arguments = ["--results", str(tmp_path), "--device", "cpu"]
    assert cli.main(arguments, {"fake": fake(quiet=True)}) == 0
    assert started == []  # this process is not the command
    monkeypatch.setattr(cli, "_is_own_process", lambda: True)
    assert cli.main(arguments, {"fake": fake(quiet=True)}) == 0
    ((program, command, environment),) = started
    assert program == command[0] == sys.executable
    assert provenance.CPU_ENVIRONMENT.items() <= environment.items()


def test_runs_from_a_bare_source_tree_on_torch_and_numpy_alone(tmp_path):
    for package in ("ortho", "paper"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    script = """
import runpy, sys
for name in ("sympy", "scipy", "matplotlib", "yaml", "IPython", "jaxtyping", "submitit", "tqdm"):
    sys.modules[name] = None
import paper.experiments.speed.training_step as step
del sys.modules["sympy"]  # PyTorch's own dependency, which its backward pass imports
step._cpu_cases = lambda: [step.case("layer", 24, 32, H=2)]
step.SECONDS["cpu"] = 0.1
sys.argv = ["paper", "experiments", "training-step", "--budget", "60", "--device", "cpu"]
runpy.run_module("paper", run_name="__main__", alter_sys=True)
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "ORTHO", "GIT"))}
    process = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment | provenance.CPU_ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert "FLOP bound" in process.stdout
    (record,) = records.read_all(tmp_path / "results", "training-step")
    assert record["provenance"]["environment"] == provenance.CPU_ENVIRONMENT
    assert record["provenance"]["commit"] is None
