"""An experiment that measures nothing, for tests of the code around experiments; and a check of what a call runs."""

import dataclasses
import gc
import sys
from contextlib import contextmanager

from paper.experiments import EXPERIMENTS, Experiment, run
from paper.experiments.engine import code, provenance, records
from paper.tasks import text

SLUG = provenance.device_slug("cpu")

# The tests' records count as records of a commit, even if files are being edited while the tests run.
provenance.git_state = lambda: ("0" * 40, True)


# Modules between a run and its record: those that measure a case or refuse arguments have no part in the result.
AROUND = {f"paper.experiments.engine.{name}" for name in ("code", "provenance", "records", "runner")} | {
    *(f"ortho._checks.{name}" for name in ("arguments", "names", "values")),
    "ortho._typing",
}


@contextmanager
def within(experiment):
    """Raise AssertionError if the block runs a definition that the experiment's `run` does not reach: such a definition
    could change without making the records stale."""
    ran = set()
    gc.collect()  # leftovers of earlier tests must not be freed inside the block
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


def only(name, *cases):
    """The experiment of that name with these cases."""
    return dataclasses.replace(EXPERIMENTS[name], cases=lambda _: list(cases))


def stored_records(results, name):
    """The records of an experiment on this device, with what their readers need."""
    return records.read(stored(results, name), EXPERIMENTS[name].needs)


def without_seconds(outcome):
    """The part of an outcome that every run repeats to the bit."""
    facts = {name: fact for name, fact in outcome["facts"].items() if name != "train_s"}
    return {"seeds": outcome["seeds"], "repetitions": outcome["repetitions"], "facts": facts}


def small_library(folder):
    """A folder of sources in place of Python's own library."""
    for i in range(200):
        (folder / f"module_{i}.py").write_text(f"def power_{i}(x):\n    return x ** {i}\n" * 2)
    return text.python_parts(folder)


def of_other_code(record):
    """The record as if one definition had changed since."""
    code = record["provenance"]["code"]
    return record | {"provenance": record["provenance"] | {"code": code | {next(iter(code)): "0" * 16}}}


def indices(results):
    return [record["configuration"]["index"] for record in records.read(stored(results))]


def go(experiment, results, **kwargs):
    kwargs.setdefault("echo", lambda _: None)
    return run([experiment], "cpu", results, **kwargs)
