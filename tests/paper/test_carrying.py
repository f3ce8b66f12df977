"""Records go over to a changed code only by proof: a sample that was run again gave the same bits."""

import pytest
from experiment_fakes import fake, go, of_other_code, outcome, stored

from paper.experiments import RecordError
from paper.experiments.engine import carrying, cli, provenance, records

CASES = 40
SAMPLE = 3  # the least; a twentieth of 40 cases would be 2


def aged(results, **kwargs):
    """An experiment whose stored records are all of an earlier code."""
    experiment = fake(works=(1,) * CASES, **kwargs)
    go(experiment, results)
    records.write(stored(results), list(map(of_other_code, records.read(stored(results)))))
    return experiment


def test_the_rest_is_carried_over_where_the_sample_agrees(tmp_path):
    experiment = aged(tmp_path)
    assert carrying.carry(experiment, "cpu", tmp_path, echo=str) == CASES - SAMPLE
    found = records.read(stored(tmp_path))
    assert not any(provenance.changes(record, experiment.run) for record in found)
    carried = [record["carried"] for record in found if "carried" in record]
    assert len(carried) == CASES - SAMPLE
    assert all((one["reproduced"], one["of"]) == (SAMPLE, CASES) for one in carried)
    assert go(experiment, tmp_path).done == [], "nothing is stale"
    assert carrying.carry(experiment, "cpu", tmp_path, echo=str) == 0
    assert not list(tmp_path.glob(".carrying/*"))


def test_nothing_is_carried_over_where_one_differs(tmp_path, capsys):
    experiment = aged(tmp_path)
    found = records.read(stored(tmp_path))
    chosen = carrying.draw(experiment, experiment.cases("cpu"), 0.05)[-1]
    for record in found:
        if record["configuration"] == chosen:
            record["facts"] = {"loss": [0.5]}
    records.write(stored(tmp_path), found)
    assert cli.main(["--carry", "--results", str(tmp_path), "--device", "cpu"], {"fake": experiment}) == 1
    assert f"1 of {SAMPLE} differ: index={chosen['index']} work=1" in capsys.readouterr().err
    found = records.read(stored(tmp_path))
    assert not any("carried" in record for record in found)
    assert sum(not provenance.changes(record, experiment.run) for record in found) == SAMPLE, "these are measured anew"


def test_times_may_differ():
    one = {"seeds": {"a": 1}, "repetitions": {"x": {"run_s": [1.0]}}, "facts": {"train_s": 2.0}, "failures": {}}
    later = one | {"repetitions": {"x": {"run_s": [3.0]}}, "facts": {"train_s": 1.0}}
    assert carrying.same(one, later)
    assert not carrying.same(one, later | {"seeds": {"a": 2}})
    assert not carrying.same(one, later | {"facts": {"train_s": 1.0, "loss": [0.1]}})


def test_a_stopped_run_goes_on_with_the_same_sample(tmp_path):
    ran, stop = [], []

    def one(case):
        if stop and len(ran) == CASES + 2:
            stop.clear()
            raise KeyboardInterrupt
        ran.append(case["index"])
        return outcome()

    experiment = aged(tmp_path, run=one)
    stop.append(True)
    with pytest.raises(KeyboardInterrupt):
        carrying.carry(experiment, "cpu", tmp_path, echo=str)
    assert carrying.carry(experiment, "cpu", tmp_path, echo=str) == CASES - SAMPLE
    assert len(ran) == CASES + SAMPLE == len(ran[:CASES]) + len(set(ran[CASES:]))


def test_what_is_refused(tmp_path, monkeypatch):
    with pytest.raises(RecordError, match="fake: timings cannot be carried over"):
        carrying.carry(fake(quiet=True), "cpu", tmp_path)
    experiment = aged(tmp_path)
    monkeypatch.setattr(provenance, "git_state", lambda: ("0" * 40, False))
    with pytest.raises(RecordError, match="expected a tree without uncommitted changes"):
        carrying.carry(experiment, "cpu", tmp_path)


def test_a_record_of_an_uncommitted_tree_is_missing_until_it_is_carried_over(tmp_path):
    experiment = fake(works=(1,) * CASES)
    go(experiment, tmp_path)
    found = records.read(stored(tmp_path))
    for record in found:
        record["provenance"]["clean"] = False
    records.write(stored(tmp_path), found)
    assert not any(map(records.is_clean, found))
    assert carrying.carry(experiment, "cpu", tmp_path, echo=str) == CASES - SAMPLE
    assert all(map(records.is_clean, records.read(stored(tmp_path))))
