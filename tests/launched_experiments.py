"""Experiments for the tests of launchers, whose workers find them here by their names."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import distributed

from paper import experiments
from paper.experiments import Experiment

DEADLINE_S = 60.0
PATHS = (Path(__file__).parent, Path(experiments.__file__).parents[2])
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PATHS))}


class OddError(Exception):
    """An error that can be pickled, but not made again from its pickle."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def meet(case):
    """Return when `case["with"]` cases are here at once, which never happens if the cases run one after the other."""
    folder = Path(case["folder"])
    (folder / str(case["index"])).touch()
    end = time.monotonic() + DEADLINE_S
    while len(list(folder.iterdir())) < case["with"]:
        assert time.monotonic() < end, "nobody came"
        time.sleep(0.01)


def fail(_):
    raise OddError("an error", "its message")


def die(_):
    os.kill(os.getpid(), signal.SIGKILL)


def linger(_):
    print("lingering", flush=True)
    time.sleep(4 * DEADLINE_S)


def reduce(case):
    """A sum over processes; `case["failing"]` is the rank that fails instead, while the others wait for it."""
    if distributed.get_rank() == case.get("failing"):
        raise ValueError("expected another rank")
    total = torch.tensor(distributed.get_rank() + 1)
    distributed.all_reduce(total)
    return {"sum": int(total), "rank": distributed.get_rank()}


def resume(_, checkpoint):
    """Return what the checkpoint holds ('' if there is none), and write another to it."""
    found = checkpoint.read_text() if checkpoint.exists() else ""
    checkpoint.write_text("half done")
    return {"checkpoint": str(checkpoint), "found": found}


def nothing(_):
    pass


ACTIONS = {f.__name__: f for f in (meet, fail, die, linger, reduce, resume, nothing)}


def experiment(name, cases, **kwargs):
    """Each case names its action under `does`; the record says what came of it and where it ran."""

    def run(case, **options):
        found = ACTIONS[case["does"]](case, **options)
        where = {"pid": os.getpid(), "threads": torch.get_num_threads()}
        return {"seeds": {}, "repetitions": {"arm": {"index_count": [case["index"]]}}, "facts": where | (found or {})}

    numbered = [{"index": i, **({"does": c} if isinstance(c, str) else c)} for i, c in enumerate(cases)]
    label = lambda case: f"{case['index']} {case['does']}"  # noqa: E731
    return Experiment(name, "a title", lambda _: numbered, run, label=label, **kwargs)


EXPERIMENTS = {
    one.name: one
    for one in (
        experiment("plain", ["nothing", "nothing"]),
        experiment("meeting", []),
        experiment("lingering", ["nothing", "linger"]),
        experiment("failing", ["die", "fail", "nothing"]),
        experiment("torn", ["reduce", {"does": "reduce", "failing": 1}, "reduce"]),
        experiment("resuming", ["resume"], resumes=True),
        experiment("quiet", ["nothing"], quiet=True),
    )
}


def meeting(folder):
    """Two cases that wait for each other in a folder."""
    folder.mkdir()
    return experiment("meeting", [{"does": "meet", "with": 2, "folder": str(folder)}] * 2)


def lookup(name):
    """The experiment of that name. What it runs is in the case, so that a meeting needs no cases here."""
    return EXPERIMENTS[name]


if __name__ == "__main__":  # the command, with these experiments
    from paper.experiments.engine import cli, cluster, launchers

    launchers.registered = lookup
    cluster.POLL_S = cluster.QUEUE_S = 0.1
    sys.exit(cli.main(sys.argv[1:], EXPERIMENTS))
