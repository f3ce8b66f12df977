"""Mutants: small faults put into the package one at a time, to measure which of them the tests notice.

    python -m tools.mutants run                      # those of tools/mutants.json without a result yet
    python -m tools.mutants run --only cost-02f48a   # some, again
    python -m tools.mutants run --before tools/mutants-baseline.json  # first by the test that noticed it then
    python -m tools.mutants show                     # the table and the share noticed
    python -m tools.mutants draw                     # draw the list anew (tools/faults.py)

A mutant is an expression of a function and what replaces it. Both are kept as normalised source (`ast.unparse`), and
the function by its qualified name, so that a mutant still applies after code has moved, to other lines or to another
file. One that no longer applies is reported as gone, not as noticed.

In the list, "select" is the part of the tests of all mechanisms that a mutant is shown to (pytest's -k), and "rejected"
are mutants that change no behaviour, each with the reason: `draw` passes over them.
"""

import argparse
import ast
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from tools.faults import PACKAGES, REPLACED, Function, draw, functions, own, verdicts

Mutant = dict[str, str]

ROOT = Path(__file__).parent.parent
LIST = Path(__file__).with_suffix(".json")
RESULTS = ROOT / "_build" / "mutants.json"
FILES = 5  # test files a mutant is shown to, the nearest first
# These hold every mechanism: only what a mutant selects is run.
SHARED = ("test_properties.py", "test_cost.py", "test_decoding.py")
# Tests that start processes or read no code.
NOT_RUN = re.compile(r"shapes|portability|test_gates|book|makefile|environment|pdf|readme|per_cent|docstrings|mutants")


def places(tree: ast.AST, mutant: Mutant) -> Sequence[ast.expr | ast.stmt]:
    """The nodes of a module that a mutant replaces, none if it does not apply."""
    found: list[ast.expr | ast.stmt] = []
    for name, function in functions(tree):
        if name == mutant["function"]:
            if mutant["kind"] == "constant verdict":
                return verdicts(function)
            nodes = [n for n, _ in own(function) if isinstance(n, REPLACED)]
            found += [n for n in nodes if ast.unparse(n) == mutant["original"]]
    return found if len(found) == 1 else []


def find(root: Path, mutant: Mutant) -> Path | None:
    """The file a mutant applies to: the one it names, or the only other one that has its function and expression."""
    named = root / mutant["file"]
    last = mutant["function"].split(".")[-1]
    for files in (
        [named] if named.exists() else [],
        sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")),
    ):
        sources = [(file, file.read_text()) for file in files]
        fits = [file for file, source in sources if f"def {last}(" in source and places(ast.parse(source), mutant)]
        if fits:
            return fits[0] if len(fits) == 1 else None
    return None


def mutated(source: str, mutant: Mutant) -> str:
    """A module's source with the mutant in its place, all else as it was."""
    data = source.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in reversed(places(ast.parse(source), mutant)):  # from the end, so that places before it stay
        new = mutant["replacement"] if isinstance(node, ast.stmt) else f"({mutant['replacement']})"
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        data = data[:begin] + new.encode() + data[end:]
    ast.parse(data)
    return data.decode()


@cache
def words(file: Path) -> frozenset[str]:
    """What a file names: modules in full, what it imports from them, identifiers, and strings that are one word."""
    found = set[str]()
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                found |= {module, *(f"{module}.{name.name}" for name in names), *(name.name for name in names)}
            case ast.Import():
                found |= {alias.name for alias in node.names}
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Constant(value=str(name)) if len(name.split()) == 1:
                found.add(name)
    return frozenset(found)


def concerned(tree: Path, file: Path, function: str) -> list[str]:
    """The test files that concern a function, the nearest first: by name, by what they import, by names they use."""
    module, stem = ".".join(file.relative_to(tree).with_suffix("").parts), file.stem
    names = {n for n in function.split(".") if not n.startswith("__") and n not in ("forward", "backward", "cost")}
    public = {n.name for n in ast.parse(file.read_text()).body if isinstance(n, Function | ast.ClassDef)} - names
    files = (path for package in PACKAGES for path in (tree / package).rglob("*.py"))
    users = {f.stem for f in files if module in words(f) and f.stem != "__init__"}
    ranked = []
    for test in sorted((tree / "tests").rglob("test_*.py")):
        if NOT_RUN.search(test.name) or test.name in SHARED:
            continue
        said, topic = words(test), test.stem.removeprefix("test_")
        helpers = [tree / "tests" / f"{name}.py" for name in said if name.isidentifier()]
        said = said.union(*(words(helper) for helper in helpers if helper.exists()))
        near = 8 * (topic == stem) + 4 * (f"_{stem}_" in f"_{topic}_") + 6 * (module in said) + 3 * len(names & said)
        near += 2 * (f"_{file.parent.name}_" in f"_{topic}_") + len({*stem.split("_")} & {*topic.split("_")})
        near += len({name for name in public & said if len(name) > 5}) + 3 * (topic in users) + bool(users & said)
        if near:
            ranked.append((-near, test.stat().st_size, test.relative_to(tree).as_posix()))
    return [name for *_, name in sorted(ranked)[:FILES]]


def executed(tree: Path, arguments: list[str], limit: int) -> tuple[str, str]:
    """How a run of tests ends ("caught", "survived", "time" or "broken"), and by which test or with which words."""
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE", "--tb=no", "--no-header", *arguments]
    # The limit is of processor time: on a busy machine a run takes longer, and is not slower for it.
    command = f"ulimit -St {limit}; exec nice -n 10 {shlex.join([sys.executable, *tests])}"
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=12 * limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "time", ""
    failed = re.findall(r"^(?:FAILED|ERROR) (tests/\S+?\.py(?:::\w+(?:\[.*?\](?= - |$))?)?)", output, re.MULTILINE)
    if process.returncode in (0, 5):
        return "survived", ""
    if process.returncode == -signal.SIGXCPU:
        return "time", ""
    return ("caught", failed[0]) if failed else ("broken", output[-300:])


def tested(tree: Path, mutant: Mutant, limit: int, extra: list[str], before: str) -> dict[str, Any]:
    """A mutant's result in a copy of the tree, which is afterwards as it was; by the test that noticed it `before`, if
    there was one, and it still is there."""
    file = find(tree, mutant)
    if file is None:
        return {"result": "gone"}
    near = concerned(tree, file, mutant["function"])
    shared = [path.relative_to(tree).as_posix() for name in SHARED for path in (tree / "tests").rglob(name)]
    passes = [[*shared, "-k", mutant["select"]] if "select" in mutant and shared else [], near]
    test, _, function = before.partition("[")[0].partition("::")
    for path in (tree / "tests").rglob(Path(test).name) if function else ():  # also where it was moved to
        passes.insert(0, [f"{path.relative_to(tree).as_posix()}::{function}"])
    kept, result, by = file.with_suffix(".kept"), "no tests", ""
    shutil.copy2(file, kept)  # with its time of change, by which Python knows what it has compiled
    for arguments in ([*each, *extra] for each in passes if each):
        try:
            file.write_text(mutated(file.read_text(), mutant))
            result, by = executed(tree, ["-x", *arguments], limit)
        finally:
            shutil.copy2(kept, file)
        if result == "time" and executed(tree, arguments, limit)[0] == "time":
            result = "survived"  # the tests take as long without it
        if result not in ("survived", "broken"):
            break
    kept.unlink()
    return {"result": result, "by": by, "tests": near}


def copied(root: Path) -> Path:
    """A copy of what the tests need; large folders that they only read are linked."""
    tree = Path(tempfile.mkdtemp(prefix="mutants-"))
    for name in (*PACKAGES, "tests", "tools"):
        shutil.copytree(root / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in root.iterdir():
        if path.is_file() and path.name != ".git":  # what a worktree has there leads to the repository itself
            shutil.copy2(path, tree)
        elif path.name in ("results", "notebooks", "book"):
            (tree / path.name).symlink_to(path)
    return tree


def run(
    root: Path, mutants: list[Mutant], out: Path, limit: int, jobs: int, extra: list[str], before: dict[str, Any]
) -> None:
    """Test mutants and write each result at once; then let the tests that caught any run on the tree as it is."""
    results: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    out.parent.mkdir(parents=True, exist_ok=True)
    lock, free = Lock(), [copied(root) for _ in range(jobs)]

    def one(mutant: Mutant) -> None:
        tree = free.pop()
        result = tested(tree, mutant, limit, extra, before.get(mutant["id"], {}).get("by", ""))
        free.append(tree)
        with lock:
            results[mutant["id"]] = result
            out.write_text(json.dumps(results, indent=1))
            print(f"{mutant['id']}: {result['result']} {result.get('by', '')}", flush=True)

    try:
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, mutants))
        by = {result["by"] for result in results.values() if result["result"] == "caught"}
        if by and (sound := executed(free[0], [*sorted(by), *extra], 10 * limit))[0] != "survived":
            print(f"Not by the mutant: {sound[1]} fails as the tree is")
    finally:
        for tree in free:
            shutil.rmtree(tree)


def show(mutants: list[Mutant], out: Path) -> None:
    """The table, and the share caught of those that still apply."""
    results = json.loads(out.read_text()) if out.exists() else {}
    count: dict[str, int] = {}
    for mutant in mutants:
        result = results.get(mutant["id"], {"result": "not run"})
        count[result["result"]] = count.get(result["result"], 0) + 1
        where = f"{mutant['file']}: {mutant['function']}"
        print(f"{mutant['id']:18} {mutant['kind']:16} {where:60} {result['result']} {result.get('by', '')}")
    print(", ".join(f"{name} {n}" for name, n in sorted(count.items())))
    noticed = count.get("caught", 0) + count.get("time", 0)
    if judged := noticed + count.get("survived", 0) + count.get("no tests", 0):
        print(f"noticed: {noticed} of {judged}, {noticed / judged:.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure which small faults of the package the tests notice.")
    parser.add_argument("what", choices=("run", "show", "draw"))
    parser.add_argument("--only", nargs="+", metavar="ID", help="these mutants, also if they have a result")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout whose package is mutated and tested")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where results are kept")
    parser.add_argument("--before", type=Path, help="earlier results: tests that noticed a mutant then run first")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=int, default=150, help="processor seconds for a run of tests")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    asked = parser.parse_args()
    kept = json.loads(LIST.read_text()) if LIST.exists() else {"mutants": [], "rejected": {}}
    mutants = [m for m in kept["mutants"] if not asked.only or m["id"] in asked.only]
    if asked.what == "draw":
        named = {m["id"]: {"select": m["select"]} for m in mutants if "select" in m}
        lines = [json.dumps(m | named.get(m["id"], {}), ensure_ascii=False) for m in draw(asked.tree, kept["rejected"])]
        reasons = json.dumps(kept["rejected"], indent=1, ensure_ascii=False)
        LIST.write_text('{"mutants": [\n' + ",\n".join(lines) + f'\n],\n"rejected": {reasons}}}\n')
        return
    if asked.what == "run":
        done = json.loads(asked.out.read_text()) if asked.out.exists() else {}
        left = [m for m in mutants if asked.only or done.get(m["id"], {"result": "broken"})["result"] == "broken"]
        before = json.loads(asked.before.read_text()) if asked.before else {}
        run(asked.tree.resolve(), left, asked.out, asked.limit, asked.jobs, asked.pytest, before)
    show(mutants, asked.out)


if __name__ == "__main__":
    main()
