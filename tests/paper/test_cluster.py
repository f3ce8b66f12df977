"""Cases as jobs of a SLURM cluster, whose commands are imitated here; and the options that say where cases run."""

import os
import signal
import sys
from pathlib import Path

import pytest
from experiment_fakes import stored
from launched_experiments import ENVIRONMENT, EXPERIMENTS, lookup

from paper.experiments.engine import cli, launchers, records, signals
from paper.experiments.engine import cluster as clusters
from paper.experiments.engine.cluster import Slurm
from paper.experiments.engine.launchers import LaunchError


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A folder where imitations of SLURM's commands keep what they are given; the one node is this machine."""
    pytest.importorskip("submitit")
    folder = tmp_path / "cluster"
    folder.mkdir()
    commands = {
        "sbatch": f'cp "$1" {folder}/$$.sh\necho "Submitted batch job $$"\n[ -e {folder}/down ] && exit\n'
        f"SLURM_JOB_ID=$$ sh {folder}/$$.sh >/dev/null 2>&1 </dev/null &",
        "srun": f'while [ "$1" != {sys.executable} ]; do shift; done\nexec "$@"',
        "squeue": f'cd {folder}\nfor script in *.sh; do echo "${{script%.sh}} RUNNING"; done',
        "scancel": f"echo $* >>{folder}/cancelled",
    }
    for name, text in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    return folder


def test_cases_are_jobs_of_a_cluster(cluster, tmp_path, monkeypatch, capsys):
    """The job finds what a case keeps for its resumption, and its script has the given options."""
    monkeypatch.setattr(launchers, "registered", lookup)
    monkeypatch.setattr(clusters, "POLL_S", 0.1)
    given = ["partition=gpu", "gpus_per_node=1", "timeout_min=7"]
    options = ["--launcher", "slurm", *(f"--slurm={option}" for option in given)]
    results = tmp_path / "results"
    assert cli.main(["resuming", "--device", "cpu", "--results", str(results), *options], EXPERIMENTS) == 0
    (record,) = records.read(stored(results, "resuming"))
    assert record["facts"]["pid"] != os.getpid()
    assert not Path(record["facts"]["checkpoint"]).exists()
    assert Path(record["facts"]["checkpoint"]).parents[1] == results / ".checkpoints" / "resuming"
    assert len(list((tmp_path / ".slurm").glob("*_submission.sh"))) == 2
    scripts = [script.read_text() for script in cluster.glob("*.sh")]
    assert len(scripts) == 2  # one asks for the device's name, one runs the case
    for line in ("--partition=gpu", "--gpus-per-node=1", "--time=7", "--job-name=ortho"):
        assert all(f"#SBATCH {line}\n" in script for script in scripts)
    assert "[1/1] 0 resume" in capsys.readouterr().out
    assert not (cluster / "cancelled").exists()


def test_a_signal_while_a_job_is_submitted_leaves_none(cluster, tmp_path):
    """The queue has the job before the command that submits it has reported it."""
    (cluster / "down").touch()
    submit = (cluster / "sbatch").read_text()
    (cluster / "sbatch").write_text(
        submit.replace("#!/bin/sh\n", f"#!/bin/sh\nkill -{signal.SIGTERM} $PPID\nsleep 0.2\n")
    )
    plain = EXPERIMENTS["plain"]
    with pytest.raises(signals.TerminatedError), signals.terminable(), Slurm(2, lookup, tmp_path, {}) as launcher:
        launcher.submit(plain, plain.cases("cpu")[0], "cpu", {})
    (script,) = cluster.glob("*.sh")
    assert (cluster / "cancelled").read_text().split() == [script.stem]


def test_a_job_that_leaves_the_queue_is_lost(cluster, tmp_path, monkeypatch, capsys):
    """It is lost only after two looks in a row have missed it, and never while the queue does not answer."""
    (cluster / "down").touch()
    monkeypatch.setattr(clusters, "POLL_S", 0.0)
    monkeypatch.setattr(clusters, "QUEUE_S", 0.0)
    answers = ["exit 1", "exit 1", "echo $JOB PENDING", "", "echo $JOB COMPLETING", "exit 1", "", "echo $JOB TIMEOUT"]
    for index, answer in enumerate(answers):
        (cluster / f"answer-{index}").write_text(answer)
    (cluster / "squeue").write_text(
        f"#!/bin/sh\ncd {cluster}\nJOB=$(basename *.sh .sh)\nset -- answer-*\n"
        'answer=$(cat "$1")\nrm "$1"\necho broken >&2\neval "$answer"\n'
    )
    plain = EXPERIMENTS["plain"]
    with Slurm(1, lookup, tmp_path, {}) as launcher:
        job = launcher.submit(plain, plain.cases("cpu")[0], "cpu", {})
        assert list(launcher.wait([job])) == [job]
    assert list(cluster.glob("answer-*")) == []
    with pytest.raises(LaunchError, match=r"ended without a result \(TIMEOUT\); it has not begun"):
        job.result()
    assert capsys.readouterr().err == 2 * "slurm: no answer from the queue (broken); waiting\n"
    assert not (cluster / "cancelled").exists()


def test_a_job_that_is_begun_anew_measures_its_case(tmp_path):
    pytest.importorskip("submitit")
    one = EXPERIMENTS["resuming"]
    arguments = (lookup, one.name, one.cases("cpu")[0], "cpu", {"checkpoint": tmp_path / "kept"})
    (tmp_path / "kept").write_text("as far as this")
    anew = clusters._Resumed().checkpoint(*arguments)
    assert anew.result()["facts"]["found"] == "as far as this"


@pytest.mark.bad_input
def test_a_cluster_that_cannot_be_used_is_refused(cluster, tmp_path, monkeypatch, capsys):
    arguments = ["plain", "--device", "cpu", "--results", str(tmp_path / "results"), "--launcher", "slurm"]
    assert cli.main([*arguments, "--slurm", "partitoin=gpu"], EXPERIMENTS) == 1
    assert "slurm: Unknown argument 'partitoin'" in capsys.readouterr().err
    (cluster / "sbatch").write_text("#!/bin/sh\necho invalid partition >&2\nexit 1\n")
    assert cli.main(arguments, EXPERIMENTS) == 1
    said = capsys.readouterr().err
    assert "error: slurm: a job was refused: " in said and "invalid partition" in said
    monkeypatch.setenv("PATH", "")
    assert cli.main(arguments, EXPERIMENTS) == 1
    assert "error: slurm: Could not detect" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert cli.main(arguments, EXPERIMENTS) == 1
    assert capsys.readouterr().err == "error: slurm: needs submitit; install the extra 'ortho[cluster]'\n"


def test_options_of_jobs_are_json_where_they_can_be():
    texts = ["nodes=1", "mem_gb=0.5", "exclusive=true", "time=01:00:00", "comment=a=b"]
    values = [("nodes", 1), ("mem_gb", 0.5), ("exclusive", True), ("time", "01:00:00"), ("comment", "a=b")]
    assert [cli._option(text) for text in texts] == values
