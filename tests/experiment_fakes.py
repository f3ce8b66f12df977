"""An experiment that measures nothing, for tests of the code around experiments."""

import dataclasses
import sys
import time
from pathlib import Path

from paper.experiments import EXPERIMENTS, Experiment, run
from paper.experiments.engine import cli, provenance, records
from paper.tasks import text

SLUG = provenance.device_slug("cpu")


def outcome(value=1.0):
    return {"seeds": {"inputs": 0}, "repetitions": {"arm": {"forward_s": [value, value]}}}


def made_up(experiment, case, tests, *, device="cpu-x", **facts):
    """A record as a training run leaves it; `tests` has what each test found."""
    facts = {"loss": [1.0], "validation": [], "parameters": 10, "train_s": 1.0, **facts}
    own = {"experiment": experiment, "device": device, "configuration": case, "provenance": {"device_name": "x"}}
    return own | {"repetitions": tests, "facts": facts}


def fake(run=lambda _: outcome(), name="fake", works=(1, 1, 1), **kwargs):
    def cases(_):
        return [{"index": index, "work": work} for index, work in enumerate(works)]

    return Experiment(name, "a title", cases, run, **kwargs)


def only(name, *cases):
    """The experiment of that name with these cases."""
    return dataclasses.replace(EXPERIMENTS[name], cases=lambda _: list(cases))


def without_seconds(outcome):
    """The part of an outcome that every run repeats to the bit."""
    facts = {name: fact for name, fact in outcome["facts"].items() if name != "train_s"}
    return {"seeds": outcome["seeds"], "repetitions": outcome["repetitions"], "facts": facts}


def small_library(folder):
    """A folder of sources in place of Python's own library."""
    for i in range(200):
        (folder / f"module_{i}.py").write_text(f"def power_{i}(x):\n    return x ** {i}\n" * 20)
    return text.python_parts(folder)


def indices(results, name="fake"):
    return sorted(record["configuration"]["index"] for record in records.read_all(results, name))


def go(experiment, results, **kwargs):
    kwargs.setdefault("echo", lambda _: None)
    return run([experiment], "cpu", results, **kwargs)


def slow(case, checkpoint):
    """A tenth of a second of work, half of which may have been done before."""
    half = checkpoint.exists()
    if not half:
        time.sleep(0.05)
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.touch()
    time.sleep(0.05)
    return outcome() | {"facts": {"resumed": half, "filling": list(range(2000))}}


def dying(case):
    if case["index"] == 1:
        sys.exit(3)
    return outcome()


KNOWN = {one.name: one for one in (fake(slow, "slow", works=(1,) * 6), fake(dying, "dying"))}


def main(argv):
    """The command with these experiments, as processes of a pool and jobs of a cluster ask for it."""
    return cli.main(argv, KNOWN)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from paper.experiments.engine import runner

    runner.ENTRY = "experiment_fakes"
    sys.exit(main(sys.argv[1:]))
