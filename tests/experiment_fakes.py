"""An experiment that measures nothing, for the tests of what is around experiments; and which files a call runs."""

import sys
from contextlib import contextmanager
from pathlib import Path

from ortho.experiments import Experiment, provenance, records, run

SLUG = provenance.device_slug("cpu")


@contextmanager
def watching(ran):
    """Add to a set the package's files that run in the block, as an experiment names its sources."""
    names = set()
    sys.setprofile(lambda frame, *_: names.add(frame.f_code.co_filename))
    try:
        yield
    finally:
        sys.setprofile(None)
        files = map(Path, names)
        ran |= {f.relative_to(provenance.PACKAGE).as_posix() for f in files if provenance.PACKAGE in f.parents}


class Clock:
    """A clock that moves only when it is told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def outcome(value=1.0):
    return {"seeds": {"inputs": 0}, "repetitions": {"arm": {"forward_s": [value, value]}}}


def fake(run=lambda _: outcome(), name="fake", works=(1, 1, 1), **kwargs):
    def cases(_):
        return [{"index": index, "work": work} for index, work in enumerate(works)]

    kwargs.setdefault("work", lambda case: float(case["work"]))
    return Experiment(name, "a title", cases, run, ("experiments/records.py",), **kwargs)


def stored(results, name="fake"):
    return records.path(results, name, SLUG)


def indices(results):
    return [record["configuration"]["index"] for record in records.read(stored(results))]


def go(experiment, results, **kwargs):
    kwargs.setdefault("echo", lambda _: None)
    return run([experiment], "cpu", results, **kwargs)
