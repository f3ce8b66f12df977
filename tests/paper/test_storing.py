"""What is measured is stored, if need be at another try. If nothing can be, nothing is measured; one line says so."""

import dataclasses
import errno
import os
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from experiment_fakes import Clock, fake, go, indices, outcome, stored
from test_launchers import Later

from paper.experiments import run
from paper.experiments.engine import cli, records

ROOM = records.ROOM


@contextmanager
def file_size_limit(size):
    """No file of this process can grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def disk(tmp_path):
    """A folder that is a small file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=False).returncode:
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.fixture
def trouble(monkeypatch):
    """While this list holds an error number, no file of records can be replaced."""
    numbers, move = [], Path.replace

    def replace(self, target):
        if numbers and target.suffix == ".json":
            raise OSError(numbers[0], os.strerror(numbers[0]))
        return move(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    return numbers


def command(results, *chosen):
    return cli.main(["--results", str(results), "--device", "cpu"], {one.name: one for one in chosen})


def go_all(chosen, results):
    return run(chosen, "cpu", results, echo=lambda _: None)


def never(_):
    raise AssertionError("nothing is to be measured")


def only_line(capsys):
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said.rstrip("\n")


def test_nothing_is_measured_under_a_limit_of_the_size_of_files(tmp_path, capsys):
    with file_size_limit(4096):
        assert command(tmp_path, fake(never), fake(never, name="other")) == 1
    assert only_line(capsys) == f"error: {tmp_path}: expected to write {ROOM:,} bytes there (File too large)"
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_measured_where_nothing_can_be_written(disk, capsys):
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    assert command(disk, fake(never)) == 1
    assert only_line(capsys).endswith("bytes there (Read-only file system)")
    assert command(disk / "below", fake(never)) == 1
    assert only_line(capsys).endswith("expected a folder for the results (Read-only file system)")


def fill(disk):
    """Fill what is left of a disk."""
    with suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def test_a_disk_that_becomes_full_ends_the_run(disk, capsys):
    """One more case is measured, as space may be freed. If none is, nothing more is measured, nor said."""
    ran = []

    def filling(case):
        ran.append(case["index"])
        if len(ran) == 2:
            fill(disk)
        return outcome()

    results = disk / "results"
    assert command(results, fake(filling, works=[1] * 6), fake(never, name="other")) == 1
    assert ran == [0, 1, 2]
    expected = "error: fake: 2 measured and not stored (No space left on device), 3 not begun"
    assert only_line(capsys) == expected
    (disk / "filler").unlink()
    assert indices(results) == [0]
    assert [file.name for file in results.rglob("*") if file.is_file()] == [stored(results).name]


def test_a_disk_that_is_full_for_a_while_costs_nothing(disk, capsys):
    def filling(case):
        if case["index"] == 0:
            fill(disk)
        elif case["index"] == 1:
            (disk / "filler").unlink()
        return outcome()

    assert command(disk / "results", fake(filling)) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "not stored yet (No space left on device), kept for another try" in said.out.splitlines()[1]
    assert said.out.splitlines()[-1].startswith("3 measured, 0 left, 0 failed")
    assert indices(disk / "results") == [0, 1, 2]


@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO], ids=errno.errorcode.get)
def test_no_case_is_begun_that_could_not_be_stored(number, trouble, tmp_path):
    """The file of one experiment cannot be written; that of the next can."""
    ran = []

    def refused(case):
        ran.append(case["index"])
        trouble[:] = [number]
        return outcome()

    other = fake(lambda _: trouble.clear() or outcome(), name="other")
    report = go_all([fake(refused), other], tmp_path)
    assert ran == [0]
    assert report.errors == []
    assert report.done == ["fake: index=0 work=1", *(f"other: index={i} work=1" for i in range(3))]
    assert indices(tmp_path) == [0]


def test_a_file_that_may_not_grow_is_not_measured_for(tmp_path, capsys):
    """The file of the other experiment may grow."""
    go(fake(works=(1,)), tmp_path)
    (large,) = records.read(stored(tmp_path))
    large["facts"]["text"] = "x" * ROOM
    records.write(stored(tmp_path), [large])
    size = stored(tmp_path).stat().st_size
    with file_size_limit(size + ROOM - 1):
        assert command(tmp_path, fake(never, works=(1, 1)), fake(name="other")) == 1
    parent = stored(tmp_path).parent
    assert only_line(capsys) == f"error: {parent}: expected to write {size + ROOM:,} bytes there (File too large)"
    assert indices(tmp_path) == [0]
    assert len(records.read(stored(tmp_path, "other"))) == 3


def test_cases_that_run_when_trouble_comes_are_kept(trouble, tmp_path):
    """Two cases run at once. One cannot be stored; the other ends, and both are stored once that is possible."""

    def one(case):
        trouble[:] = [errno.EROFS] if case["index"] == 1 else []
        return outcome()

    class Healing(Later):
        def wait(self, jobs):
            if len(jobs) == 1:
                trouble.clear()
            return super().wait(jobs)

    report = go(fake(one, works=(1, 2)), tmp_path, launcher=Healing(2, Clock()))
    assert (len(report.done), report.errors) == (2, [])
    assert indices(tmp_path) == [0, 1]


def test_what_is_kept_is_stored_when_a_run_is_interrupted(trouble, tmp_path):
    def one(case):
        trouble[:] = [] if trouble else [errno.ENOSPC]
        if case["index"] == 1:
            raise KeyboardInterrupt
        return outcome()

    with pytest.raises(KeyboardInterrupt):
        go(fake(one), tmp_path)
    assert indices(tmp_path) == [0]


def test_a_kept_case_keeps_its_checkpoint(trouble, tmp_path):
    def one(_, checkpoint):
        checkpoint.touch()
        trouble[:] = [errno.EROFS]
        return outcome()

    report = go(fake(one, resumes=True), tmp_path)
    assert report.errors == ["fake: 1 measured and not stored (Read-only file system), 2 not begun"]
    assert len(list(tmp_path.glob(".checkpoints/fake/*"))) == 1


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_folder_that_vanishes_ends_the_run(how, tmp_path, capsys):
    results = tmp_path / "results"

    def vanishing(case):
        if case["index"] == 1:
            shutil.rmtree(results)
            if how == "replaced":
                results.mkdir()
        return outcome()

    assert command(results, fake(vanishing, works=[1] * 4), fake(never, name="other")) == 1
    said = capsys.readouterr()
    reason = f"{results}: the folder was removed or replaced during the run"
    assert said.err == f"error: fake: 2 measured and not stored ({reason}), 2 not begun\n"
    assert said.out.splitlines()[-1] == f"0 measured, 0 left, 1 failed; {results}"
    assert not results.exists() or list(results.iterdir()) == []


def test_a_folder_that_vanishes_between_two_experiments_ends_the_run(tmp_path):
    results = tmp_path / "results"
    removing = dataclasses.replace(fake(), cases=lambda _: shutil.rmtree(results, ignore_errors=True) or [])
    report = go_all([removing, fake(never)], results)
    assert report.errors == [f"{results}: the folder was removed or replaced during the run"]


@pytest.mark.parametrize("last", [False, True])
def test_a_file_that_vanishes_is_written_again(last, tmp_path):
    """This holds whatever comes after; nothing of this run is lost."""

    def vanishing(case):
        if case["index"] == (2 if last else 1):
            stored(tmp_path).unlink()
        return outcome()

    report = go(fake(vanishing), tmp_path)
    assert (len(report.done), report.errors) == (3, [])
    assert indices(tmp_path) == [0, 1, 2]


def test_a_file_that_is_damaged_meanwhile_is_left(tmp_path):
    def damaging(case):
        if case["index"] == 1:
            stored(tmp_path).write_text("mine")
        return outcome()

    report = go_all([fake(damaging), fake(name="other")], tmp_path)
    (error,) = report.errors
    assert error.startswith(f"fake: 2 measured and not stored ({stored(tmp_path)}: damaged")
    assert error.endswith(", 1 not begun")
    assert stored(tmp_path).read_text() == "mine"
    assert len(report.done) == 3


def test_a_full_disk_under_stdout_is_no_traceback():
    command = [sys.executable, "-m", "paper", "experiments", "--list", "--device", "cpu"]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "python -m paper: error: [Errno 28] No space left on device\n"
