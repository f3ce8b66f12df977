"""Eight long novels in English, 18 MB: enough for runs that see no byte twice.

From Project Gutenberg, as its copies at github.com/GITenberg hold them; in the public domain in the USA. Gutenberg's
header and footer are cut off, and lines end in a line feed alone.
"""

import re
from functools import cache
from pathlib import Path

from paper.tasks.download import RemoteFile, fetch
from paper.tasks.text import TRAIN, VALIDATION, Parts

_BEGIN = re.compile(rb"^\*\*\* ?START OF TH(E|IS) PROJECT GUTENBERG.*$", re.MULTILINE)
_END = re.compile(rb"^\*\*\* ?END OF TH(E|IS) PROJECT GUTENBERG.*$", re.MULTILINE)


# For each novel its name, its place among GITenberg's repositories, and its sha256.
_FILES = """
anna-karenina Anna-Karenina_1399/cb3b12d5db852936e5a3abc05ef02939c9dcfd6e/1399-0.txt
    ed44f47853a75d27009a011ae6d243fa89b8e03806b1dfcc66c1a80658d6b0c4
bleak-house Bleak-House_1023/2fe2ed9f44a699aab35dfc84b69db6753a390c7f/1023.txt
    51c12bd20b0c8efbe08578b4966adb9ece1805f2ff8d96e6b02c4562a4797449
brothers-karamazov The-Brothers-Karamazov_28054/6a2b2e1e64fe3246e470b60459ba207e2872bd0e/28054-0.txt
    fcd9f41938533326d28af59b88dfcfe871096828c0249de133e25eace4dee61e
david-copperfield David-Copperfield_766/1cfa9f937da3d37507885e00150ece32fb475da9/766-0.txt
    405d8997c6c5047c6b3ceb5ad1388bd2d30aa78598952744e23a23cea7100e6b
don-quixote Don-Quixote_996/9d5a482d065513226b76275851de05ff41b7e2f4/996.txt
    69ef241e632ef4fba882bde06ad31ecb395d865b11028cc046c4d253f4cf118e
les-miserables Les-Mis-rables_135/913d26c4e33bc23cc91d79104ad0e939b4cd91ea/135-0.txt
    a878fd45f6d14808624d71154c1c1c75f64cb71ca5537f79bed1454255329004
middlemarch Middlemarch_145/39add53d31f10ba5cecdcbe8c095f90b25fd4b3f/145.txt
    f499b77eb0e4e34edc3bae6b968e3241c8327384631bd26e8eec76b726915a7d
war-and-peace War-and-Peace_2600/fa22ab90f00f627e83d14acabe32d91602d2365d/2600-0.txt
    6cbcc5ca5e590fb9ace161a5b93e4ecf280d7118104be0d63b686c004cfa70ae
"""
_WORDS = _FILES.split()
NOVELS = tuple(
    RemoteFile(f"novels/{name}.txt", f"https://raw.githubusercontent.com/GITenberg/{place}", sha256)
    for name, place, sha256 in zip(*(_WORDS[i::3] for i in range(3)), strict=True)
)


def novels_parts() -> Parts:
    """The first 90 % of each novel to train on, and two times 5 % after them. Raises what `download.fetch` raises, and
    ValueError for a file without Gutenberg's marks."""
    return _parts(tuple(map(fetch, NOVELS)))


@cache
def _parts(paths: tuple[Path, ...]) -> Parts:
    parts: tuple[list[bytes], ...] = ([], [], [])
    for path in paths:
        text = _body(path)
        cuts = [0, *(len(text) * share // 100 for share in (TRAIN, TRAIN + VALIDATION)), len(text)]
        for part, start, stop in zip(parts, cuts[:-1], cuts[1:], strict=True):
            part.append(text[start:stop])
    return Parts(*map(b"".join, parts))


def _body(path: Path) -> bytes:
    """A novel without the text that Gutenberg has put before and after it."""
    text = path.read_bytes().replace(b"\r\n", b"\n")
    begin, end = _BEGIN.search(text), _END.search(text)
    if begin is None or end is None:
        raise ValueError(f"{path}: expected a text between Project Gutenberg's marks of its start and end, got none")
    return text[begin.end() : end.start()].strip() + b"\n"
