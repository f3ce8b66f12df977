"""Mutants: small faults put into the package one at a time, to measure which of them the tests notice.

    python -m tools.mutants run                      # those of tools/mutants.json without a result yet
    python -m tools.mutants run --only cost-02f48a   # some, again
    python -m tools.mutants show                     # the table and the share noticed

A mutant is an expression of a function and what replaces it. Both are kept as normalised source (`ast.unparse`), and
the function by its qualified name, so that a mutant still applies after code has moved, to other lines or to another
file. One that no longer applies is reported as gone, not as noticed.

In the list, "select" names the tests, of those for all mechanisms, that are run on a mutant (pytest's -k). "by" is the
test that noticed it at the first measurement; it runs first ("": none did).
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
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

Mutant = dict[str, str]

ROOT = Path(__file__).parent.parent
LIST = Path(__file__).with_suffix(".json")
RESULTS = ROOT / "_build" / "mutants.json"
PACKAGES = ("ortho", "paper")
REPLACED = ast.expr | ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return | ast.Expr
# Code without mutants: inner functions, which are functions of their own, and what only checks or reports.
APART = ast.FunctionDef | ast.ClassDef | ast.Raise | ast.Assert | ast.JoinedStr
FILES = 5  # test files that are run on a mutant, the nearest first
# These test every mechanism: only the tests that a mutant selects are run.
SHARED = ("test_properties.py", "test_cost.py", "test_decoding.py")
# Tests that start processes or read no code.
NOT_RUN = re.compile(r"shapes|portability|test_gates|book|makefile|environment|pdf|readme|docstrings|mutants")


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function of a module with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        yield from functions(
            node, f"{prefix}{node.name}." if isinstance(node, ast.FunctionDef | ast.ClassDef) else prefix
        )


def own(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """The expressions and statements of a function that a mutant can replace, without annotations."""
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, APART) and field not in ("annotation", "returns"):
                if isinstance(child, REPLACED):
                    yield child
                yield from own(child)


def places(tree: ast.AST, mutant: Mutant) -> Sequence[ast.expr | ast.stmt]:
    """The nodes of a module that a mutant replaces, none if it does not apply."""
    nodes = [node for name, function in functions(tree) if name == mutant["function"] for node in own(function)]
    if mutant["kind"] == "constant verdict":
        return [n for n in nodes if isinstance(n, ast.Attribute) and ast.unparse(n).startswith("Verdict.")]
    found = [n for n in nodes if ast.unparse(n) == mutant["original"]]
    return found if len(found) == 1 else []


def find(root: Path, mutant: Mutant) -> Path | None:
    """The file a mutant applies to: the one it names, or the only other one that has its function and expression."""
    named, defined = root / mutant["file"], f"def {mutant['function'].split('.')[-1]}("
    sources = {file: file.read_text() for package in PACKAGES for file in (root / package).rglob("*.py")}
    fits = [file for file, source in sources.items() if defined in source and places(ast.parse(source), mutant)]
    if named in fits:
        return named
    return fits[0] if len(fits) == 1 else None


def mutated(source: str, mutant: Mutant) -> str:
    """A module's source with the mutant in its place, all else as it was."""
    data = source.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in reversed(places(ast.parse(source), mutant)):  # from the end, so that earlier places stay valid
        new = mutant["replacement"] if isinstance(node, ast.stmt) else f"({mutant['replacement']})"
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        data = data[:begin] + new.encode() + data[end:]
    ast.parse(data)
    return data.decode()


def concerned(tree: Path, file: Path, function: str) -> list[str]:
    """The test files nearest to a function, by their names and by the names that they use; the nearest first."""
    module = ".".join(file.relative_to(tree).with_suffix("").parts)
    names = {name for name in function.split(".") if name not in ("forward", "backward", "cost", "__init__")}
    public = set(re.findall(r"^(?:def|class) (\w{6,})", file.read_text(), re.MULTILINE)) - names
    ranked = []
    for test in sorted((tree / "tests").rglob("test_*.py")):
        if NOT_RUN.search(test.name) or test.name in SHARED:
            continue
        text = test.read_text()
        said = set(re.findall(r"\w+", text))
        near = 8 * (f"_{file.stem}_" in f"_{test.stem}_") + 2 * (f"_{file.parent.name}_" in f"_{test.stem}_")
        near += 6 * (module in text) + 2 * (file.stem in said) + 3 * len(names & said) + len(public & said)
        if near:
            ranked.append((-near, len(text), test.relative_to(tree).as_posix()))
    return [name for *_, name in sorted(ranked)[:FILES]]


def executed(tree: Path, arguments: list[str], limit: int) -> tuple[str, str]:
    """How a run of tests ends ("caught", "survived", "time" or "broken"), with the failing test or the last output."""
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE", "--tb=no", "--no-header", *arguments]
    # The limit is on processor time, which a busy machine does not lengthen.
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


def tested(tree: Path, mutant: Mutant, limit: int, extra: list[str]) -> dict[str, Any]:
    """A mutant's result, found in a copy of the tree that is restored afterwards."""
    file = find(tree, mutant)
    if file is None:
        return {"result": "gone"}
    near = concerned(tree, file, mutant["function"])
    shared = [path.relative_to(tree).as_posix() for name in SHARED for path in (tree / "tests").rglob(name)]
    passes = [[*shared, "-k", mutant["select"]] if "select" in mutant and shared else [], near]
    test, _, function = mutant["by"].partition("[")[0].partition("::")
    for path in (tree / "tests").rglob(Path(test).name) if function else ():  # also where it was moved to
        passes.insert(0, [f"{path.relative_to(tree).as_posix()}::{function}"])
    kept, result, by = file.with_suffix(".kept"), "no tests", ""
    shutil.copy2(file, kept)  # with its modification time, by which Python recognises compiled code
    for arguments in ([*each, *extra] for each in passes if each):
        try:
            file.write_text(mutated(file.read_text(), mutant))
            result, by = executed(tree, ["-x", *arguments], limit)
        finally:
            shutil.copy2(kept, file)
        if result == "time" and executed(tree, arguments, limit)[0] == "time":
            result = "survived"  # the tests take as long without the mutant
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
        if path.is_file() and path.name != ".git":  # a worktree's .git leads to the repository itself
            shutil.copy2(path, tree)
        elif path.name in ("results", "notebooks", "book"):
            (tree / path.name).symlink_to(path)
    return tree


def stored(out: Path) -> dict[str, Any]:
    """The results so far, by mutant."""
    return json.loads(out.read_text()) if out.exists() else {}


def run(root: Path, mutants: list[Mutant], out: Path, *, limit: int, jobs: int, extra: list[str]) -> None:
    """Test mutants and write each result at once; then run the tests that caught any on the unchanged tree."""
    results = stored(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    free = [copied(root) for _ in range(jobs)]

    def one(mutant: Mutant) -> dict[str, Any]:
        tree = free.pop()
        try:
            return tested(tree, mutant, limit, extra)
        finally:
            free.append(tree)

    try:
        with ThreadPoolExecutor(jobs) as pool:
            running = {pool.submit(one, mutant): mutant["id"] for mutant in mutants}
            for future in as_completed(running):
                name, result = running[future], future.result()
                results[name] = result
                out.write_text(json.dumps(results, indent=1))
                print(f"{name}: {result['result']} {result.get('by', '')}", flush=True)
        by = {result["by"] for result in results.values() if result["result"] == "caught"}
        if by and (sound := executed(free[0], [*sorted(by), *extra], 10 * limit))[0] != "survived":
            print(f"Not by the mutant: {sound[1]} fails as the tree is")
    finally:
        for tree in free:
            shutil.rmtree(tree)


def show(mutants: list[Mutant], out: Path) -> None:
    """The table, and the share caught of those that still apply."""
    results = stored(out)
    count: Counter[str] = Counter()
    for mutant in mutants:
        result = results.get(mutant["id"], {"result": "not run"})
        count[result["result"]] += 1
        where = f"{mutant['file']}: {mutant['function']}"
        print(f"{mutant['id']:18} {mutant['kind']:16} {where:60} {result['result']} {result.get('by', '')}")
    print(", ".join(f"{name} {n}" for name, n in sorted(count.items())))
    noticed = count["caught"] + count["time"]
    if judged := noticed + count["survived"] + count["no tests"]:
        print(f"noticed: {noticed} of {judged}, {noticed / judged:.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure which small faults of the package the tests notice.")
    parser.add_argument("what", choices=("run", "show"))
    parser.add_argument("--only", nargs="+", metavar="ID", help="these mutants, also if they have a result")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=int, default=150, help="processor seconds for a run of tests")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    asked = parser.parse_args()
    mutants = [m for m in json.loads(LIST.read_text()) if not asked.only or m["id"] in asked.only]
    if asked.what == "run":
        done = stored(RESULTS)
        left = [m for m in mutants if asked.only or done.get(m["id"], {"result": "broken"})["result"] == "broken"]
        run(ROOT, left, RESULTS, limit=asked.limit, jobs=asked.jobs, extra=asked.pytest)
    show(mutants, RESULTS)


if __name__ == "__main__":
    main()
