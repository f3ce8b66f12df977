"""Carry records over to the present code by proof: both codes, run side by side, give the same bits.

The code of a run may change without changing what it computes: a helper is split, a check is added. Then one case of
each kind, made short, is run twice on this machine, by the code that the records were measured with and by the present
one. If both give the same, the records of that kind hold for the present code. What is measured here is not stored, so
records of any processor can be carried over. Timings are never the same twice, and are measured anew.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paper.experiments.engine import code, provenance, records
from paper.experiments.engine.records import Case, Record, RecordError
from paper.experiments.engine.runner import Experiment

# Runs cases by the code of a checkout, whose packages lie in the working directory. Experiments were once in ortho.
_REPLAY = """
import importlib, json, pathlib, sys
import torch
torch.set_num_threads(1)
home = "paper" if pathlib.Path("paper").is_dir() else "ortho"
experiment = importlib.import_module(home + ".experiments").EXPERIMENTS[sys.argv[1]]
cases = json.loads(pathlib.Path(sys.argv[2]).read_text())
pathlib.Path(sys.argv[3]).write_text(json.dumps([experiment.run(case) for case in cases]))
"""


def carry(experiment: Experiment, results: Path, *, echo: Callable[[str], None] = print) -> int:
    """Carry over the stale records of every CPU, for each kind whose short case gives the same bits by both codes.

    Records of the same code are run together, by a checkout of the commit of one of them and by this tree. Returns how
    many records were carried over. Raises RecordError if a case fails; if kinds differ, after all others are carried
    over; for timings; for a commit that the repository does not have; and in a tree with changes that are not
    committed, as no record could name them.
    """
    if experiment.quiet:
        raise RecordError(f"{experiment.name}: timings cannot be carried over; measure them anew")
    if provenance.git_state()[1] is False:
        raise RecordError("expected a tree without uncommitted changes: a record that is carried over names a commit")
    files = {file: records.read(file, experiment.needs) for file in (results / experiment.name).glob("cpu-*.json")}
    alike: dict[str, list[Record]] = {}  # records of the same code
    for record in (record for file in sorted(files) for record in files[file]):
        if records.is_clean(record) and provenance.changes(record, experiment.run):
            alike.setdefault(records.key(records.standing(record)["code"]), []).append(record)
    carried, differing = 0, []
    for group in alike.values():
        commit = records.standing(group[0])["commit"]
        found = kinds(experiment, group)
        cases = [case for case, _ in found]
        echo(f"{experiment.name}: {len(cases)} kinds of {len(group)} cases of {commit[:7]} are run by both codes")
        with provenance.checkout(commit) as tree:
            before, after = _replayed(experiment, cases, (tree, code.ROOT))
        agree = [same(*both) for both in zip(before, after, strict=True)]
        differing += [experiment.label(case) for case, holds in zip(cases, agree, strict=True) if not holds]
        proof = _proof(experiment, sum(agree), len(agree))
        for record in (one for (_, own), holds in zip(found, agree, strict=True) if holds for one in own):
            record["carried"] = proof
            carried += 1
        with records.lock(results):
            for file in {records.path(results, experiment.name, record["device"]) for record in group}:
                records.write(file, files[file])
    if differing:
        told = f"{carried} records carried over, but none of the {len(differing)} kinds that differ"
        raise RecordError(f"{experiment.name}: {told}: {'; '.join(differing)}")
    return carried


def kinds(experiment: Experiment, found: Iterable[Record]) -> list[tuple[Case, list[Record]]]:
    """A case of each kind, made short by its experiment, and the records of that kind. Cases that differ only in seed
    or rate are of one kind."""
    grouped: dict[str, tuple[Case, list[Record]]] = {}
    for record in found:
        case = record["configuration"]
        short = case if experiment.short is None else experiment.short(case)
        kind = {name: value for name, value in short.items() if name not in ("seed", "rate")}
        grouped.setdefault(records.key(kind), (short, []))[1].append(record)
    return list(grouped.values())


def _proof(experiment: Experiment, agreed: int, of: int) -> dict[str, Any]:
    """What a carried record says: the code that it also holds for, and how many kinds gave the same, of how many."""
    commit, clean = provenance.git_state()
    found = {"commit": commit, "clean": clean, "code": provenance.code_of(experiment.run)}
    return found | {"date_utc": provenance.now(), "reproduced": agreed, "of": of}


def _replayed(experiment: Experiment, cases: Sequence[Case], trees: Sequence[Path]) -> list[list[dict[str, Any]]]:
    """The results of the cases by the code of each tree; the trees run at once, each in a process of its own."""
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


def same(one: Record, other: Record) -> bool:
    """Whether two records of a case have the same results, to the bit; times (names that end in `_s`) do not count."""
    parts = ("seeds", "repetitions", "facts", "failures")
    return all(_timeless(one.get(part, {})) == _timeless(other.get(part, {})) for part in parts)


def _timeless(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _timeless(part) for name, part in value.items() if not name.endswith("_s")}
    return [_timeless(part) for part in value] if isinstance(value, list) else value
