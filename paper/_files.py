"""Files that are written whole or not at all."""

import glob
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def written_whole(file: Path) -> Iterator[BinaryIO]:
    """Yield a stream whose content replaces a file when the block ends. A kill at any moment leaves the old file or the
    new one; an error leaves the old one. If several writers run at once, the last to end replaces the others' whole
    files. Missing folders are made."""
    with _part(file) as (part, stream):
        yield stream
        stream.flush()
        os.fsync(stream.fileno())
        part.replace(file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name, too, must survive a power cut
    finally:
        os.close(folder)


def probe(file: Path, size: int) -> None:
    """Raise OSError unless `size` bytes can be written where `written_whole` would write the file."""
    with _part(file) as (_, stream):
        stream.write(bytes(size))
        stream.flush()
        os.fsync(stream.fileno())


def remove(file: Path) -> None:
    """Remove a file, if it exists, and the partial files that dead writers left of it."""
    file.unlink(missing_ok=True)
    _remove_leftovers(file)


@contextmanager
def _part(file: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """Yield a new file beside another, under its own name, with its stream; it is removed at the end unless moved.

    It is locked while its writer lives. Unlocked ones belong to dead writers, and are removed first.
    """
    import fcntl  # not on every system; code that only reads does not need it

    file.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(file)
    while True:
        part = file.with_name(f"{file.name}.{secrets.token_hex(8)}.part")  # beside it: a move cannot cross file systems
        with part.open("xb") as stream:
            with suppress(OSError):  # a file system without locks: dead files are not recognised, nor removed
                fcntl.flock(stream, fcntl.LOCK_EX)
            if not part.exists():  # another writer removed it before it was locked
                continue
            try:
                yield part, stream
            finally:
                part.unlink(missing_ok=True)
            return


def _remove_leftovers(file: Path) -> None:
    import fcntl

    for part in file.parent.glob(f"{glob.escape(file.name)}.*.part"):
        with suppress(OSError), part.open("r+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if its writer lives
            part.unlink()
