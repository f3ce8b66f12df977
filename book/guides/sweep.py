"""A sweep of one's own: two arms, two rates to choose from, two seeds.

    python sweep.py small-sweep --jobs 2 --results DIR

runs its cases like those of the package; the guide "Run a sweep" does so
step by step.
"""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from paper import experiments
from paper.experiments.engine import runner
from paper.experiments.learning import rates, study
from paper.tasks import mqar
from paper.training import trainer

HERE = Path(__file__).resolve().parent
FAULT = HERE / "fault"  # while this file is there, the next run dies
TASK = mqar.task(pairs=2, length=6, vocab_size=8)


def validation(count, generator):
    if count > 2 and FAULT.exists():  # two are drawn to check the answers
        FAULT.unlink()
        os.kill(os.getpid(), signal.SIGKILL)  # as when a node goes down
    return TASK.validation(count, generator)


STUDY = study.Study(
    name="small-sweep",
    title="softmax attention and the delta rule on associative recall",
    task=replace(TASK, validation=validation),
    arms={
        "softmax": {"attention": "softmax", "max_length": TASK.longest},
        "delta": {"attention": "delta", "max_length": TASK.longest},
    },
    tried=(1e-3, 1e-2),  # learning rates
    d=16,
    L=2,
    steps=30,
    looks=2,  # at the validation part, by which a rate is chosen
    tested=128,
    seeds=(1, 2),  # of the runs that count
)
SWEEP = study.experiment(STUDY)


def large(device):
    return [study.case(STUDY, "softmax", 1, 1e-2, device=device, B=64)]


LARGE = replace(
    SWEEP, name="large-run", title="one run with larger batches", cases=large
)
OWN = {one.name: one for one in (SWEEP, LARGE)}


def choose(results):
    """Write the rates that the tuning runs in a folder of results choose."""
    rates.write({SWEEP.name: experiments.load(SWEEP.name, results)})


experiments.EXPERIMENTS.update(OWN)
main, runner.ENTRY = experiments.main, "sweep"  # what processes of its cases call
rates.TABLE = HERE / "sweep-rates.json"  # not the package's own,
rates.table.cache_clear()  # which has been read
trainer.EVERY_S = 0.0  # a checkpoint after each step, as 30 take a part of a second

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
