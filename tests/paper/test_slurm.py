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
    """The command ends when all jobs are handed out. One job is queued again while it runs, and goes on."""
    results = tmp_path / "results"
    command = [
        "slow",
        "--device=cpu",
        f"--results={results}",
        "--launcher=slurm",
        "--jobs=1",
        "--slurm=cpus_per_task=1",
    ]
    assert cli.main(command, experiment_fakes.KNOWN) == 0
    number = capsys.readouterr().out.partition("array ")[2].partition(":")[0]
    eventually(lambda: list(results.rglob("*.pt")), "a job that runs")
    running = [line.partition("_")[2] for line in slurm("squeue", "--noheader", "--states=R", "--format=%i")]
    slurm("scontrol", "requeue", f"{number}_{running[0]}")
    eventually(lambda: slurm("squeue", "--noheader") == [], "an empty queue", 300)
    assert indices(results, "slow") == list(range(6))
    assert any(record["facts"]["resumed"] for record in records.read_all(results, "slow"))
    assert cli.main(command, experiment_fakes.KNOWN) == 0 and capsys.readouterr().out == "", "nothing is left to do"
