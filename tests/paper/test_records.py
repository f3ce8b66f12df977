"""Records of experiments: whole or refused, never overwritten when damaged, stale when the code has changed."""

import copy
import dataclasses
import errno
import fcntl
import json
import math
import os
import re
import shutil
import subprocess

import pytest
from experiment_fakes import SLUG, fake, go, indices, of_other_code, stored

from paper import experiments
from paper.experiments import RecordError, measure
from paper.experiments.engine import cli, provenance, records


def is_stale(record):
    return bool(provenance.changes(record, fake().run))


def test_stale_records_are_measured_again(tmp_path):
    go(fake(), tmp_path)
    found = records.read(stored(tmp_path))
    assert not any(map(is_stale, found))
    found[1] = of_other_code(found[1])
    records.write(stored(tmp_path), found)
    assert list(map(is_stale, records.read(stored(tmp_path)))) == [False, True, False]
    assert go(fake(), tmp_path).done == ["fake: index=1 work=1"]
    assert not any(map(is_stale, records.read(stored(tmp_path))))
    assert indices(tmp_path) == [0, 1, 2]


def test_what_was_read_before_is_checked_again_when_it_or_the_readers_needs_differ(tmp_path):
    go(fake(), tmp_path)
    file = stored(tmp_path)
    found = records.read(file)
    found.pop()
    assert len(records.read(file)) == 3, "what a reader does to records changes none of another reader's"
    with pytest.raises(RecordError, match=r"facts\.colour: missing"):
        records.read(file, records.Needs(facts={"colour": str}))
    moved = file.with_name("another.json")
    moved.write_bytes(file.read_bytes())
    with pytest.raises(RecordError, match="device: expected 'another'"):
        records.read(moved)
    file.write_text(file.read_text().replace("[1.0, ", "[1.1, ", 1))
    with pytest.raises(RecordError, match="record 0: its checksum is wrong"):
        records.read(file)


def test_every_version_of_the_code_is_checked_and_each_once(tmp_path, monkeypatch):
    go(fake(), tmp_path)
    found = records.read(stored(tmp_path))
    shared = found[0]["provenance"]["code"]
    assert all(record["provenance"]["code"] is shared for record in found)
    seen = []
    real = records._check_values
    monkeypatch.setattr(records, "_check_values", lambda value, where: seen.append(id(value)) or real(value, where))
    records.write(stored(tmp_path), found)
    assert seen.count(id(shared)) == 1
    before = stored(tmp_path).read_bytes()
    found[2]["provenance"]["code"] = shared | {"run": "not a digest"}
    with pytest.raises(RecordError, match=r"record 2: provenance\.code: expected definitions and their digests"):
        records.write(stored(tmp_path), found)
    found[0]["repetitions"]["arm"]["forward_s"][0] = math.inf
    with pytest.raises(RecordError, match="refused to write: record 0: .*finite"):
        records.write(stored(tmp_path), found)
    assert stored(tmp_path).read_bytes() == before


def _drop(name):
    return lambda found: found[1].pop(name)


def _put(value, *where):
    def change(found):
        inner = found[1]
        for name in where[:-1]:
            inner = inner[name]
        inner[where[-1]] = value

    return change


DAMAGES = {
    "missing key": (_drop("seeds"), "record 1: seeds: missing"),
    "wrong type": (_put("fast", "elapsed_s"), "elapsed_s: expected int or float, got str"),
    "no repetitions": (_put([], "repetitions", "arm", "forward_s"), "forward_s: expected a list of at least one"),
    "no arm": (_put({}, "repetitions"), "repetitions: expected at least one arm"),
    "text for a number": (_put(["1"], "repetitions", "arm", "forward_s"), "expected numbers, got '1'"),
    "no unit": (_put([1.0, 1.0], "repetitions", "arm", "time"), "expected a name that ends in its unit"),
    "ragged": (_put([1.0], "repetitions", "arm", "backward_s"), "expected as many repetitions"),
    "of another experiment": (_put("other", "experiment"), "experiment: expected 'fake'"),
    "of another device": (_put("abacus", "device"), "device: expected"),
    "twice the same case": (_put({"index": 0, "work": 1}, "configuration"), "the same case as record 0"),
    "nested configuration": (_put([1], "configuration", "index"), "configuration.index: expected a scalar"),
    "no code": (_put("0" * 16, "provenance", "code"), "provenance.code: expected a version of the code in this file"),
    "a boolean time": (_put(True, "elapsed_s"), "elapsed_s: expected int or float, got bool True"),
    "a negative time": (_put(-1.0, "elapsed_s"), "elapsed_s: expected seconds, got -1.0"),
    "a negative repetition": (_put([1.0, -1.0], "repetitions", "arm", "forward_s"), "at least 0, got -1.0"),
    "no date": (_put("yesterday", "provenance", "date_utc"), "date_utc: expected a date and time in UTC"),
    "local time": (_put("2026-01-01T00:00:00", "provenance", "date_utc"), "date_utc: expected a date and time in UTC"),
    "a lone surrogate": (_put("\ud800", "facts", "name"), r"record.facts.name: expected Unicode text, got '\ud800'"),
    "seed": (_put(0.5, "seeds", "inputs"), "seeds.inputs: expected int, got float 0.5"),
}
RAW = {
    "half written": (lambda text: text[: len(text) // 2], "damaged"),
    "empty": (lambda _: "", "damaged"),
    "not a mapping": (lambda _: "[1]", "expected a mapping of schema, code and records"),
    "other layout": (lambda text: text.replace('"schema": 2', '"schema": 1', 1), "schema: expected 2, got 1"),
    "changed": (lambda text: text.replace("[1.0,", "[1.3,", 1), "record 0: its checksum is wrong"),
    "twice the same key": (lambda text: text.replace('"seeds"', '"facts"', 1), "facts: expected once, got it twice"),
    "too deep": (lambda _: "[" * 100_000 + "]" * 100_000, "nested too deeply"),
    "other code": (lambda text: re.sub('"run[^"]*": "....', '"run": "0000', text, count=1), "expected definitions"),
    "not a number": (lambda text: text.replace("[1.0,", "[NaN,", 1), "expected finite numbers, got NaN"),
    "overflow": (lambda text: text.replace("[1.0,", "[1e999,", 1), "record 0: its checksum is wrong"),
    "binary": (lambda _: "\udcff\udcfe", "utf-8"),
}


@pytest.mark.parametrize("kind", [*DAMAGES, *RAW])
def test_a_damaged_file_is_refused_and_left_as_it_is(tmp_path, kind, capsys):
    go(fake(), tmp_path)
    file = stored(tmp_path)
    if kind in DAMAGES:
        damage, message = DAMAGES[kind]
        found = json.loads(file.read_text())
        damage(found["records"])
        for record in found["records"]:
            record["checksum"] = records._checksum({k: v for k, v in record.items() if k != "checksum"})
        text = json.dumps(found)
    else:
        damage, message = RAW[kind]
        text = damage(file.read_text())
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    before = file.read_bytes()
    with pytest.raises(RecordError) as caught:
        records.read(file)
    assert str(file) in str(caught.value)
    assert message in str(caught.value)
    assert "move it away" in str(caught.value)

    both = {"fake": fake(works=(1, 1, 1, 1)), "sound": fake(name="sound")}
    assert cli.main(["--results", str(tmp_path), "--device", "cpu"], both) == 1
    assert str(file) in capsys.readouterr().err
    assert file.read_bytes() == before
    assert len(records.read(stored(tmp_path, "sound"))) == 3


def _rename_the_first(arms):
    arms["another"] = arms.pop(next(iter(arms)))


UNREADABLE = {
    "no device": (lambda record: record["configuration"].pop("device"), "configuration.device: missing"),
    "a number for a word": (
        lambda record: record["configuration"].update(device=3),
        "configuration.device: expected str, got int",
    ),
    "another quantity": (lambda record: record["repetitions"].update(frozen={"x_s": [1.0]}), ".frozen."),
    "no standard": (lambda record: _rename_the_first(record["repetitions"]), ": missing"),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "no device") for name in experiments.EXPERIMENTS] + [("training-step", kind) for kind in UNREADABLE][1:],
)
def test_a_record_without_what_its_readers_need_is_refused(tmp_path, name, kind, capsys):
    """A record that has all of it is shown."""
    damage, message = UNREADABLE[kind]
    experiment = experiments.EXPERIMENTS[name]
    needs = experiment.needs
    times = {arm: dict.fromkeys(needs.quantities or ("run_s",), [1.0] * 31) for arm in needs.arms or ("sdpa",)}
    facts = {arm: {} for arm in times} | {"loss": [1.0], "validation": [], "parameters": 1, "train_s": 1.0}
    facts |= {"source_tokens": 2.0, "target_tokens": 2.0, "vocab_size": 2, "gradients": {}}
    facts |= {name: kind() for name, kind in needs.facts.items() if name not in facts}
    parts = {"seeds": {}, "repetitions": times, "facts": facts}
    case = (experiment.cases("cpu") or experiment.cases("cuda"))[0]
    record = measure(dataclasses.replace(experiment, run=lambda _: parts), case, "cpu")
    file = records.path(tmp_path, name, SLUG)
    show = ["--show", name, "--results", str(tmp_path)]
    records.write(file, [record])
    assert experiments.main(show) == 0
    damage(record)
    records.write(file, [record])
    assert experiments.main(show) == 1
    said = capsys.readouterr().err
    assert str(file) in said and "record 0: " in said and message in said
    with pytest.raises(RecordError, match=re.escape(message)):
        experiments.load(name, tmp_path)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (BlockingIOError(errno.EAGAIN, "busy"), "another run is measuring into this folder; wait for it to end"),
        (
            OSError(errno.ENOLCK, "No locks available"),
            r"cannot be locked \(No locks available\); expected a file system",
        ),
    ],
)
def test_a_folder_that_cannot_be_locked_is_named(tmp_path, monkeypatch, error, message):
    def flock(*_):
        raise error

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(RecordError, match=f"{re.escape(str(tmp_path))}: {message}"), records.lock(tmp_path):
        pass


def _commit(folder):
    identity = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-q", "-m", "a"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True, text=True)
    return head.stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="without git there is no commit to name")
def test_the_commit_and_whether_the_code_is_as_committed(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    code = tmp_path / "ortho" / "a.py"
    code.parent.mkdir()
    code.write_text("x = 1\n")
    monkeypatch.setattr(provenance.code, "ROOT", tmp_path)
    assert provenance._git_state() == (None, None)
    head = _commit(tmp_path)
    assert provenance._git_state() == (head, True)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "new.json").touch()  # what a run itself leaves does not change the code
    assert provenance._git_state() == (head, True)
    code.write_text("x = 2\n")
    assert provenance._git_state() == (head, False)

    def run():
        pass

    run.__module__, run.__qualname__ = "ortho.b", "run"
    (tmp_path / "ortho" / "b.py").write_text("def run():\n    return 1\n")
    head = _commit(tmp_path)
    monkeypatch.setattr(provenance, "git_state", provenance._git_state)
    for file, text, clean in (("a", "x = 3\n", True), ("b", "def run():\n    return 2\n", False)):
        (tmp_path / "ortho" / f"{file}.py").write_text(text)
        monkeypatch.setattr(provenance, "code_of", provenance.code.Tree(provenance.code.files(tmp_path)).reached)
        assert provenance._git_state() == (head, False)
        assert provenance.provenance("cpu", run)["clean"] is clean, "of what a run reaches"
    monkeypatch.setattr(provenance.code, "ROOT", tmp_path / "vendored")  # inside another project's repository
    provenance.code.ROOT.mkdir()
    assert provenance._git_state() == (None, None)


def test_two_runs_do_not_write_into_one_folder(tmp_path):
    with records.lock(tmp_path):
        with pytest.raises(RecordError, match="another run is measuring"):
            go(fake(), tmp_path)
        assert cli.main(["--results", str(tmp_path), "--device", "cpu"], {"fake": fake()}) == 1
    assert len(go(fake(), tmp_path).done) == 3


def test_records_by_device(tmp_path):
    record = measure(fake(), {"index": 0, "work": 1}, "cpu")
    later = copy.deepcopy(record)
    later["configuration"]["index"] = 1
    later["provenance"]["date_utc"] = "9999-01-01T00:00:00+00:00"
    other = {**copy.deepcopy(record), "device": "abacus"}
    for device, found in ((SLUG, [record, later]), ("abacus", [other])):
        records.write(records.path(tmp_path, "fake", device), found)
    found = records.read_all(tmp_path, "fake")
    assert {device: len(group) for device, group in experiments.by_device(found).items()} == {"abacus": 1, SLUG: 2}
    assert experiments.latest(found) == {"abacus": other, SLUG: later}


def test_claims_are_judged_by_a_cpu_where_there_is_one():
    records = [{"device": name} for name in ("nvidia-h200", "cpu-b", "a-gpu", "cpu-a")]
    assert experiments.judged_device(records) == "cpu-a"
    assert experiments.judged_device(records[::2]) == "a-gpu"
    assert experiments.judged_device([]) == ""


@pytest.mark.parametrize(("device", "found"), [("cpu", True), ("cpu-a", True), ("a-gpu", False), ("cpus", False)])
def test_a_cpu_is_told_by_its_name(device, found):
    assert experiments.on_cpu(device) == found
