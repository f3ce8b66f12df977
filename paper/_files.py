"""Files that are written whole or not at all."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def written_whole(file: Path) -> Iterator[BinaryIO]:
    """Yield a stream whose content replaces a file when the block ends. A kill at any moment leaves the old file or the
    new one; an error leaves the old one. If several writers run at once, the last to end replaces the others' whole
    files. Missing folders are made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.{secrets.token_hex(4)}.part")  # beside it: a move cannot cross file systems
    try:
        with part.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def remove(file: Path) -> None:
    """Remove a file, if it exists, and the partial files that killed writers left of it."""
    for part in (file, *file.parent.glob(f".{file.name}.*.part")):
        part.unlink(missing_ok=True)
