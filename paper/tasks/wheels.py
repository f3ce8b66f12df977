"""A text that repeats itself and is the same for every reader: the Python sources of six pinned wheels, 30 MB.

Enough for 64 times the least budget of `paper.experiments.learning.copying` without a second pass. The standard library
of the reader's own Python, the other such text, differs from version to version.
"""

import hashlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

from paper.tasks.download import VARIABLE
from paper.tasks.text import TRAIN, VALIDATION, Parts


class Wheel(NamedTuple):
    """A wheel on PyPI: project, version, file name, sha256 in hexadecimal."""

    project: str
    version: str
    file: str
    sha256: str


WHEELS = tuple(
    Wheel(project, version, f"{project}-{version}-py3-none-any.whl", sha256)
    for project, version, sha256 in (
        ("django", "5.2.8", "37e687f7bd73ddf043e2b6b97cfe02fcbb11f2dbb3adccc6a2b18c6daa054d7f"),
        ("networkx", "3.5", "0030d386a9a06dee3565298b4a734b68589749a544acbb6c412dc9e2489ec6ec"),
        ("nltk", "3.9.2", "1e209d2b3009110635ed9709a67a1a3e33a10f799490fa71cf4bec218c11c88a"),
        ("sphinx", "8.2.3", "4405915165f13521d875a8c29c8970800a0141c14cc5416a38feca4ea5d9b9c3"),
        ("sqlalchemy", "2.0.44", "19de7ca1246fbef9f9d1bff8f1ab25641569df226364a0e40457dc5457c54b05"),
        ("twisted", "25.5.0", "8559f654d01a54a8c3efe66d533d43f383531ebf8d81d9f9ab4769d91ca15df7"),
    )
)


def wheels_parts(folder: str | os.PathLike[str] | None = None) -> Parts:
    """The Python files of `WHEELS` without their tests, each distinct file once, in the order of their sha256: the
    first 90 % of the hashes to train on, and two times 5 % after them.

    The wheels are taken from `folder`, or else from the folder `wheels` in the one that the environment variable
    ORTHO_DATA names, or else from the cache (`$XDG_CACHE_HOME/ortho/wheels`), into which pip downloads them.

    Raises FileNotFoundError for a wheel that is not in the named folder, ConnectionError if pip cannot download it, and
    ValueError for a wrong sha256.
    """
    local = os.environ.get(VARIABLE)
    if folder is None and local:
        folder = Path(local).expanduser() / "wheels"
    return _parts(_cached() if folder is None else Path(folder))


def _cached() -> Path:
    """The cache's folder, with all wheels in it."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    target = (base if base.is_absolute() else Path.home() / ".cache") / "ortho" / "wheels"
    if missing := [wheel for wheel in WHEELS if not (target / wheel.file).exists()]:
        target.mkdir(parents=True, exist_ok=True)
        pinned = target / "pinned.txt"
        pinned.write_text("".join(f"{w.project}=={w.version} --hash=sha256:{w.sha256}\n" for w in missing))
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run(
            [*command, "--require-hashes", "--dest", str(target), "--requirement", str(pinned)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ConnectionError(f"pip could not download the wheels of {pinned}: {done.stderr.strip()}")
    return target


@cache
def _parts(folder: Path) -> Parts:
    files: dict[str, bytes] = {}
    for wheel in WHEELS:
        path = folder / wheel.file
        content = path.read_bytes()
        if (got := hashlib.sha256(content).hexdigest()) != wheel.sha256:
            raise ValueError(f"{path}: expected the sha256 {wheel.sha256}, got {got}; remove the file")
        with ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith(".py") and not _is_test(name):
                    source = archive.read(name)
                    files[hashlib.sha256(source).hexdigest()] = source
    parts: list[list[bytes]] = [[], [], []]
    for digest, source in sorted(files.items()):
        place = (100 * int(digest[:8], 16)) >> 32  # 0 to 99
        parts[(place >= TRAIN) + (place >= TRAIN + VALIDATION)].append(source)
    return Parts(*map(b"".join, parts))


def _is_test(name: str) -> bool:
    *folders, file = name.split("/")
    return file.startswith("test_") or any(folder in ("test", "tests") for folder in folders)
