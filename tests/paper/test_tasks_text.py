"""Language modelling over bytes: windows, the parts that they are cut from, and the texts."""

import hashlib
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refusals
from seeded import SIGMAS, generator

from paper.tasks import novels, text
from paper.tasks.download import RemoteFile

# Random bytes: no window of 17 is in two parts, or twice in one.
PARTS = text.Parts(*map(np.random.default_rng(0).bytes, (5000, 1000, 1000)))
EXAMPLE = text.language_modelling("numbers", "counting", PARTS, 16)


def windows(batch):
    """The windows that a batch shows, as bytes."""
    return [bytes(row) for row in text.whole_windows(batch).tolist()]


def draws(task):
    return {"train": task.train, "validation": task.validation, **task.tests}


def test_each_answer_is_the_next_byte_of_its_part():
    for part, draw in draws(EXAMPLE).items():
        batch = draw(40, generator())
        assert batch.inputs[0].shape == batch.answers.shape == (40, 16) == (40, EXAMPLE.longest)
        assert batch.inputs[0].dtype == batch.answers.dtype == torch.long
        assert torch.equal(batch.inputs[0][:, 1:], batch.answers[:, :-1])
        assert all(window in getattr(PARTS, part) for window in windows(batch))


def test_training_reaches_every_place_and_the_seed_says_which():
    """Windows start at every place, the first and the last included, and equally often at each."""
    parts = PARTS._replace(train=bytes(range(21)))
    task = text.language_modelling("few", "few", parts, 16)
    count, places = 4000, 5  # 21 - 16 bytes
    starts = task.train(count, generator()).inputs[0][:, 0]
    share = 1 / places
    spread = (share * (1 - share) / count) ** 0.5
    assert ((torch.bincount(starts) / count - share).abs() <= SIGMAS * spread).all() and starts.max() == places - 1
    first, again, other = (windows(EXAMPLE.train(8, generator(seed))) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("count", [1, 2, 7, 61, 62])
def test_held_out_windows_are_the_same_whatever_the_generator_and_ask_for_no_byte_twice(count):
    """1,000 bytes have 62 windows of 16 answers: 62 * 16 + 1 <= 1,000 < 63 * 16 + 1."""
    for content, draw in ((PARTS.validation, EXAMPLE.validation), (PARTS.test, EXAMPLE.tests["test"])):
        drawn = windows(draw(count, generator(1)))
        assert drawn == windows(draw(count, generator(2))) and len(drawn) == count
        starts = [content.index(window) for window in drawn]
        assert starts[0] == 0 and (count == 1 or starts[-1] == 1000 - 17)
        distances = np.diff(starts)
        assert count == 1 or ((distances >= 16).all() and np.ptp(distances) <= 1)


def write(folder, contents):
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


SOURCES = {f"package{i % 7}/module{i}.py": f"x = {i}\n".encode() * (1 + i % 3) for i in range(400)}
# What Parts.facts gave for SOURCES when the split was fixed: a changed split makes stored results incomparable.
FIXED = {"train": "2874431fb95d98c5", "validation": "ed411f562d799dfe", "test": "940216b353a77508"}


def test_the_split_of_sources_is_fixed_by_their_content_alone(tmp_path):
    write(tmp_path / "one", SOURCES)
    write(tmp_path / "two", {f"other{i}.py": content for i, content in enumerate(reversed(SOURCES.values()))})
    parts = text.python_parts(tmp_path / "one")
    assert parts == text.python_parts(str(tmp_path / "two"))
    assert {name: fact["sha256"][:16] for name, fact in parts.facts().items()} == FIXED
    by_hash = sorted((hashlib.sha256(content).hexdigest(), content) for content in SOURCES.values())
    for part, first, last in zip(parts, (0, 0.9, 0.95), (0.9, 0.95, 1), strict=True):
        assert part == b"".join(content for digest, content in by_hash if first <= int(digest, 16) / 2**256 < last)
    assert [fact["bytes"] for fact in parts.facts().values()] == list(map(len, parts))
    for part, content in parts._asdict().items():
        assert parts.facts()[part]["sha256"] == hashlib.sha256(content).hexdigest()


def test_files_of_one_content_count_once_and_each_is_in_one_part(tmp_path):
    write(tmp_path / "all", SOURCES | {f"copy/{name}": content for name, content in SOURCES.items()})
    parts = text.python_parts(tmp_path / "all")
    lines = [set(part.decode().splitlines()) for part in parts]
    assert sum(map(len, lines)) == len(set.union(*lines)) == 400
    assert sum(map(len, parts)) == sum(map(len, SOURCES.values()))
    # If contents are random, each of the 400 files is in a part with probability 0.9, 0.05, 0.05.
    for found, share in zip(lines, (0.9, 0.05, 0.05), strict=True):
        assert abs(len(found) - 400 * share) <= SIGMAS * (400 * share * (1 - share)) ** 0.5


def test_a_change_of_one_file_moves_no_other(tmp_path):
    changed = SOURCES | {"package0/module0.py": b"y = 1\n"}
    write(tmp_path / "before", SOURCES)
    write(tmp_path / "after", changed)
    before, after = (text.python_parts(tmp_path / name) for name in ("before", "after"))
    for part in text.Parts._fields:
        old, new = (getattr(parts, part).decode().splitlines() for parts in (before, after))
        assert [line for line in old if line != "x = 0"] == [line for line in new if line != "y = 1"]


def test_what_is_no_source_of_the_library_is_left_out(tmp_path):
    kept = {f"kept{i}.py": f"kept{i}\n".encode() for i in range(100)} | {"bytes.py": b"\xff\xfe\x00"}
    left = [f"{folder}/module.py" for folder in (*text.LEFT_OUT, "config-3.11-linux")]
    left += ["email/test/module.py", "_sysconfigdata_linux.py", "data.txt", "module.pyc"]
    write(tmp_path / "lib", kept | {name: f"left {name}".encode() for name in left})
    (tmp_path / "outside.py").write_bytes(b"left outside")
    (tmp_path / "lib" / "link.py").symlink_to(tmp_path / "outside.py")
    (tmp_path / "lib" / "links").symlink_to(tmp_path)
    (tmp_path / "lib" / "broken.py").symlink_to(tmp_path / "nowhere")
    (tmp_path / "lib" / "folder.py").mkdir()
    os.mkfifo(tmp_path / "lib" / "pipe.py")  # reading it would wait for ever
    joined = b"".join(text.python_parts(tmp_path / "lib"))
    assert b"left" not in joined and b"\xff\xfe\x00" in joined
    assert len(joined) == sum(map(len, kept.values()))


def test_a_file_that_cannot_be_read_is_left_out(tmp_path, monkeypatch):
    write(tmp_path, SOURCES)
    read_bytes = Path.read_bytes

    def refusing(path):
        if path.name == "module7.py":
            raise PermissionError(path)
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refusing)
    lines = set(b"".join(text.python_parts(tmp_path)).decode().splitlines())
    assert lines == {f"x = {i}" for i in range(400) if i != 7}


def test_the_librarys_own_sources_are_there_and_a_limit_shortens_training_alone():
    parts = text.python_parts()
    assert text.python_parts() is parts  # read once
    assert len(parts.train) > 4_000_000
    assert parts.limited(50_000) == text.Parts(parts.train[:50_000], parts.validation, parts.test)
    assert parts.limited(None) == parts


def test_novels(tmp_path, monkeypatch):
    """Each novel has its own parts, without Gutenberg's text around the novel; lines end in one byte."""
    bodies = [b"".join(b"%d line %d\r\n" % (i, n) for n in range(500)) for i in range(2)]
    files = []
    for i, body in enumerate(bodies):
        whole = b"header\r\n*** START OF THIS PROJECT GUTENBERG EBOOK X ***\r\n\r\n" + body + b"***END OF THE PROJECT "
        path = tmp_path / "novels" / f"{i}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(whole + b"GUTENBERG EBOOK X***\r\nlicence\r\n")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        files.append(RemoteFile(f"novels/{i}.txt", "https://localhost", digest))
    monkeypatch.setattr(novels, "NOVELS", tuple(files))
    plain = [body.replace(b"\r\n", b"\n") for body in bodies]
    parts = novels.novels_parts(tmp_path)
    ends = [[len(one) * share // 100 for share in (90, 95)] for one in plain]
    assert parts.train == b"".join(one[:a] for one, (a, _) in zip(plain, ends, strict=True))
    assert parts.validation == b"".join(one[a:b] for one, (a, b) in zip(plain, ends, strict=True))
    assert parts.test == b"".join(one[b:] for one, (_, b) in zip(plain, ends, strict=True))
    (tmp_path / "novels" / "0.txt").write_bytes(b"no marks")
    monkeypatch.setattr(novels, "fetch", lambda file, folder: tmp_path / file.name)
    novels._parts.cache_clear()
    with pytest.raises(ValueError, match="expected a text between Project Gutenberg's marks"):
        novels.novels_parts(tmp_path)


BAD_TEXTS = [
    (partial(PARTS.limited, 10**9), r"limit: expected at most the \d+ bytes .* got 1000000000"),
    (partial(PARTS.limited, 0), "limit: expected an integer of at least 1, got 0"),
    (partial(PARTS.limited, 5e4), "limit: expected an integer of at least 1, got float 50000.0", TypeError),
    (partial(text.language_modelling, "", "", PARTS, 0), "length: expected an integer of at least 1"),
    (
        partial(text.language_modelling, "", "", PARTS._replace(test=b"few"), 8),
        "parts: expected more than length = 8 bytes to test, got 3",
    ),
    (partial(EXAMPLE.train, 0, generator()), "count: expected an integer of at least 1, got 0"),
    (partial(EXAMPLE.validation, 0, generator()), "count: expected an integer of at least 1, got 0"),
    (partial(EXAMPLE.tests["test"], 63, generator()), "count: expected at most 62 windows of 16 .* got 63"),
    (partial(text.python_parts, "/nowhere"), "folder: expected Python files, got '/nowhere'", FileNotFoundError),
]


@refusals(BAD_TEXTS)
def test_impossible_texts_are_refused(refused):
    refused()
