"""An experiment that measures nothing, for the tests of what is around experiments; and what a call runs."""

import gc
import sys
from contextlib import contextmanager

from paper.experiments import Experiment, run
from paper.experiments.engine import code, provenance, records

SLUG = provenance.device_slug("cpu")

# Whatever is being edited while the tests run, their records are taken for those of a commit.
provenance.git_state = lambda: ("0" * 40, True)


# Between a run and its record: what measures a case has no part in the result, nor has what refuses arguments.
AROUND = {f"paper.experiments.engine.{name}" for name in ("code", "provenance", "records", "runner")} | {
    *(f"ortho._checks.{name}" for name in ("arguments", "names", "values")),
    "ortho._typing",
}


@contextmanager
def within(experiment):
    """Raise AssertionError if the block runs a definition that is not among those that the experiment's `run` reaches:
    it could change, and the records would not be stale."""
    ran = set()
    gc.collect()  # what earlier tests left behind must not be taken apart inside the block
    sys.setprofile(lambda frame, *_: ran.add(frame.f_code))
    try:
        yield
    finally:
        sys.setprofile(None)
    modules = {str(code.ROOT.joinpath(*name.split(".")).with_suffix(".py")): name for name in code.files()}
    modules |= {name.replace(".py", "/__init__.py"): module for name, module in modules.items()}
    places = {(modules.get(one.co_filename), one.co_qualname.partition(".")[0]) for one in ran}
    found = {f"{module}:{name}" for module, name in places if module and module not in AROUND and name[0] != "<"}
    assert found, "the block runs nothing of the package"
    assert found <= provenance.code_of(experiment.run).keys(), found - provenance.code_of(experiment.run).keys()


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
    return Experiment(name, "a title", cases, run, **kwargs)


def stored(results, name="fake"):
    return records.path(results, name, SLUG)


def of_other_code(record):
    """The record as if one definition had changed since."""
    code = record["provenance"]["code"]
    return record | {"provenance": record["provenance"] | {"code": code | {next(iter(code)): "0" * 16}}}


def indices(results):
    return [record["configuration"]["index"] for record in records.read(stored(results))]


def go(experiment, results, **kwargs):
    kwargs.setdefault("echo", lambda _: None)
    return run([experiment], "cpu", results, **kwargs)
