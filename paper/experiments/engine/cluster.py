"""Cases as jobs of a SLURM cluster, by submitit and SLURM's own commands."""

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paper.experiments.engine.launchers import LaunchError, Lookup, Options, in_worker
from paper.experiments.engine.provenance import device_slug
from paper.experiments.engine.records import Case
from paper.experiments.engine.runner import Experiment, Outcome
from paper.experiments.engine.signals import uninterrupted

POLL_S = 1.0  # between two looks for the results of the jobs
QUEUE_S = 30.0  # between two looks at the queue, which all users share
FORGOTTEN = "no longer in the queue"
# The states of `squeue` in which a job will not run again.
OVER = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT", FORGOTTEN),
)


@dataclass(eq=False)
class Job:
    """A case that was `submitted` by submitit. (Submitit's own wait needs accounting, and without it does not end.)"""

    submitted: Any
    state: str = "PENDING"
    looks: int = 0  # in a row that found it over

    def note(self, state: str) -> None:
        """Take down a look at the queue."""
        self.state = state
        self.looks = self.looks + 1 if state in OVER else 0

    def ended(self) -> bool:
        """Whether there is a result, or none will come: two looks must find the job over, as a result may be late."""
        paths = self.submitted.paths
        with suppress(OSError):
            paths.folder.chmod(paths.folder.stat().st_mode)  # else NFS may show the folder as it was
        return paths.result_pickle.exists() or self.looks > 1

    def result(self) -> Any:
        """What the job's function returned. Raises LaunchError if the job ended without a result."""
        paths = self.submitted.paths
        if not paths.result_pickle.exists():
            log = f"its log is {paths.stderr}" if paths.stderr.exists() else "it has not begun"
            raise LaunchError(f"job {self.submitted.job_id} ended without a result ({self.state}); {log}")
        return self.submitted.result()


class Slurm:
    """Runs each case as a job of a SLURM cluster, up to `slots` at once, or all; results return by shared files.

    Used as a context manager, which at its end cancels the jobs that still run. `folder` takes the jobs' logs, and
    `options` are those of submitit's SLURM executor (`partition`, `gpus_per_node`, `timeout_min`, ...). A job that
    times out or is preempted starts again; if the experiment `resumes`, it goes on from its checkpoint. A job that
    leaves the queue without a result, as when it was cancelled, is lost. The queue is read with `squeue`, which needs
    no accounting; while it does not answer, the run waits. Raises LaunchError without submitit, without a cluster, and
    for unknown options.

    A budget counts a job as begun when it is in the queue. If SIGKILL ends the process, its jobs run on and nobody
    takes their results: cancel them (`scancel --name ortho`) before the next run.
    """

    def __init__(self, slots: int | None, lookup: Lookup, folder: Path, options: Mapping[str, Any]) -> None:
        try:
            import submitit  # an extra of its own
        except ModuleNotFoundError as error:
            raise LaunchError("slurm: needs submitit; install the extra 'ortho[cluster]'") from error
        self.slots = math.inf if slots is None else slots
        self._lookup = lookup
        options = {"name": "ortho", "timeout_min": 60} | dict(options)
        try:
            self._executor = submitit.AutoExecutor(folder, cluster="slurm")
            self._executor.update_parameters(**{f"slurm_{name}": value for name, value in options.items()})
        except (NameError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise LaunchError(f"slurm: {error}") from error
        self._slugs: dict[str, str] = {}
        self._unfinished: set[Job] = set()
        self._next_look = 0.0  # when to look at the queue again, by the monotonic clock
        self._answered = True  # whether the queue answered the last look

    def device_slug(self, device: str) -> str:
        """The name of the cluster's nodes for files, which a first job reports."""
        if device not in self._slugs:
            print("waiting for a node of the cluster to name its device", file=sys.stderr, flush=True)
            job = self._submit(device_slug, device)
            self.wait([job])
            try:
                self._slugs[device] = job.result()
            except RuntimeError as error:
                raise LaunchError(f"slurm: no node could name its device: {error}") from error
        return self._slugs[device]

    def submit(self, experiment: Experiment, case: Case, device: str, options: Options) -> Job:
        function = _Resumed() if experiment.resumes else in_worker
        return self._submit(function, self._lookup, experiment.name, case, device, options)

    def _submit(self, function: Callable[..., Any], *arguments: Any) -> Job:
        with uninterrupted():  # so that each job in the queue is noted and can be cancelled
            try:
                job = Job(self._executor.submit(function, *arguments))
            except (OSError, RuntimeError) as error:
                raise LaunchError(f"slurm: a job was refused: {error}") from error
            self._unfinished.add(job)
        return job

    def wait(self, jobs: Collection[Job]) -> Collection[Job]:
        while jobs:
            if time.monotonic() >= self._next_look:
                self._look()
                self._next_look = time.monotonic() + QUEUE_S
            if ended := [job for job in jobs if job.ended()]:
                self._unfinished.difference_update(ended)
                return ended
            time.sleep(POLL_S)
        return ()

    def _look(self) -> None:
        """Note which jobs have left the queue."""
        # All jobs of the user, as asking for a forgotten job is an error. SQUEUE_* variables could hide some of them.
        command = ["squeue", "--noheader", "--states=all", f"--user={os.getuid()}", "--format=%A %T"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
        try:
            said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            if self._answered:
                reason = (getattr(error, "stderr", None) or str(error)).strip()
                print(f"slurm: no answer from the queue ({reason}); waiting", file=sys.stderr, flush=True)
            self._answered = False
            return
        self._answered = True
        states = dict(line.split(maxsplit=1) for line in said.stdout.splitlines())
        for job in self._unfinished:
            job.note(states.get(job.submitted.job_id, FORGOTTEN))

    def __enter__(self) -> "Slurm":
        return self

    def __exit__(self, *_: object) -> None:
        if self._unfinished:
            with uninterrupted():
                subprocess.run(["scancel", *(job.submitted.job_id for job in self._unfinished)], check=False)


class _Resumed:
    """`in_worker` for a job that the cluster may end and begin anew; submitit asks for the method `checkpoint`."""

    def __call__(self, *arguments: Any) -> Outcome:
        return in_worker(*arguments)

    def checkpoint(self, *arguments: Any) -> Any:
        """The job that takes over; by its arguments it finds where the experiment left off."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, *arguments)
