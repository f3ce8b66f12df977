"""Golden runs: short cases of every kind of training study, whose figures are stored in `golden.json`.

    python tests/golden_runs.py     # stores the figures of this code anew; say in the change list why

On the processor that stored them the same code gives the same figures, to the last digit. Another processor rounds each
sum in another way, and training amplifies that. How much, is measured where figures are stored: each run is made again
with other instructions, in PyTorch's kernels and in those of MKL. `spread` is the largest relative deviation of any
run's losses, of the same kind as what another processor deviates by: sums of the same roundings, amplified alike over
as few steps, and rounded to five decimals. The tolerance is `TIMES` that. For a single number the ratio of two such
deviations, of two normal ones, exceeds ten in 6 of 100 cases; `spread` is the largest of hundreds of numbers, which
makes it far rarer.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from experiment_fakes import small_library

from paper.experiments import EXPERIMENTS
from paper.experiments.learning import copying
from paper.tasks import text

STORED = Path(__file__).with_name("golden.json")
TIMES = 10
STEPS = 20  # at most
# Each kind of training study, by an experiment and some of its arms; of the models of bytes several kinds of layers.
ARMS = {
    "recall": ("delta",),
    "parity": ("delta-product",),
    "permutations": ("delta-product",),
    "flip-flop": ("alibi",),
    "bytes": ("learned", "frozen", "stopped", "1 learned + 3 positional"),
    "ladder-selective": ("2 selective induction + 2 positional",),
    "copying": (copying.SELECTING,),
    "retrieval": ("learned",),
    "synthetic": ("learned",),
    "images": ("learned",),
    "fine-tuning": ("all trained",),
    "transduction": ("8 learned",),
    "pruning": (None,),
}
ELSEWHERE = ({"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}, {"MKL_CBWR": "COMPATIBLE"})


def cases():
    """(experiment, arm, smoke case) of each golden run: the first case of the arm, shorter still."""
    found = []
    for name, arms in ARMS.items():
        listed = [case for case in EXPERIMENTS[name].cases("cpu") if case.get("text", "python") == "python"]
        for arm in arms:
            case = EXPERIMENTS[name].smoke_case(next(case for case in listed if arm in (None, case["arm"])))
            found.append((name, arm, case | ({"steps": STEPS} if "steps" in case else {})))
    return found


def processor():
    """What must be the same for the same bits: the processor, its instructions, and PyTorch."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        info = ""
    names = ("vendor_id", "model name", "cpu family", "model", "stepping")
    found = [re.search(rf"^{name}\s*:\s*(.*)$", info, re.MULTILINE) for name in names]
    return [*(one and one[1] for one in found), torch.backends.cpu.get_cpu_capability(), torch.__version__]


def figures(name, case):
    """The losses of a run: those of the training, and those of the tests."""
    outcome = EXPERIMENTS[name].run(case)
    losses = {"training": outcome["facts"]["loss"]}
    for test, found in outcome["repetitions"].items():
        losses |= {f"{test} {name}": found[name] for name in found if name.endswith(("_nats", "_bits"))}
    return losses


def deviation(one, other):
    """The largest difference of two runs' losses, relative to the loss."""
    assert {name: len(values) for name, values in one.items()} == {name: len(values) for name, values in other.items()}
    pairs = [pair for name in one for pair in zip(one[name], other[name], strict=True)]
    return max(abs(a - b) / max(abs(a), abs(b), 1e-9) for a, b in pairs)


def replay():
    """The losses of every golden run by this code. Python's own library is another in each version of Python; a folder
    of sources takes its place."""
    with tempfile.TemporaryDirectory() as folder:
        parts = small_library(Path(folder))
    text.python_parts = lambda: parts
    return [figures(name, case) for name, _, case in cases()]


def main():
    if sys.argv[1:] == ["--replay"]:
        print(json.dumps(replay()))
        return
    environments = [{**os.environ, "OMP_NUM_THREADS": "1", **more} for more in ({}, *ELSEWHERE)]
    command = [sys.executable, __file__, "--replay"]
    processes = [subprocess.Popen(command, env=one, stdout=subprocess.PIPE) for one in environments]
    own, *others = [json.loads(process.communicate()[0]) for process in processes]
    spreads = [max(deviation(run, other[i]) for other in others) for i, run in enumerate(own)]
    runs = [
        {"experiment": name, "case": case, "losses": losses, "spread": float(f"{spread:.2g}")}
        for (name, _, case), losses, spread in zip(cases(), own, spreads, strict=True)
    ]
    lines = ",\n".join(json.dumps(run) for run in runs)
    head = json.dumps({"processor": processor(), "spread": max(run["spread"] for run in runs)})[:-1]
    STORED.write_text(f'{head}, "runs": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
