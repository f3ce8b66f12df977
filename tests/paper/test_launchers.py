"""Cases run in other processes: several at once, on a cluster, or sharing a case; one may fail, none is left behind."""

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
    """A launcher with a made-up clock: the job that is due first ends first, and moves the clock to its end."""

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
    """By their seconds: 3 and 1 begin; 1 ends, 4 begins; 3 ends, 2 begins; 4 and 2 end together."""
    clock = Clock()
    launcher = Later(2, clock)
    report = go(fake(works=(3, 1, 4, 2)), tmp_path, launcher=launcher, clock=clock)
    assert [line.split()[1] for line in report.done] == ["index=1", "index=0", "index=2", "index=3"]
    assert (launcher.most, clock.now) == (2, 5)
    assert indices(tmp_path) == [0, 1, 2, 3]  # whichever ended first


def test_the_budget_holds_for_cases_at_once(tmp_path):
    """At 2 s the case of 4 s would end at 6 s; the case of 1 s still fits."""
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
    """A cluster may have more than one kind of device."""
    go(fake(works=(1,)), tmp_path)
    monkeypatch.setattr(runner, "device_slug", lambda _: "another")
    launcher = Later(1, Clock())
    assert len(go(fake(works=(1, 1)), tmp_path, launcher=launcher).done) == 1
    assert indices(tmp_path) == [0]
    (record,) = records.read(records.path(tmp_path, "fake", "another"))
    assert record["configuration"]["index"] == 1


def test_cases_run_at_once_and_fail_alone(tmp_path, monkeypatch):
    """Two cases wait for each other, one's process dies, and one's exception does not survive pickling."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # a worker sets this to one
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
    # This is the case's own time, without the seconds that starting its process takes.
    assert records.read(stored(tmp_path / "results", "failing"))[0]["elapsed_s"] < 1
    assert f"[2/3] error: {odd}" in said


@pytest.mark.parametrize(
    ("sent", "jobs"),
    [(signal.SIGKILL, 2), (signal.SIGINT, 2), (signal.SIGTERM, 1)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_no_worker_is_left_behind(sent, jobs, tmp_path):
    """One worker is busy, one idle. They share the command's stdout, which closes when the last of them has ended."""
    process = subprocess.Popen(
        [sys.executable, *COMMAND, "lingering", "--jobs", str(jobs), "--results", str(tmp_path)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests run in the background ignore it
    )
    lines = [process.stdout.readline() for _ in range(3)]  # a header, a record, and a case that lingers
    assert "lingering\n" in lines
    if sent == signal.SIGINT:
        os.killpg(process.pid, sent)  # as a terminal does
    else:
        process.send_signal(sent)
    _, errors = process.communicate(timeout=2 * DEADLINE_S)  # a worker left behind lingers twice as long
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
    """In the second case rank 1 fails; rank 0 waits for it, and would wait for half an hour."""
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
