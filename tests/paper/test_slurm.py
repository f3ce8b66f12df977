"""Cases as jobs of a real SLURM cluster, which has no accounting: none is waited for in vain, none is left behind."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import launched_experiments
import pytest
import slurm_cluster
from experiment_fakes import stored
from launched_experiments import DEADLINE_S, ENVIRONMENT, EXPERIMENTS, lookup
from slurm_cluster import eventually

from paper.experiments.engine import cli, cluster, launchers, records
from paper.experiments.engine.cluster import Slurm
from paper.experiments.engine.launchers import LaunchError

pytestmark = pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing())
LINGER = {"index": 1, "does": "linger"}


@pytest.fixture(scope="module")
def daemons(tmp_path_factory):
    pytest.importorskip("submitit")
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


@pytest.fixture
def slurm(daemons, monkeypatch):
    """A function that calls one of the cluster's SLURM commands and returns what it prints."""
    for name, value in daemons.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    monkeypatch.setattr(cluster, "POLL_S", 0.1)
    monkeypatch.setattr(cluster, "QUEUE_S", 0.1)
    yield lambda *words: subprocess.run(words, check=True, capture_output=True, text=True).stdout
    subprocess.run(["scancel", f"--user={os.getuid()}"], check=True)


@contextmanager
def deadline():
    """Fail if the block would wait for ever."""

    def late(*_):
        raise TimeoutError("waited in vain")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 2 * DEADLINE_S)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def indices(results, name):
    return [record["configuration"]["index"] for record in records.read(stored(results, name))]


def states(slurm):
    return slurm("squeue", "--noheader", "--format=%T").split()


def test_cases_are_jobs(slurm, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(launchers, "registered", lookup)
    arguments = ["plain", "--device=cpu", f"--results={tmp_path / 'results'}", "--launcher=slurm"]
    with deadline():
        assert cli.main(arguments, EXPERIMENTS) == 0
    assert indices(tmp_path / "results", "plain") == [0, 1]
    assert capsys.readouterr().err == "waiting for a node of the cluster to name its device\n"


def test_a_cancelled_job_ends(slurm, tmp_path):
    """The job leaves no result, and without accounting SLURM does not report its end to submitit. Before it is
    cancelled, it counts as running. test_cluster.py tests a job that the queue forgets."""
    with Slurm(None, lookup, tmp_path, {}) as launcher:
        job = launcher.submit(EXPERIMENTS["lingering"], LINGER, "cpu", {})
        eventually(lambda: states(slurm) == ["RUNNING"], "a job that is RUNNING")
        for _ in range(3):
            launcher._look()
        assert not job.ended()
        slurm("scancel", job.submitted.job_id)
        with deadline():
            assert list(launcher.wait([job])) == [job]
        with pytest.raises(LaunchError, match=rf"job {job.submitted.job_id} ended without a result \(CANCELLED\)"):
            job.result()


def test_jobs_end_with_the_command(slurm, tmp_path):
    words = [launched_experiments.__file__, "lingering", "--device=cpu", f"--results={tmp_path}/results"]
    command = [sys.executable, *words, "--launcher=slurm"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with deadline(), subprocess.Popen(command, **pipes) as process:
        for line in process.stdout:
            if "0 nothing" in line:
                break
        assert "RUNNING" in states(slurm)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate()
    assert process.returncode == 143
    assert errors.splitlines()[-1] == "terminated; what was measured before is stored"
    eventually(lambda: states(slurm) == [], "an empty queue")
    assert indices(tmp_path / "results", "lingering") == [0]
