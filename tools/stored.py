"""Why a notebook may not be published: outputs of other code, errors, warnings, traces of a machine, no assertion."""

import hashlib
import json
import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent

TOP_FOLDERS = "home|mnt|opt|private|root|srv|tmp|usr|var|Users|Volumes"
ABSOLUTE_PATH = re.compile(rf"(?<![\w.-])(?:/(?:{TOP_FOLDERS})/|[A-Z]:\\)[^\s'\"<]*")
TIMING_TAG = "nbval-ignore-output"
TAGS = {TIMING_TAG, "hide-cell", "hide-input", "hide-output", "ledger", "remove-cell", "remove-input"}
# Comments, too, make nbval leave cells, their outputs or their errors out of the comparison.
MARKER = re.compile(r"^\s*#[#\s]*((?:NBVAL|PYTEST_VALIDATE)_\w+)", re.MULTILINE)
ASSERTION = re.compile(r"^\s*assert\b|\bassert_\w+\(", re.MULTILINE)
ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]{6,}")


def code_cells(nb: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in nb.cells if cell.cell_type == "code"]


def digests(nb: NotebookNode) -> dict[str, list[str]]:
    """Two digests for each code cell: under `sources` of its source and of all code before it, under `outputs` of its
    outputs, including pictures, which no comparison of runs looks at."""
    chain, sources, outputs = hashlib.sha256(), [], []
    for cell in code_cells(nb):
        chain.update(cell.source.encode() + b"\0")
        sources.append(chain.hexdigest()[:12])
        outputs.append(hashlib.sha256(json.dumps(cell.outputs, sort_keys=True).encode()).hexdigest()[:12])
    return {"outputs": outputs, "sources": sources}


def faults(nb: NotebookNode) -> list[str]:
    """Why a notebook may not be published, one line for each reason; empty when it may."""
    cells = code_cells(nb)
    found = [f"{named(cells, i)} {fault}" for i, cell in enumerate(cells) for fault in cell_faults(cell, i)]
    stored, now = nb.metadata.get("ortho"), digests(nb)
    if not stored:
        found.append("was never executed by tools/notebooks.py")
    elif edited := differences(stored["sources"], now["sources"]):
        found.append(f"{named(cells, edited[0])} was edited, added or removed after execution")
    elif edited := differences(stored["outputs"], now["outputs"]):
        found.append(f"{named(cells, edited[0])} has outputs that were edited after execution")
    if not any(ASSERTION.search(cell.source) for cell in cells):
        found.append("asserts nothing")
    return found


def differences(stored: list[str], now: list[str]) -> list[int]:
    """The places at which two lists differ, in an item or in length."""
    return [i for i, (old, new) in enumerate(zip_longest(stored, now)) if old != new]


def named(cells: list[NotebookNode], position: int) -> str:
    """A code cell's name: its place among these and its id, or its place alone if the cell is no longer there."""
    return f"code cell {position}" + (f" ({cells[position].get('id', 'no id')})" if position < len(cells) else "")


def cell_faults(cell: NotebookNode, position: int) -> Iterator[str]:
    if cell.execution_count is None:
        yield "is not executed"
    elif cell.execution_count != position + 1:
        yield f"is out of order: executed as number {cell.execution_count}, expected {position + 1}"
    tags = set(cell.metadata.get("tags", []))
    if tags - TAGS:
        yield f"has tags other than {', '.join(sorted(TAGS))}: {', '.join(sorted(tags - TAGS))}"
    if marker := MARKER.search(cell.source):
        yield f"keeps itself from the comparison of outputs: # {marker[1]}"
    for output in cell.outputs:
        if output.output_type == "error":
            yield f"stores an error: {output.ename}: {output.evalue}"
        if output.get("name") == "stderr":
            yield f"stores a warning: {output.text.strip().splitlines()[-1] if output.text.strip() else 'stderr'}"
        for text in texts(output):
            if path := ABSOLUTE_PATH.search(text) or re.search(re.escape(str(ROOT)), text):
                yield f"shows an absolute path: {path[0]}"
            if address := ADDRESS.search(text):
                yield f"shows a memory address: {address[0]}"


def texts(output: dict[str, Any]) -> Iterator[str]:
    """What a reader would see as words: streams and textual data, no encoded pictures."""
    if "text" in output:
        yield output["text"]
    for kind, content in output.get("data", {}).items():
        if isinstance(content, str) and "text/" in kind:
            yield content
