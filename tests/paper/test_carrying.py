"""Records go over to a changed code only by proof: a sample that was run again gave the same bits."""

import subprocess

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


PACKAGE = """
class Fake:
    def run(self, case):
        return {{"seeds": {{"inputs": 0}}, "repetitions": {{"arm": {{"bits": [{bits}]}}}}, "facts": {{"train_s": {s}}}}}

EXPERIMENTS = {{"fake": Fake()}}
"""


def committed(folder, bits, s):
    """The commit of a repository whose experiment gives these bits, in so many seconds."""
    home = folder / "paper" / "experiments"
    home.mkdir(parents=True, exist_ok=True)
    (home.parent / "__init__.py").touch()
    (home / "__init__.py").write_text(PACKAGE.format(bits=bits, s=s))
    identity = ("-c", "user.name=x", "-c", "user.email=x@y")
    for command in (("init", "-q"), ("add", "-A"), (*identity, "commit", "-qm", "-", "--allow-empty")):
        subprocess.run(["git", "-C", str(folder), *command], check=True)
    said = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return said.stdout.strip()


@pytest.mark.parametrize(("before", "carried"), [(0.5, CASES), (0.25, 0)])
def test_records_of_another_processor_are_carried_over_where_both_codes_agree_here(
    tmp_path, monkeypatch, capsys, before, carried
):
    """What was stored need not be what is measured here, and stays; times may differ."""
    results, tree = tmp_path / "results", tmp_path / "tree"
    experiment = aged(results)
    commit = committed(tree, before, 1.0)
    committed(tree, 0.5, 2.0)
    monkeypatch.setattr(carrying.code, "ROOT", tree)
    found = records.read(stored(results))
    elsewhere = results / "fake" / "cpu-elsewhere.json"
    moved = [record | {"device": "cpu-elsewhere"} for record in found]
    for record in moved:
        record["provenance"] = record["provenance"] | {"commit": commit}
    records.write(elsewhere, moved)
    stored(results).unlink()
    arguments = ["--carry", "--beside", "--results", str(results), "--device", "cpu"]
    assert cli.main(arguments, {"fake": experiment}) == int(not carried)
    said = capsys.readouterr()
    now = records.read(elsewhere)
    assert sum("carried" in record for record in now) == carried
    assert [record["repetitions"] for record in now] == [record["repetitions"] for record in found]
    assert sum(not provenance.changes(record, experiment.run) for record in now) == carried
    if carried:
        assert f"{CASES} records carried over" in said.out
        assert carrying.carry_beside(experiment, results) == 0
    else:
        assert f"nothing of {commit[:7]} is carried over: {SAMPLE} of {SAMPLE} differ" in said.err


def test_what_is_refused_beside(tmp_path, monkeypatch):
    """A commit that is not there, and code that fails."""
    experiment = aged(tmp_path / "results")
    tree = tmp_path / "tree"
    commit = committed(tree, "no_number", 1.0)
    monkeypatch.setattr(carrying.code, "ROOT", tree)
    with pytest.raises(RecordError, match=f"{'0' * 40}: expected a commit of this repository"):
        carrying.carry_beside(experiment, tmp_path / "results", echo=str)
    found = records.read(stored(tmp_path / "results"))
    for record in found:
        record["provenance"]["commit"] = commit
    records.write(stored(tmp_path / "results"), found)
    with pytest.raises(RecordError, match="a case failed in .*tree: NameError: name 'no_number'"):
        carrying.carry_beside(experiment, tmp_path / "results", echo=str)
    with pytest.raises(SystemExit):
        cli.main(["--beside"], {"fake": experiment})
