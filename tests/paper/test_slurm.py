"""Cases as jobs of a SLURM cluster, whose commands are scripts here: jobs write their own records and go on from
checkpoints."""

import os
import sys
import time
from pathlib import Path

import experiment_fakes
import pytest
from experiment_fakes import indices

from paper.experiments.engine import cli, records, runner

# It starts three tasks of an array at once; the others would wait.
SBATCH = """#!/bin/sh
grep -q -e '--array=0-5%1$' "$1" && grep -q -e '--cpus-per-task=1$' "$1" || exit 1
for task in 0 1 2; do
    SLURM_JOB_ID=7 SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID=$task sh "$1" >/dev/null 2>&1 &
done
echo "Submitted batch job 7"
"""
REFUSING = """#!/bin/sh
echo "sbatch: error: invalid partition specified: none" >&2
exit 1
"""
SRUN = f"""#!/bin/sh
while [ "$1" != "{sys.executable}" ]; do shift; done
exec "$@"
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A function that calls the command, with a script as sbatch; it returns the status."""
    pytest.importorskip("submitit")
    folders = (Path(__file__).parents[1], Path(runner.__file__).parents[3])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(runner, "ENTRY", "experiment_fakes")

    def called(script, *options):
        for name, text in (("sbatch", script), ("srun", SRUN)):
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        command = ["slow", "--device=cpu", f"--results={tmp_path / 'results'}", "--launcher=slurm", *options]
        return cli.main(command, experiment_fakes.KNOWN)

    return called


def test_jobs_write_their_own_records(slurm, tmp_path, capsys):
    """The command ends when the jobs are handed out. A job goes on from what an earlier one left."""
    results, slow = tmp_path / "results", experiment_fakes.KNOWN["slow"]
    left = runner.checkpoint(results, slow, slow.cases("cpu")[0])
    left.parent.mkdir(parents=True)
    left.touch()
    assert slurm(SBATCH, "--jobs=1", "--slurm=cpus_per_task=1") == 0
    assert capsys.readouterr().out.startswith("6 cases are the jobs of array 7: ")
    end = time.monotonic() + 300
    while (left.exists() or len(list(results.glob("slow/*/*.json"))) < 3) and time.monotonic() < end:
        time.sleep(0.1)
    assert indices(results, "slow") == [0, 1, 2]
    resumed = [record["facts"]["resumed"] for record in records.read_all(results, "slow", slow.cases("cpu"))]
    assert resumed == [True, False, False] and not left.exists()


@pytest.mark.bad_input
def test_what_slurm_refuses_is_said(slurm, capsys):
    assert slurm(REFUSING, "--slurm=partition=none") == 1
    assert "\nerror: slurm: sbatch: error: invalid partition" in capsys.readouterr().err


def test_a_job_that_is_preempted_begins_again():
    pytest.importorskip("submitit")
    job = runner.Job("experiment_fakes", ["slow"])
    assert job.checkpoint().function is job
