"""Why a notebook may not be published: outputs of other code, errors, warnings, traces of a machine, no assertion."""

import ast
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent

TOP_FOLDERS = "home|mnt|opt|private|root|srv|tmp|usr|var|Users|Volumes"
ABSOLUTE_PATH = re.compile(rf"(?<![\w.-])(?:/(?:{TOP_FOLDERS})/|[A-Z]:\\)[^\s'\"<]*")
ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]{6,}")


def code_cells(nb: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in nb.cells if cell.cell_type == "code"]


def digests(nb: NotebookNode) -> list[str]:
    """One digest for each code cell, of its source and of all code before it."""
    chain = hashlib.sha256()
    result = []
    for cell in code_cells(nb):
        chain.update(cell.source.encode() + b"\0")
        result.append(chain.hexdigest()[:12])
    return result


def stored_digests(nb: NotebookNode) -> list[str]:
    """The digests of the code that made the stored outputs; empty for a notebook that was never executed here."""
    return list(nb.metadata.get("ortho", {}).get("sources", []))


def faults(nb: NotebookNode) -> list[str]:
    """Why a notebook may not be published, one line for each reason; empty when it may."""
    cells = code_cells(nb)
    found = [f"{named(cells, i)} {fault}" for i, cell in enumerate(cells) for fault in cell_faults(cell, i)]
    if not (stored := stored_digests(nb)):
        found.append("was never executed by tools/notebooks.py")
    elif stored != (now := digests(nb)):
        first = next((i for i, (old, new) in enumerate(zip(stored, now, strict=False)) if old != new), len(stored))
        found.append(f"{named(cells, min(first, len(now)))} was edited, added or removed after execution")
    if not any(asserts(cell.source) for cell in cells):
        found.append("asserts nothing")
    return found


def named(cells: list[NotebookNode], position: int) -> str:
    """A code cell by its place among these, and by its id; by its place alone where it is no longer there."""
    return f"code cell {position}" + (f" ({cells[position].get('id', 'no id')})" if position < len(cells) else "")


def cell_faults(cell: NotebookNode, position: int) -> Iterator[str]:
    if cell.execution_count is None:
        yield "is not executed"
    elif cell.execution_count != position + 1:
        yield f"is out of order: executed as number {cell.execution_count}, expected {position + 1}"
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


def asserts(source: str) -> bool:
    """Whether code checks something that can fail: an `assert` on more than a constant, or an `assert_…` call."""
    try:
        tree = ast.parse(TransformerManager().transform_cell(source))
    except SyntaxError:
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant):
            return True
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name.startswith("assert_"):
                return True
    return False
