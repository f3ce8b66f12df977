"""A text that repeats itself and is the same for every reader: the Python sources of six pinned wheels, 30 MB.

Enough for 64 times the least budget of `paper.experiments.learning.copying` without a second pass. The standard library
of the reader's own Python, the other such text, differs from version to version.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from zipfile import ZipFile

from paper.tasks.download import RemoteFile, fetch
from paper.tasks.text import Parts, by_content

# For each wheel on PyPI its project and version, its place there, and its sha256.
_FILES = """
django-5.2.8 5e/3d/a035a4ee9b1d4d4beee2ae6e8e12fe6dee5514b21f62504e22efcbd9fb46
    37e687f7bd73ddf043e2b6b97cfe02fcbb11f2dbb3adccc6a2b18c6daa054d7f
networkx-3.5 eb/8d/776adee7bbf76365fdd7f2552710282c79a4ead5d2a46408c9043a2b70ba
    0030d386a9a06dee3565298b4a734b68589749a544acbb6c412dc9e2489ec6ec
nltk-3.9.2 60/90/81ac364ef94209c100e12579629dc92bf7a709a84af32f8c551b02c07e94
    1e209d2b3009110635ed9709a67a1a3e33a10f799490fa71cf4bec218c11c88a
sphinx-8.2.3 31/53/136e9eca6e0b9dc0e1962e2c908fbea2e5ac000c2a2fbd9a35797958c48b
    4405915165f13521d875a8c29c8970800a0141c14cc5416a38feca4ea5d9b9c3
sqlalchemy-2.0.44 9c/5e/6a29fa884d9fb7ddadf6b69490a9d45fded3b38541713010dad16b77d015
    19de7ca1246fbef9f9d1bff8f1ab25641569df226364a0e40457dc5457c54b05
twisted-25.5.0 eb/66/ab7efd8941f0bc7b2bd555b0f0471bff77df4c88e0cc31120c82737fec77
    8559f654d01a54a8c3efe66d533d43f383531ebf8d81d9f9ab4769d91ca15df7
"""
_HOME = "https://files.pythonhosted.org/packages"
_WORDS = _FILES.split()
WHEELS = tuple(
    RemoteFile(f"wheels/{name}-py3-none-any.whl", f"{_HOME}/{place}/{name}-py3-none-any.whl", sha256)
    for name, place, sha256 in zip(*(_WORDS[i::3] for i in range(3)), strict=True)
)


def wheels_parts() -> Parts:
    """The Python files of `WHEELS` without their tests, split by content (`text.by_content`). Raises what
    `download.fetch` raises."""
    return _parts(tuple(map(fetch, WHEELS)))


@cache
def _parts(paths: tuple[Path, ...]) -> Parts:
    return by_content(source for path in paths for source in _sources(path))


def _sources(path: Path) -> Iterator[bytes]:
    with ZipFile(path) as archive:
        yield from (archive.read(name) for name in archive.namelist() if name.endswith(".py") and not _is_test(name))


def _is_test(name: str) -> bool:
    *folders, file = name.split("/")
    return file.startswith("test_") or any(folder in ("test", "tests") for folder in folders)
