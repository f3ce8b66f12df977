"""Cases run in other processes: at once, on a cluster, together; what one loses, and that none is left behind."""

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import Future

import launched_experiments
import pytest
from experiment_fakes import SLUG, Clock, fake, go, indices, stored
from launched_experiments import DEADLINE_S, ENVIRONMENT, EXPERIMENTS, lookup, meeting
from torch import distributed

from paper.experiments import run
from paper.experiments.engine import records, runner
from paper.experiments.engine.launchers import Processes, process_group
from paper.experiments.engine.runner import Here

COMMAND = [launched_experiments.__file__, "--device", "cpu"]
PROCESSES = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def facts(results, name):
    """The facts of each case's record, by the case's index, in the order of the file."""
    return {record["configuration"]["index"]: record["facts"] for record in records.read(stored(results, name))}


class Later:
    """A launcher whose jobs take turns: the one that needs least ends first, and moves the clock by what it needs."""

    def __init__(self, slots, clock):
        self.slots, self.clock, self.here = slots, clock, Here(clock)
        self.most, self.ends = 0, {}

    device_slug = staticmethod(lambda _: SLUG)

    def submit(self, experiment, case, device, options):
        job = Future()
        job.set_result(self.here.outcome(experiment, case, device, options) | {"elapsed_s": float(case["work"])})
        self.ends[job] = self.clock() + case["work"]
        return job

    def wait(self, jobs):
        assert set(jobs) == set(self.ends)
        self.most = max(self.most, len(jobs))
        first = min(jobs, key=self.ends.get)
        self.clock.now = self.ends.pop(first)
        return [first]


def test_as_many_cases_at_once_as_there_are_slots(tmp_path):
    """3 and 1 begin; 1 ends, 4 begins; 3 ends, 2 begins; 4 and 2 end together."""
    clock = Clock()
    launcher = Later(2, clock)
    report = go(fake(works=(3, 1, 4, 2)), tmp_path, launcher=launcher, clock=clock)
    assert [line.split()[1] for line in report.done] == ["index=1", "index=0", "index=2", "index=3"]
    assert (launcher.most, clock.now) == (2, 5)
    assert indices(tmp_path) == [0, 1, 2, 3]  # whichever ended first


def test_the_budget_holds_for_cases_at_once(tmp_path):
    """At 2 s the case of 4 would end at 6 s, that of 1 still fits."""
    clock = Clock()
    report = go(fake(works=(3, 2, 4, 1)), tmp_path, launcher=Later(2, clock), clock=clock, budget=5.0)
    assert report.left == ["fake: index=2 work=4"]
    assert indices(tmp_path) == [0, 1, 3]
    assert clock.now <= 5


def test_timings_are_taken_one_at_a_time(tmp_path):
    said, launcher = [], Later(3, Clock())
    go(fake(quiet=True), tmp_path, launcher=launcher, echo=said.append)
    assert launcher.most == 1
    assert said[1] == "fake: one case at a time, as these are timings"


def test_a_record_is_stored_under_the_device_that_it_names(tmp_path, monkeypatch):
    """A cluster may have more than one kind."""
    go(fake(works=(1,)), tmp_path)
    monkeypatch.setattr(runner, "device_slug", lambda _: "another")
    launcher = Later(1, Clock())
    assert len(go(fake(works=(1, 1)), tmp_path, launcher=launcher).done) == 1
    assert indices(tmp_path) == [0]
    (record,) = records.read(records.path(tmp_path, "fake", "another"))
    assert record["configuration"]["index"] == 1


def test_cases_run_at_once_and_fail_alone(tmp_path, monkeypatch):
    """Two that wait for each other; one whose process dies; one whose exception does not survive a pickle."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # of which a worker makes one
    said = []
    chosen = [meeting(tmp_path / "met"), EXPERIMENTS["failing"]]
    with Processes(2, lookup) as launcher:
        report = run(chosen, "cpu", tmp_path / "results", launcher=launcher, echo=said.append)
    assert sorted(report.done) == ["failing: 2 nothing", "meeting: 0 meet", "meeting: 1 meet"]
    dead, odd = sorted(report.errors)
    assert dead.startswith("failing: 0 die: BrokenProcessPool: ")
    assert odd == "failing: 1 fail: OddError: an error and its message"
    met = facts(tmp_path / "results", "meeting")
    assert list(met) == [0, 1]  # in the order of the cases, whichever ended first
    assert len({os.getpid(), met[0]["pid"], met[1]["pid"]}) == 3
    assert met[0]["threads"] == 1
    # Its own time: not that of starting its process, which takes seconds.
    assert records.read(stored(tmp_path / "results", "failing"))[0]["elapsed_s"] < 1
    assert f"[2/3] error: {odd}" in said


@pytest.mark.parametrize(
    ("sent", "jobs"),
    [(signal.SIGKILL, 2), (signal.SIGINT, 2), (signal.SIGTERM, 1)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_no_worker_is_left_behind(sent, jobs, tmp_path):
    """One that is busy, one that is idle. Their stdout is the command's: it ends when the last of them has."""
    process = subprocess.Popen(
        [sys.executable, *COMMAND, "lingering", "--jobs", str(jobs), "--results", str(tmp_path)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which tests in the background ignore
    )
    lines = [process.stdout.readline() for _ in range(3)]  # a header, a record, and a case that lingers
    assert "lingering\n" in lines
    if sent == signal.SIGINT:
        os.killpg(process.pid, sent)  # as a terminal does
    else:
        process.send_signal(sent)
    _, errors = process.communicate(timeout=2 * DEADLINE_S)  # one that is left lingers for twice as long
    if sent == signal.SIGKILL:
        assert process.returncode == -sent
    else:
        assert process.returncode == 128 + sent
        said = "interrupted" if sent == signal.SIGINT else "terminated"
        assert errors == f"{said}; what was measured before is stored\n"
    assert list(facts(tmp_path, "lingering")) == [0]
    with records.lock(tmp_path):
        pass


def test_the_processes_of_torchrun_share_each_case_and_an_error_in_one_ends_all(tmp_path):
    """In the second case rank 0 waits for rank 1, which has failed, and would wait for half an hour."""
    ended = subprocess.run(
        [*PROCESSES, *COMMAND, "torn", "--results", str(tmp_path)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,
        check=False,
    )
    assert ended.returncode != 0
    assert "ValueError: expected another rank" in ended.stderr
    found = facts(tmp_path, "torn")
    assert list(found) == [0]
    assert (found[0]["sum"], found[0]["rank"]) == (3, 0)
    assert [line.split(":")[0] for line in ended.stdout.splitlines()] == [f"torn on {SLUG}", "[1/3] 0 reduce"]


def test_processes_belong_together_under_torchrun_alone(monkeypatch):
    with process_group("cpu"):
        assert not distributed.is_initialized()
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    found = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    for name, value in found.items():
        monkeypatch.setenv(name, str(value))
    with process_group("cpu"):
        assert distributed.get_backend() == "gloo"
    assert not distributed.is_initialized()
