"""Files are written whole, by any number of writers, and what dead writers leave is removed."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import torch

from paper import _files
from paper._files import remove, written_whole
from paper.training import checkpoints


def names(folder):
    return sorted(file.name for file in folder.iterdir())


def test_writers_do_not_tear_each_others_files(tmp_path):
    """The file is that of the writer that ends last; before that it is the other's, whole."""
    file = tmp_path / "new" / "a.json"
    with written_whole(file) as outer:
        outer.write(b"outer, ")
        with written_whole(file) as inner:
            inner.write(b"inner, whole")
        assert file.read_bytes() == b"inner, whole"
        outer.write(b"whole")
    assert file.read_bytes() == b"outer, whole"
    assert names(file.parent) == ["a.json"]


def test_a_checkpoint_has_any_number_of_writers(tmp_path):
    """One is still writing while another stores its whole checkpoint."""
    file = tmp_path / "run.pt"
    with written_whole(file) as other:
        other.write(b"half of anot")
        checkpoints.save(file, {"step": torch.tensor(7)}, "one")
        assert checkpoints.load(file, "one") == {"step": torch.tensor(7)}
        other.write(b"her")
    assert file.read_bytes() == b"half of another"


def test_an_error_leaves_the_old_file(tmp_path):
    file = tmp_path / "a"
    file.write_text("old")
    with suppress(KeyError), written_whole(file) as stream:
        stream.write(b"new")
        raise KeyError
    assert (file.read_text(), names(tmp_path)) == ("old", ["a"])


def killed_while_writing(file):
    code = (
        "import os, runpy, signal, sys; from pathlib import Path\n"
        "with runpy.run_path(sys.argv[1])['written_whole'](Path(sys.argv[2])) as stream:\n"
        "    stream.write(b'half'); stream.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", code, _files.__file__, str(file)], check=False)
    assert ended.returncode == -signal.SIGKILL


def test_what_a_dead_writer_left_is_removed_and_what_a_living_one_has_is_not(tmp_path):
    file = tmp_path / "a[1].json"  # a name that is also a pattern for glob
    killed_while_writing(file)
    (dead,) = names(tmp_path)
    with written_whole(file) as outer:
        (living,) = names(tmp_path)
        assert living != dead
        with written_whole(file) as inner:
            assert len(names(tmp_path)) == 2
            inner.write(b"inner")
        outer.write(b"outer")
    assert file.read_bytes() == b"outer"
    killed_while_writing(file)
    assert len(names(tmp_path)) == 2
    remove(file)
    assert names(tmp_path) == []


def test_a_file_that_is_removed_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    """Before the lock is taken, another writer may take the file for a dead writer's."""
    made = []

    def flock(stream, _):
        if not made:
            Path(stream.name).unlink()
        made.append(stream.name)

    monkeypatch.setattr(fcntl, "flock", flock)
    with written_whole(tmp_path / "a") as stream:
        stream.write(b"whole")
    assert (tmp_path / "a").read_bytes() == b"whole"
    assert len(set(made)) == 2


def test_without_locks_files_are_written_and_none_is_removed(tmp_path, monkeypatch):
    (tmp_path / "a.0.part").touch()

    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with written_whole(tmp_path / "a") as stream:
        stream.write(b"whole")
    assert (tmp_path / "a").read_bytes() == b"whole"
    assert names(tmp_path) == ["a", "a.0.part"]


def test_files_may_be_read_by_whom_the_user_lets(tmp_path):
    before = os.umask(0o027)
    try:
        with written_whole(tmp_path / "a"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640
