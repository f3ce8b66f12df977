"""Where cases of experiments run, if not in this process alone: in others of this machine, or under `torchrun`.

Each class is a `runner.Launcher`, as is `cluster.Slurm`. Workers are sent the name of an experiment and a case, and
find the experiment by `lookup`. They compute with one thread, so that a result does not depend on how many cases run
at once.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed

from paper.experiments.engine.provenance import device_slug
from paper.experiments.engine.records import Case
from paper.experiments.engine.runner import Experiment, Here, Outcome, measure

Lookup = Callable[[str], Experiment]
Options = dict[str, Any]

_HERE = Here()  # in a worker: that process
# The other ranks wait for the next case while rank 0 is busy with the last one; PyTorch's limit is half an hour.
_PATIENCE = timedelta(days=7)


class LaunchError(RuntimeError):
    """Cases cannot be run where they were asked to run."""


def registered(name: str) -> Experiment:
    """The experiment of that name."""
    from paper.experiments import EXPERIMENTS  # not above, as that module imports this one

    return EXPERIMENTS[name]


def in_worker(lookup: Lookup, name: str, case: Case, device: str, options: Options) -> Outcome:
    """Measure a case, in a worker. Errors are returned as text, as not every exception can be sent back."""
    torch.set_num_threads(1)
    outcome = _HERE.outcome(lookup(name), case, device, options)
    if device == "cuda":
        torch.cuda.empty_cache()  # others share the device
    return outcome


class Processes:
    """Up to `slots` cases at once, each in a process of its own, which serves for further cases.

    Used as a context manager. A worker that dies costs only its case. All workers end with this process, however it
    ends.
    """

    def __init__(self, slots: int, lookup: Lookup) -> None:
        self.slots = slots
        self._lookup = lookup
        self._context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        # Nothing is ever written: workers notice when this process closes its end of the pipe, or has ended itself.
        self._lifeline, self._held = self._context.Pipe(duplex=False)
        # Pools of one worker each, as the death of a worker breaks its pool.
        self._idle = [self._pool() for _ in range(slots)]
        self._busy: dict[Future[Outcome], ProcessPoolExecutor] = {}

    def _pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, self._context, _live_with, (self._lifeline,))

    def device_slug(self, device: str) -> str:
        return device_slug(device)

    def submit(self, experiment: Experiment, case: Case, device: str, options: Options) -> Future[Outcome]:
        if not self._idle:
            self.wait(self._busy)
        pool = self._idle.pop()
        job = pool.submit(in_worker, self._lookup, experiment.name, case, device, options)
        self._busy[job] = pool
        return job

    def wait(self, jobs: Collection[Any]) -> Collection[Any]:
        ended = wait(jobs, return_when=FIRST_COMPLETED).done
        for job in ended & self._busy.keys():
            pool = self._busy.pop(job)
            self._idle.append(self._pool() if isinstance(job.exception(), BrokenProcessPool) else pool)
        return ended

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()
        for pool in (*self._idle, *self._busy.values()):
            pool.shutdown(cancel_futures=True)


def _live_with(lifeline: Connection) -> None:
    """Prepare a worker. It leaves Ctrl-C, which a terminal sends to all, to the process that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()


def _end_with(lifeline: Connection) -> None:
    try:
        lifeline.recv_bytes()
    except EOFError:
        os._exit(1)  # not sys.exit, which would wait for the case


def under_torchrun() -> bool:
    """Whether this process is one of several that were started together, by torchrun or a launcher like it."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """Under torchrun, start `torch.distributed` for the block: gloo on a CPU, with NCCL if each process has a GPU.

    Elsewhere, do nothing. Raises LaunchError if there are fewer GPUs than processes on this machine.
    """
    if not under_torchrun():
        yield
        return
    if device == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise LaunchError(f"torchrun: expected a GPU a process, got {torch.cuda.device_count()} for rank {local}")
        torch.cuda.set_device(local)
    distributed.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    yield  # not in a try block: after an error, others may wait for this process, and must see it end
    distributed.destroy_process_group()


class Ranks(Here):
    """All processes that torchrun started measure each case together: rank 0 names the case, the others `follow`.

    Used as a context manager within `process_group`. A case that raises ends the run, as others may wait for the
    process that failed; what was stored stays.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rank = distributed.get_rank()
        self._control = distributed.new_group(backend="gloo", timeout=_PATIENCE)
        self._in_step = True  # no rank is within a case

    def submit(self, experiment: Experiment, case: Case, device: str, options: Options) -> Future[Outcome]:
        self._in_step = False
        self._broadcast((experiment.name, case, device, options))
        job: Future[Outcome] = Future()
        job.set_result(measure(experiment, case, device, **options))
        self._in_step = True
        return job

    def follow(self, experiments: Mapping[str, Experiment]) -> None:
        """Measure the cases that rank 0 names, until it has no more."""
        while (call := self._broadcast(None)) is not None:
            name, case, device, options = call
            measure(experiments[name], case, device, **options)

    def _broadcast(self, call: Any) -> Any:
        """What rank 0 says, on every rank."""
        said = [call]
        distributed.broadcast_object_list(said, src=0, group=self._control)
        return said[0]

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        if self.rank == 0 and self._in_step:
            self._broadcast(None)
