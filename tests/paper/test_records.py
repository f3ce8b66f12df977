"""Records: whole or absent, refused where they are damaged or foreign, and never overwritten then."""

import json
import math
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
from experiment_fakes import SLUG, fake, go, outcome

from paper import _files, experiments
from paper._files import remove, written_whole
from paper.experiments import devices
from paper.experiments.engine import provenance, records
from paper.experiments.engine.runner import measure

CASE = {"index": 0, "work": 1}


@pytest.fixture(scope="module")
def made():
    return measure(fake(), CASE, "cpu")


def test_a_record_is_whole_on_its_own(tmp_path):
    go(fake(), tmp_path)
    file = tmp_path / "fake" / SLUG / f"index-0-work-1-{records.mark(CASE)}.json"
    record = json.loads(file.read_text())
    assert record == records.read(file) == records.read_all(tmp_path, "fake")[0]
    assert (record["experiment"], record["version"], record["device"]) == ("fake", 1, SLUG)
    assert record["configuration"] == CASE and record["repetitions"] == outcome()["repetitions"]
    assert {"commit", "clean", "torch", "threads", "device_name"} <= record["provenance"].keys()
    assert record["provenance"]["date_utc"].endswith("+00:00")


def changed(record, **fields):
    return json.dumps(record | fields)


DAMAGED = {
    "cut": (lambda one: json.dumps(one)[:-9], "Expecting|Unterminated"),
    "empty": (lambda one: "", "Expecting value"),
    "a list": (lambda one: "[{}]", "expected a mapping with the fields experiment"),
    "a field less": (lambda one: json.dumps({k: v for k, v in one.items() if k != "seeds"}), "expected a mapping"),
    "another type": (lambda one: changed(one, version=True), "version: expected another type, got bool True"),
    "not finite": (lambda one: changed(one, repetitions={"a": {"b_s": [math.nan]}}), "a.b_s: expected finite"),
    "no variant": (lambda one: changed(one, repetitions={}), "repetitions: expected at least one variant"),
    "another case": (lambda one: changed(one, configuration={"index": 9}), f"expected the record of fake/{SLUG}/"),
    "of a device": (lambda one: changed(one, device="cpu-abacus"), "got that of fake/cpu-abacus/"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("kind", DAMAGED)
def test_what_is_damaged_or_foreign_is_named_and_left_as_it_is(kind, tmp_path, made):
    file = records.path(tmp_path, "fake", SLUG, CASE)
    file.parent.mkdir(parents=True)
    text, message = DAMAGED[kind]
    file.write_text(text(made))
    before = file.read_bytes()
    with pytest.raises(records.RecordError, match=rf"{file}: damaged or not a record: .*({message})"):
        records.read_all(tmp_path, "fake")
    report = go(fake(), tmp_path)
    assert report.done == [] and str(file) in report.errors[0]
    assert file.read_bytes() == before


def test_a_kill_while_writing_leaves_the_old_file(tmp_path):
    file = tmp_path / "a.json"
    file.write_text("old")
    code = (
        "import os, runpy, signal, sys; from pathlib import Path\n"
        "with runpy.run_path(sys.argv[1])['written_whole'](Path(sys.argv[2])) as stream:\n"
        "    stream.write(b'half'); stream.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", code, _files.__file__, str(file)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert file.read_text() == "old" and len(list(tmp_path.iterdir())) == 2
    with written_whole(file) as outer:
        with written_whole(file) as inner:
            inner.write(b"inner")
        assert file.read_bytes() == b"inner"
        outer.write(b"outer")
    assert file.read_bytes() == b"outer"
    with suppress(KeyError), written_whole(file) as stream:
        stream.write(b"new")
        raise KeyError
    assert file.read_bytes() == b"outer"
    remove(file)
    assert list(tmp_path.iterdir()) == []


def test_records_by_device(made):
    """CPUs are put together, the first by name counts; claims are judged by CPUs where there are any."""
    gpu, a, b = (made | {"device": name} for name in ("nvidia-h200", "cpu-b", "cpu-a"))
    assert list(devices.by_device([gpu, a])) == ["nvidia-h200", "cpu-b"]
    assert devices.pooled([gpu, a, b]) == {"cpu": [b], "nvidia-h200": [gpu]}
    assert devices.of_judged_devices([gpu, a, b]) == [b] and devices.of_judged_devices([gpu]) == [gpu]
    assert devices.judged_device([gpu, a, b]) == "cpu-a" and devices.judged_device([]) == ""
    assert [devices.shown_name(name) for name in ("nvidia-h200", "cpu-b")] == ["H200 (GPU)", "cpu-b"]


def test_differences_are_shares_of_the_larger_number_and_times_do_not_count(made):
    other = made | {"repetitions": {"arm": {"forward_s": [9.0]}}, "facts": {"loss": [1.0, 2.0], "train_s": 1.0}}
    assert records.differences(other, other | {"facts": {"loss": [1.0, 2.5], "train_s": 2.0}}) == {"facts.loss": 0.2}
    assert records.differences(other, made) == {"facts": math.inf}


def test_the_order_is_that_of_the_cases_and_every_stored_record_is_sound(tmp_path, made):
    cases = [{"index": index, "work": 1} for index in (2, 0, 1)]
    for case in cases:
        records.write(records.path(tmp_path, "fake", SLUG, case), made | {"configuration": case})
    assert [one["configuration"] for one in records.read_all(tmp_path, "fake", cases)] == cases
    every = [one for name in experiments.EXPERIMENTS for one in experiments.load(name)]
    assert len(every) == len(list(provenance.RESULTS.glob("*/*/*.json")))
