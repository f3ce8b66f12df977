"""Run the book's notebooks in place, and refuse those whose stored outputs cannot be trusted.

    python -m tools.notebooks execute [--fresh] [NOTEBOOK ...]
    python -m tools.notebooks check [NOTEBOOK ...]

Without names, all notebooks of the book are meant (`FOLDERS`). Executing an unchanged notebook leaves its bytes as
they were: no times are recorded, metadata are the same on every Python 3, and cells tagged `nbval-ignore-output` (live
timings) keep their outputs as long as their code and all code before it are unchanged; `--fresh` takes new ones.
Notebooks run side by side, each with one thread unless OMP_NUM_THREADS says otherwise, but one that shows live timings
runs alone. The time that a chapter or a guide took when its outputs were made is kept in `book/run-times.json`. The
pages that show these times run last, and run again when one changes. Those that show all verdicts
gather them from the executed chapters: they run after these, and run again when a verdict changes.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat import NotebookNode

from paper._files import written_whole
from tools.stored import TIMING_TAG, code_cells, digests, faults

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("notebooks", "notebooks/systems", "book/guides", "book")  # chapters, systems, guides, pages
RUN_TIMES = ROOT / "book" / "run-times.json"
SHOW_TIMES = [ROOT / "book" / "reproduce.ipynb"]
VERDICT_PAGES = ("index", "ledger", "reproduce", "zh")
SHOW_VERDICTS = [ROOT / "book" / f"{name}.ipynb" for name in VERDICT_PAGES]
CELL_TIMEOUT = 600  # seconds

KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
# Whatever kernels the user has installed, python3 is the interpreter that runs this file.
THIS_PYTHON = KernelSpecManager(kernel_dirs=[])
# Metadata that editors and kernels leave in a cell, and that would make equal runs differ.
TRANSIENT = ("ExecuteTime", "collapsed", "execution", "jupyter", "scrolled", "vscode")


class NotebookError(RuntimeError):
    """A notebook that could not be executed; the message says why in a few lines."""


def every_notebook() -> list[Path]:
    """The book's notebooks: chapters and guides, and the pages that look at all of them."""
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.ipynb"))]


def title(path: Path) -> str:
    """The path as shown to people: relative to the repository."""
    return os.path.relpath(path.resolve(), ROOT)


def environment(path: Path) -> dict[str, str]:
    """Environment variables of a notebook's kernel: one thread, and imports from the checkout the notebook lies in.

    A package installed for editing belongs to one checkout; without this, a notebook of another checkout would import
    it and read its results. A notebook outside every checkout imports this one.
    """
    checkout = next((parent for parent in path.resolve().parents if (parent / "ortho" / "__init__.py").is_file()), ROOT)
    imports = os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": imports}


# -------------------------------------------------------------------------------------------------------------- execute


def execute(path: Path, *, fresh: bool = False) -> tuple[float, bool]:
    """Execute one notebook in place and return its seconds of processor time, and whether that changed the file.

    The file is replaced only when all cells succeeded and something changed. Raises `NotebookError` if a cell or the
    kernel fails.
    """
    before = path.read_text(encoding="utf-8")
    nb = nbformat.reads(before, as_version=4)
    old_outputs = [cell.outputs for cell in code_cells(nb)]
    old_digests = nb.metadata.get("ortho", {}).get("sources", [])

    start = sum(os.times()[2:4])  # user and system time of ended child processes: other load does not lengthen it
    run(nb, path)
    seconds = sum(os.times()[2:4]) - start

    if not fresh:
        new_digests = digests(nb)["sources"]
        for cell, outputs, old, new in zip(code_cells(nb), old_outputs, old_digests, new_digests, strict=False):
            if old == new and TIMING_TAG in cell.metadata.get("tags", []):
                cell.outputs = outputs
    normalise(nb)
    after = nbformat.writes(nb) + "\n"
    if after != before:
        replace(path, after)
    return seconds, after != before


def run(nb: NotebookNode, path: Path) -> None:
    """Run all cells in a new kernel, in the notebook's own folder, storing outputs in `nb`."""
    for cell in code_cells(nb):
        cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        nb,
        km=AsyncKernelManager(kernel_name=KERNEL["name"], kernel_spec_manager=THIS_PYTHON),
        resources={"metadata": {"path": str(path.resolve().parent)}},
        timeout=CELL_TIMEOUT,
        record_timing=False,
        coalesce_streams=True,
        shutdown_kernel="immediate",  # as nbval does: an orderly shutdown takes a kernel more than a second
    )
    try:
        client.execute(cleanup_kc=True, stderr=subprocess.DEVNULL, env=environment(path))
    except (CellExecutionError, CellTimeoutError, RuntimeError) as error:  # the last: no kernel, or one that died
        last = [text for text in re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines() if text.strip()][-12:]
        raise NotebookError("\n    ".join(["a cell failed:", *last])) from error


def normalise(nb: NotebookNode) -> None:
    """Make the stored form depend on code and outputs alone, and record both, so that an edit of either is noticed."""
    kept = {key: value for key, value in nb.metadata.items() if key not in {"widgets", "signature", "vscode"}}
    nb.metadata = nbformat.from_dict(kept | {"kernelspec": KERNEL, "ortho": digests(nb)})
    nb.metadata.language_info.pop("version", None)  # of Python
    nb.nbformat_minor = max(nb.nbformat_minor, 5)
    for cell in nb.cells:
        for key in TRANSIENT:
            cell.metadata.pop(key, None)


def replace(path: Path, text: str) -> None:
    """Write a file so that a reader, or a kill, finds either the old or the new one."""
    with written_whole(path) as stream:
        stream.write(text.encode())


def record_time(path: Path, seconds: float, changed: bool) -> bool:
    """Store the time of a chapter or guide if its outputs are new or it has no time; returns whether it was stored."""
    times = json.loads(RUN_TIMES.read_text(encoding="utf-8"))
    if not title(path).startswith(FOLDERS[:-1]) or (title(path) in times and not changed):
        return False
    times = {name: time for name, time in times.items() if (ROOT / name).exists()} | {title(path): round(seconds, 1)}
    replace(RUN_TIMES, json.dumps(times, indent=1, sort_keys=True) + "\n")
    return True


# ------------------------------------------------------------------------------------------------------------- commands


def check(path: Path) -> bool:
    """Whether a notebook may be published; prints why it may not."""
    found = faults(nbformat.read(path, as_version=4))
    if found:
        print("\n    ".join([f"{title(path)} may not be published:", *found]), file=sys.stderr)
    return not found


def executions(paths: Sequence[Path], *, fresh: bool) -> Iterator[tuple[Path, Callable[[], tuple[float, bool]]]]:
    """The notebooks as they finish, each with a function that returns or raises what `execute` did for it."""
    together = [path for path in paths if path.is_file() and TIMING_TAG.encode() not in path.read_bytes()]
    with ProcessPoolExecutor() as pool:
        running = {pool.submit(execute, path): path for path in together}
        for future in as_completed(running):
            yield running[future], future.result
    for path in [path for path in paths if path not in together]:
        yield path, partial(execute, path, fresh=fresh)


def execute_all(paths: Sequence[Path], *, fresh: bool) -> list[bool]:
    """Execute notebooks; returns for each whether it could be executed.

    Pages that show verdicts come after the chapters that judge, and run if a verdict changes; pages that show run times
    come last.
    """
    done: list[bool] = []

    def execute_some(some: Sequence[Path]) -> bool:
        """Execute these; returns whether one of them has a new time."""
        kept = False
        for path, work in executions(some, fresh=fresh):
            try:
                seconds, changed = work()
            except (OSError, ValueError, RuntimeError) as error:  # no notebook; a failed cell; a killed process
                print(f"{title(path)}: {error}", file=sys.stderr)
                done.append(False)
                continue
            done.append(True)
            print(f"{seconds:6.1f} s  {title(path)}", flush=True)
            kept |= record_time(path, seconds, changed)
        return kept

    before = judged()
    kept = execute_some([path for path in paths if path not in SHOW_TIMES and path not in SHOW_VERDICTS])
    anew = judged() != before
    execute_some([path for path in SHOW_VERDICTS if path not in SHOW_TIMES and (anew or path in paths)])
    execute_some([path for path in SHOW_TIMES if kept or path in paths or (anew and path in SHOW_VERDICTS)])
    return done


def judged() -> list[Any]:
    """What the stored chapters judged."""
    from paper.claims.gathered import judged_in  # imports the library, which other uses of this module do not need

    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "notebooks").rglob("*.ipynb"))]
    return [row for text in texts for row in judged_in(json.loads(text)["cells"])]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run the book's notebooks, or check what they store.")
    parser.add_argument("command", choices=("execute", "check"))
    parser.add_argument("notebooks", nargs="*", type=Path, metavar="NOTEBOOK")
    parser.add_argument("--fresh", action="store_true", help="take live timings anew")
    options = parser.parse_intermixed_args(arguments)
    paths = [path.resolve() for path in options.notebooks] or every_notebook()
    done = execute_all(paths, fresh=options.fresh) if options.command == "execute" else list(map(check, paths))
    if not all(done):
        print(f"{done.count(False)} of {len(done)} notebooks failed", file=sys.stderr)
    elif options.command == "check":
        print(f"{len(done)} notebooks may be published")
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
