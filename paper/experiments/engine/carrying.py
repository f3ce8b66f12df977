"""Carry records over to the present code by proof: some cases drawn at random are run again, and give the same bits.

What a run can reach may change without changing what it computes: a helper is split, a check is added. Then a sample of
an experiment's records stands for all. `carry` runs it by the present code, where the records were made; `carry_beside`
runs it by the records' own code, too, and so serves on any processor. Timings are never the same twice, and are
measured anew.
"""

import json
import math
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from paper.experiments.engine import code, provenance, records
from paper.experiments.engine.records import Case, Record, RecordError
from paper.experiments.engine.runner import Experiment, Launcher, run, state

LEAST = 3  # cases of an experiment, however few it has
# What runs the cases of a checkout, whose packages stand in the working directory; the experiments were once in ortho.
_REPLAY = """
import importlib, json, pathlib, sys
import torch
torch.set_num_threads(1)
home = "paper" if pathlib.Path("paper").is_dir() else "ortho"
experiment = importlib.import_module(home + ".experiments").EXPERIMENTS[sys.argv[1]]
cases = json.loads(pathlib.Path(sys.argv[2]).read_text())
pathlib.Path(sys.argv[3]).write_text(json.dumps([experiment.run(case) for case in cases]))
"""


def carry(
    experiment: Experiment,
    device: str,
    results: Path,
    *,
    share: float = 0.05,
    launcher: Launcher | None = None,
    echo: Callable[[str], None] = print,
) -> int:
    """Run a sample of the stale cases again, and carry the others over if all of it gives what is stored, to the bit.

    The sample is a `share` of the cases, and no fewer than `LEAST`; the cases are drawn by the code's digest, so that a
    run that was stopped goes on with the same ones. Returns how many records were carried over. The new records of the
    sample are stored in either case. Raises RecordError where a case fails or differs, for timings, and in a tree with
    changes that are not committed, which no record could name.
    """
    _expect_carriable(experiment)
    file = records.path(results, experiment.name, provenance.device_slug(device))
    known = records.by_case(records.read(file, experiment.needs))
    fresh, *_ = state(experiment, device, list(known.values()))
    stale = [case for case in experiment.cases(device) if records.key(case) in known and case not in fresh]
    if not stale:
        return 0
    sample = draw(experiment, stale, share)
    echo(f"{experiment.name}: {len(sample)} of {len(stale)} stale cases are run again")

    again = results / ".carrying"
    report = run([replace(experiment, cases=lambda _: sample)], device, again, launcher=launcher, echo=echo)
    if report.errors:
        raise RecordError(f"{experiment.name}: nothing is carried over, as cases failed: {'; '.join(report.errors)}")
    made = records.by_case(records.read(records.path(again, experiment.name, file.stem), experiment.needs))
    other = [record["configuration"] for case, record in made.items() if not same(record, known[case])]
    before = [known[case]["provenance"].get("capability") for case in made]
    known |= made
    rest = [case for case in stale if case not in sample]
    if not other:
        proof = _proof(experiment, len(sample), len(stale))
        known |= {records.key(case): known[records.key(case)] | {"carried": proof} for case in rest}
    with records.lock(results):
        for record in known.values():
            records.check(record, experiment.needs)
        records.write(file, list(known.values()))
    shutil.rmtree(again / experiment.name)
    if other:
        raise RecordError(_differing(experiment, other, sample) + _other_instructions(before))
    return len(rest)


def carry_beside(
    experiment: Experiment, results: Path, *, share: float = 0.05, echo: Callable[[str], None] = print
) -> int:
    """Carry over the stale records of every CPU whose own code gives the same bits as the present code, here and now.

    Records of the same code are judged together: their sample is drawn as `carry` draws it, and run twice, by a
    checkout of the commit of one of them and by this tree. Nothing that is measured is stored. Returns how many records
    were carried over. Raises RecordError where a case fails or differs, for timings, for a commit that the repository
    does not have, and in a tree with changes that are not committed.
    """
    _expect_carriable(experiment)
    files = {file: records.read(file, experiment.needs) for file in (results / experiment.name).glob("cpu-*.json")}
    alike: dict[str, list[Record]] = {}  # those of the same code
    for record in (record for file in sorted(files) for record in files[file]):
        if records.is_clean(record) and provenance.changes(record, experiment.run):
            alike.setdefault(records.key(records.standing(record)["code"]), []).append(record)
    for group in alike.values():
        commit = records.standing(group[0])["commit"]
        cases = [record["configuration"] for record in records.by_case(group).values()]
        sample = draw(experiment, cases, share)
        echo(f"{experiment.name}: {len(sample)} of {len(cases)} cases of {commit[:7]} are run by both")
        with _checkout(commit) as tree:
            before, after = _replayed(experiment, sample, (tree, code.ROOT))
        if other := [one for one, old, new in zip(sample, before, after, strict=True) if not same(old, new)]:
            raise RecordError(_differing(experiment, other, sample, f" of {commit[:7]}"))
        proof = _proof(experiment, len(sample), len(cases))
        for record in group:
            record["carried"] = proof
        with records.lock(results):
            for file in {records.path(results, experiment.name, record["device"]) for record in group}:
                records.write(file, files[file])
    return sum(map(len, alike.values()))


def _expect_carriable(experiment: Experiment) -> None:
    if experiment.quiet:
        raise RecordError(f"{experiment.name}: timings cannot be carried over; measure them anew")
    if provenance.git_state()[1] is False:
        raise RecordError("expected a tree without uncommitted changes: a record that is carried over names a commit")


def _differing(experiment: Experiment, other: Sequence[Case], sample: Sequence[Case], of: str = "") -> str:
    """Why nothing, or nothing `of` a commit, is carried over."""
    names = ", ".join(map(experiment.label, other))
    return f"{experiment.name}: nothing{of} is carried over: {len(other)} of {len(sample)} differ: {names}"


def _proof(experiment: Experiment, reproduced: int, of: int) -> dict[str, Any]:
    """What a carried record says: the code that it holds for, too, and how many cases of how many have shown it."""
    commit, clean = provenance.git_state()
    found = {"commit": commit, "clean": clean, "code": provenance.code_of(experiment.run)}
    return found | {"date_utc": provenance.now(), "reproduced": reproduced, "of": of}


@contextmanager
def _checkout(commit: str) -> Iterator[Path]:
    """A folder with the files of a commit, for the block."""
    with TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(code.ROOT), "worktree"]
        added = subprocess.run([*git, "add", "--detach", str(tree), commit], capture_output=True, text=True)
        if added.returncode:
            raise RecordError(f"{commit}: expected a commit of this repository ({added.stderr.strip()})")
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], capture_output=True, check=True)


def _replayed(experiment: Experiment, cases: Sequence[Case], trees: Sequence[Path]) -> list[list[dict[str, Any]]]:
    """What the cases give by the code of each tree, all trees at once, each in a process of its own."""
    with TemporaryDirectory() as folder:
        given, made = Path(folder) / "cases.json", [Path(folder) / f"{i}.json" for i, _ in enumerate(trees)]
        given.write_text(json.dumps(list(cases)))
        command = [sys.executable, "-c", _REPLAY, experiment.name, str(given)]
        running = [
            subprocess.Popen([*command, str(file)], cwd=tree, stderr=subprocess.PIPE, text=True)
            for file, tree in zip(made, trees, strict=True)
        ]
        errors = [process.communicate()[1] for process in running]
        for process, tree, error in zip(running, trees, errors, strict=True):
            if process.returncode:
                last = (error.strip().splitlines() or [f"status {process.returncode}"])[-1]
                raise RecordError(f"{experiment.name}: nothing is carried over, as a case failed in {tree}: {last}")
        return [json.loads(file.read_text()) for file in made]


def _other_instructions(before: list[str | None]) -> str:
    """A reason why results may differ that is none of the code's: sums are rounded in another order."""
    here = torch.backends.cpu.get_cpu_capability()
    others = sorted({name for name in before if name and name != here})
    return f" (measured with {', '.join(others)} instructions; this processor has {here})" if others else ""


def draw(experiment: Experiment, cases: list[Case], share: float) -> list[Case]:
    """Some of the cases, the same ones whenever they are asked for with this code."""
    count = min(len(cases), max(LEAST, math.ceil(share * len(cases))))
    seed = repr((experiment.name, sorted(provenance.code_of(experiment.run).values())))
    return random.Random(seed).sample(cases, count)


def same(one: Record, other: Record) -> bool:
    """Whether two records of a case have the same results, to the bit; times, whose names end in `_s`, aside."""
    parts = ("seeds", "repetitions", "facts", "failures")
    return all(_timeless(one.get(part, {})) == _timeless(other.get(part, {})) for part in parts)


def _timeless(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _timeless(part) for name, part in value.items() if not name.endswith("_s")}
    return [_timeless(part) for part in value] if isinstance(value, list) else value
