"""What the chapters judged, read from the outputs of their executed notebooks."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from paper.claims.catalogue import LedgerError

__all__ = ["MIME", "ROOT", "chapters", "judged_in", "verdicts"]

ROOT = Path(__file__).resolve().parents[2]
# The type of the structured output that `judge` leaves in a cell: a list with a row for each claim of the cell.
MIME = "application/vnd.ortho.verdict+json"
_CHAPTER = re.compile(r"^\s*- file: (notebooks/\S+)$", re.MULTILINE)


def chapters(root: Path = ROOT) -> list[Path]:
    """The notebooks of the chapters, in the order of the table of contents."""
    return [root / f"{name}.ipynb" for name in _CHAPTER.findall((root / "_toc.yml").read_text(encoding="utf-8"))]


def judged_in(cells: Iterable[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows that the cells of an executed notebook hold, each with the id of its cell."""
    for cell in cells:
        for output in cell.get("outputs", []):
            for row in output.get("data", {}).get(MIME, []):
                yield cell["id"], row


def verdicts(root: Path = ROOT) -> dict[str, dict[str, Any]]:
    """Claim -> the row that its chapter judged, with the chapter and its code cell.

    LedgerError, naming the places, for a claim that is judged twice, or for a chapter that cannot be read.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in chapters(root):
        try:
            cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        except (OSError, KeyError, json.JSONDecodeError) as error:
            raise LedgerError(f"{path}: expected an executed notebook: {error}") from error
        name = path.relative_to(root / "notebooks").with_suffix("").as_posix()
        for code, row in judged_in(cells):
            if other := found.get(row["id"]):
                places = f"{other['chapter']} ({other['code']}) and {name} ({code})"
                raise LedgerError(f"claim {row['id']}: expected one cell that judges it, got {places}")
            found[row["id"]] = {**row, "chapter": name, "code": code}
    return found
