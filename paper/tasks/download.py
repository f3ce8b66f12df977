"""Public files: from a local folder, or fetched once by pooch into a cache, and never without their checksum."""

import os
from dataclasses import dataclass
from pathlib import Path, PurePath

__all__ = ["RemoteFile", "fetch"]

VARIABLE = "ORTHO_DATA"  # the environment variable that names the local folder
SILENCE_S = 30  # without a byte from the server


@dataclass(frozen=True)
class RemoteFile:
    """A public file: its `name` within a folder (`collection/file`), its address, and its sha256 in hexadecimal."""

    name: str
    url: str
    sha256: str


def fetch(file: RemoteFile) -> Path:
    """The path of the file on this machine; whenever a path is returned, its content has the sha256.

    If the environment variable ORTHO_DATA names a local folder, that folder has to hold the file, and nothing is
    fetched. Otherwise it is taken from the cache (of the user, in the folder `ortho`), into which it is fetched, whole
    or not at all, if it is not there.

    Raises FileNotFoundError if the local folder lacks the file, ConnectionError if the file cannot be fetched, and
    ValueError for a wrong checksum.
    """
    import pooch  # not above: in a notebook's kernel its progress bars would warn that they are not to be seen

    local = os.environ.get(VARIABLE)
    path = (Path(local).expanduser() if local else pooch.os_cache("ortho")) / file.name
    if local and not path.exists():
        raise FileNotFoundError(
            f"{VARIABLE}: expected {file.name} in {local!r}, where it is not. Put the file from {file.url} (sha256 "
            f"{file.sha256}) there, or name no folder to have it fetched."
        )
    if not path.exists():
        _download(file, path)
    if pooch.file_hash(path) != file.sha256:
        raise ValueError(
            f"{path}: expected the sha256 {file.sha256}. It is not used; remove it, and take the file from {file.url}."
        )
    return path


def _download(file: RemoteFile, path: Path) -> None:
    import pooch

    place = PurePath(file.name)
    downloader = pooch.HTTPDownloader(timeout=SILENCE_S) if file.url.startswith("http") else None
    try:
        pooch.retrieve(file.url, file.sha256, place.name, path.parent, downloader=downloader)
    except OSError as error:  # those of requests among them
        raise ConnectionError(
            f"{file.name}: cannot fetch {file.url} ({error}). Without a network, put the file, whose sha256 is "
            f"{file.sha256}, at {path}, or name a folder that holds {file.name} in {VARIABLE}."
        ) from error
