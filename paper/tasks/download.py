"""Public files: from a local folder, from a cache, or from their public address, and never without their checksum."""

import hashlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path, PureWindowsPath
from tempfile import TemporaryDirectory
from urllib.request import urlopen

__all__ = ["RemoteFile", "fetch"]

VARIABLE = "ORTHO_DATA"  # the environment variable that names the local folder, if none is given
CHUNK = 1 << 20  # bytes
SILENCE_S = 30.0  # without a byte from the server


@dataclass(frozen=True)
class RemoteFile:
    """A public file: its `name` within a folder (`collection/file`), its address, and its sha256 in hexadecimal.

    No more than `size` bytes, where given, are fetched. Raises ValueError for a name that leads out of the folder.
    """

    name: str
    url: str
    sha256: str
    size: int | None = None

    def __post_init__(self) -> None:
        path = PureWindowsPath(self.name)  # of all systems' paths: with drives, and both kinds of slashes
        if path.anchor or ".." in path.parts or not path.name:
            raise ValueError(f"name: expected a file's place within a folder, as collection/file, got {self.name!r}")


def fetch(file: RemoteFile, folder: str | os.PathLike[str] | None = None, *, timeout: float = 1800.0) -> Path:
    """The path of the file on this machine; whenever a path is returned, its content has the sha256.

    `folder`, or else the environment variable ORTHO_DATA, names a local folder that holds the file: then nothing is
    fetched. Without either it is taken from the cache (`$XDG_CACHE_HOME/ortho`, by default `~/.cache/ortho`), into
    which it is fetched, whole or not at all, if it is not there; that may take `timeout` seconds.

    Raises FileNotFoundError if the local folder or the file in it is missing, ConnectionError if the file cannot be
    fetched, and ValueError for a wrong checksum.
    """
    name, local = ("folder", folder) if folder is not None else (VARIABLE, os.environ.get(VARIABLE) or None)
    if local is not None:
        base = Path(local).expanduser()
        path = base / file.name
        _expect_there(name, base, path, file)
    else:
        path = _cache() / file.name
        if not path.exists():
            _download(file, path, timeout)
    _check(path, str(path), file)
    return path


def _cache() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # A relative path is to be ignored (XDG Base Directory Specification).
    return (base if base.is_absolute() else Path.home() / ".cache") / "ortho"


def _expect_there(name: str, folder: Path, path: Path, file: RemoteFile) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(f"{name}: expected a folder that holds {file.name}, got {str(folder)!r}, which is none")
    if not path.exists():
        raise FileNotFoundError(
            f"{name}: expected {file.name} in {str(folder)!r}, where it is not. Put the file from {file.url} (sha256 "
            f"{file.sha256}) there, or name no folder to have it fetched."
        )


def _download(file: RemoteFile, path: Path, timeout: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # A folder of its own for each process: many may want the file at once. Beside the file's place, so that the
    # replacement cannot cross file systems.
    with TemporaryDirectory(dir=path.parent, prefix=".part-") as folder:
        part = Path(folder) / path.name
        with part.open("wb") as stream:
            for piece in _pieces(file, path, timeout):
                stream.write(piece)
            stream.flush()
            os.fsync(stream.fileno())
        _check(part, file.url, file)
        part.replace(path)


def _pieces(file: RemoteFile, path: Path, timeout: float) -> Iterator[bytes]:
    """The bytes that the address sends, until they end, the time is over, or more have come than there should be."""
    end, got = time.monotonic() + timeout, 0
    try:
        with urlopen(file.url, timeout=min(SILENCE_S, timeout)) as response:
            # read1, as read would wait for a whole piece and not see the time.
            while piece := response.read1(CHUNK):
                got += len(piece)
                if file.size is not None and got > file.size:
                    raise ValueError(f"{file.url}: expected {file.size} bytes, got more; they are not used")
                if time.monotonic() > end:
                    raise TimeoutError(f"{got} bytes after {timeout:g} s")
                yield piece
    except (OSError, HTTPException) as error:
        raise ConnectionError(
            f"{file.name}: cannot fetch {file.url} ({error}). Without a network, put the file, whose sha256 is "
            f"{file.sha256}, at {path}, or name a folder that holds {file.name} in {VARIABLE}."
        ) from error


def _check(path: Path, named: str, file: RemoteFile) -> None:
    with path.open("rb") as stream:
        got = hashlib.file_digest(stream, "sha256").hexdigest()
        size = stream.tell()
    if got != file.sha256:
        raise ValueError(
            f"{named}: expected the sha256 {file.sha256} of {file.name}, got {got} from {size} bytes. It is not used; "
            f"remove it if it lies on a disk, and take the file from {file.url}."
        )
