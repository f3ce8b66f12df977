"""Cases as jobs of a real SLURM cluster: they write their own records, and one that is preempted goes on."""

import os
import subprocess
from pathlib import Path

import experiment_fakes
import pytest
import slurm_cluster
from experiment_fakes import indices
from slurm_cluster import eventually

from paper.experiments.engine import cli, records, runner

pytestmark = pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing())


@pytest.fixture
def slurm(tmp_path_factory, monkeypatch):
    """A function that calls one of the cluster's commands and returns the words that it prints."""
    pytest.importorskip("submitit")
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm")) as environment:
        folders = (Path(__file__).parents[1], Path(runner.__file__).parents[3])
        for name, value in (*environment.items(), ("PYTHONPATH", os.pathsep.join(map(str, folders)))):
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(runner, "ENTRY", "experiment_fakes")
        yield lambda *words: subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()


def test_jobs_write_their_own_records(slurm, tmp_path, capsys):
    """The command ends when the jobs are handed out. A job goes on from what an earlier one left; the case of one that
    was cancelled is handed out by the same command again."""
    results, slow = tmp_path / "results", experiment_fakes.KNOWN["slow"]
    left = runner.checkpoint(results, slow, slow.cases("cpu")[0])
    left.parent.mkdir(parents=True)
    left.touch()
    command = ["slow", "--device=cpu", f"--results={results}", "--launcher=slurm", "--jobs=1"]
    assert cli.main([*command, "--slurm=cpus_per_task=1"], experiment_fakes.KNOWN) == 0
    number = capsys.readouterr().out.partition("array ")[2].partition(":")[0]
    slurm("scancel", f"{number}_5")
    eventually(lambda: slurm("squeue", "--noheader") == [], "an empty queue", 500)
    assert indices(results, "slow") == list(range(5))
    resumed = [record["facts"]["resumed"] for record in records.read_all(results, "slow", slow.cases("cpu"))]
    assert resumed == [True, False, False, False, False] and not left.exists()
    assert cli.main(command, experiment_fakes.KNOWN) == 0
    assert capsys.readouterr().out.startswith("1 cases are the jobs of array")
    slurm("scancel", "--name=ortho")


@pytest.mark.bad_input
def test_what_slurm_refuses_is_said(slurm, tmp_path, capsys):
    command = ["slow", "--device=cpu", f"--results={tmp_path}", "--launcher=slurm", "--slurm=partition=none"]
    assert cli.main(command, experiment_fakes.KNOWN) == 1
    assert "\nerror: slurm: sbatch: error: invalid partition" in capsys.readouterr().err


def test_a_job_that_is_preempted_begins_again():
    pytest.importorskip("submitit")
    job = runner.Job("experiment_fakes", ["slow"])
    assert job.checkpoint().function is job
