"""Language modelling over bytes: the next byte of a text; a part of it is kept for validation and one for the test.

The text is the sources of the Python standard library, which need no download.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ortho.checks import positive_int
from paper.tasks.task import Batch, Task

VOCAB_SIZE = 256
TRAIN, VALIDATION = 90, 5  # per cent; the rest is the test's

LEFT_OUT = {
    # installed beside the library, and not part of it
    *("site-packages", "dist-packages"),
    # in packages of their own in some distributions, so that the text would depend on what else is installed
    *("test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "distutils", "ensurepip"),
    # tables written by programs, near copies of each other: a split by content would not keep them apart
    *("encodings", "pydoc_data"),
}
BUILT = ("_sysconfigdata", "config-")  # beginnings of the names of files that a build writes about its own machine


class Parts(NamedTuple):
    """A text in three parts that share nothing."""

    train: bytes
    validation: bytes
    test: bytes

    def limited(self, limit: int | None) -> "Parts":
        """The same with only the first `limit` bytes to train on, all of them for None.

        Raises TypeError or ValueError for a limit below 1 or above what there is.
        """
        if limit is not None and positive_int("limit", limit) > len(self.train):
            raise ValueError(f"limit: expected at most the {len(self.train)} bytes of the training part, got {limit}")
        return self._replace(train=self.train[:limit])

    def facts(self) -> dict[str, dict[str, int | str]]:
        """The size in bytes and the sha256 of each part, for a record."""
        return {
            name: {"bytes": len(part), "sha256": hashlib.sha256(part).hexdigest()}
            for name, part in self._asdict().items()
        }


def language_modelling(name: str, title: str, parts: Parts, length: int = 128) -> Task:
    """The task to say each next byte: inputs ((B, N),) and answers (B, N), N = `length`, indices below 256.

    Training draws windows at random places, with replacement. Validation and test cut windows at even distances,
    whatever the generator; no two windows ask for the same byte, and ValueError is raised for more windows than that
    allows. Raises TypeError or ValueError for a length below 1, and for a part that is too short for a window.
    """
    positive_int("length", length)
    for part, content in parts._asdict().items():
        if len(content) <= length:
            raise ValueError(f"parts: expected more than length = {length} bytes to {part}, got {len(content)}")
    texts = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts]
    return Task(
        name=name,
        title=title,
        vocab_size=VOCAB_SIZE,
        longest=length,
        train=partial(_anywhere, texts[0], length),
        validation=partial(_evenly, texts[1], length),
        tests={"test": partial(_evenly, texts[2], length)},
    )


def by_content(contents: Iterable[bytes]) -> Parts:
    """Files in the order of their sha256, each distinct content once: the first 90 % of the hashes to train on, and two
    times 5 % after them. So a file that two versions of a text share is in the same part of both."""
    parts: list[list[bytes]] = [[], [], []]
    for digest, content in sorted({hashlib.sha256(content).hexdigest(): content for content in contents}.items()):
        place = (100 * int(digest[:8], 16)) >> 32  # 0 to 99
        parts[(place >= TRAIN) + (place >= TRAIN + VALIDATION)].append(content)
    return Parts(*map(b"".join, parts))


@cache
def python_parts(folder: str | os.PathLike[str] | None = None) -> Parts:
    """The Python files in `folder`, by default the running Python's standard library, split by content (`by_content`).

    `LEFT_OUT` and `BUILT` list what is left out, with the reasons; symbolic links and files that cannot be read are
    left out, too. The text is that of one version of Python: `Parts.facts` tells texts apart.

    Raises FileNotFoundError if there is no Python file.
    """
    folder = sysconfig.get_path("stdlib") if folder is None else folder
    parts = by_content(map(_content, _sources(folder)))
    if not any(parts):
        raise FileNotFoundError(
            f"folder: expected Python files, got {os.fspath(folder)!r}, which has none. A Python that is installed "
            "without its sources needs the folder Lib of its source distribution."
        )
    return parts


def _sources(folder: str | os.PathLike[str]) -> list[Path]:
    found = []
    for place, folders, files in os.walk(folder):  # follows no links
        folders[:] = [name for name in folders if name not in LEFT_OUT and not name.startswith(BUILT)]
        found += [Path(place, name) for name in files if name.endswith(".py") and not name.startswith(BUILT)]
    return found


def _content(path: Path) -> bytes:
    """A file's content; empty if it is not a file or cannot be read."""
    try:
        return path.read_bytes() if path.is_file() and not path.is_symlink() else b""
    except OSError:
        return b""


def whole_windows(batch: Batch) -> Tensor:
    """The windows of a batch, (B, N + 1): its inputs, and the last answer."""
    return torch.cat([batch.inputs[0], batch.answers[:, -1:]], 1)


def _anywhere(text: Tensor, length: int, count: int, generator: torch.Generator) -> Batch:
    return _windows(
        text, length, torch.randint(len(text) - length, (positive_int("count", count),), generator=generator)
    )


def _evenly(text: Tensor, length: int, count: int, _: torch.Generator) -> Batch:
    most = (len(text) - 1) // length
    if positive_int("count", count) > most:
        raise ValueError(f"count: expected at most {most} windows of {length} from {len(text)} bytes, got {count}")
    # Distances are at least `length`: (count - 1) length <= last, the last place for a window.
    last = len(text) - 1 - length
    return _windows(text, length, torch.arange(count) * last // max(count - 1, 1))


def _windows(text: Tensor, length: int, starts: Tensor) -> Batch:
    windows = text.unfold(0, length + 1, 1)[starts].long()  # (B, N + 1)
    return Batch((windows[:, :-1],), windows[:, 1:])
