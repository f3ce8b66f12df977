"""Records are carried over to changed code only on proof: a short case of each kind has the same bits by both codes."""

import subprocess

import pytest
from experiment_fakes import fake, go, of_other_code, stored

from paper.experiments import EXPERIMENTS, RecordError
from paper.experiments.engine import carrying, cli, provenance, records
from paper.experiments.engine.runner import state

CASES = 40


def aged(results, **kwargs):
    """An experiment with stored records of two kinds, all made by an earlier version of the code."""
    experiment = fake(works=(1,) * CASES, short=lambda case: {"index": case["index"] % 2, "work": 1}, **kwargs)
    go(experiment, results)
    records.write(stored(results), list(map(of_other_code, records.read(stored(results)))))
    return experiment


def test_times_may_differ():
    one = {"seeds": {"a": 1}, "repetitions": {"x": {"run_s": [1.0]}}, "facts": {"train_s": 2.0}, "failures": {}}
    later = one | {"repetitions": {"x": {"run_s": [3.0]}}, "facts": {"train_s": 1.0}}
    assert carrying.same(one, later)
    assert not carrying.same(one, later | {"seeds": {"a": 2}})
    assert not carrying.same(one, later | {"facts": {"train_s": 1.0, "loss": [0.1]}})


def test_a_kind_is_all_of_a_short_case_but_its_seed_and_its_rate():
    experiment = fake(short=lambda case: case | {"steps": min(case["steps"], 5)})
    cases = [{"arm": arm, "seed": seed, "rate": seed / 8, "steps": 9} for arm in "ab" for seed in (1, 2)]
    found = [{"configuration": case} for case in cases]
    short = [{**cases[0], "steps": 5}, {**cases[2], "steps": 5}]
    assert carrying.kinds(experiment, found) == [(short[0], found[:2]), (short[1], found[2:])]
    assert [case for case, _ in carrying.kinds(fake(), found)] == [cases[0], cases[2]]


@pytest.mark.parametrize("name", [name for name, one in EXPERIMENTS.items() if one.short is not None])
def test_short_cases_are_short(name):
    """They are also valid cases: they have the keys of a case, with values of the same types."""
    experiment = EXPERIMENTS[name]
    for device in ("cpu", "cuda"):
        for case in map(experiment.short, experiment.cases(device)):
            assert {key: type(value) for key, value in case.items()} == dict(experiment.needs.configuration)
            assert case.get("steps", 0) <= 50 and case.get("budget", 1) == 1 and case.get("tested", 0) <= 64


@pytest.mark.parametrize(("refused", "clean", "why"), [
    ({"quiet": True}, True, "fake: timings cannot be carried over"),
    ({}, False, "expected a tree without uncommitted changes"),
])  # fmt: skip
def test_what_is_refused(tmp_path, monkeypatch, refused, clean, why):
    monkeypatch.setattr(provenance, "git_state", lambda: ("0" * 40, clean))
    with pytest.raises(RecordError, match=why):
        carrying.carry(fake(**refused), tmp_path)


def test_a_record_of_an_uncommitted_code_is_missing(tmp_path):
    experiment = fake(works=(1,) * CASES)
    go(experiment, tmp_path)
    found = records.read(stored(tmp_path))
    assert list(map(len, state(experiment, "cpu", found))) == [CASES, 0, 0]
    for record in found:
        record["provenance"]["clean"] = False
    assert list(map(len, state(experiment, "cpu", found))) == [0, 0, CASES]
    assert carrying.carry(experiment, tmp_path) == 0


PACKAGE = """
class Fake:
    def run(self, case):
        return {{"seeds": {{"inputs": 0}}, "repetitions": {{"arm": {{"bits": [{bits}]}}}}, "facts": {{"train_s": {s}}}}}

EXPERIMENTS = {{"fake": Fake()}}
"""


def committed(folder, bits, s):
    """Commit an experiment that gives `bits` and reports `s` seconds; return the commit."""
    home = folder / "paper" / "experiments"
    home.mkdir(parents=True, exist_ok=True)
    (home.parent / "__init__.py").touch()
    (home / "__init__.py").write_text(PACKAGE.format(bits=bits, s=s))
    identity = ("-c", "user.name=x", "-c", "user.email=x@y")
    for command in (("init", "-q"), ("add", "-A"), (*identity, "commit", "-qm", "-", "--allow-empty")):
        subprocess.run(["git", "-C", str(folder), *command], check=True)
    said = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return said.stdout.strip()


@pytest.mark.parametrize(("before", "agreed"), [("0.5", 2), ("0.5 + case['index'] / 4", 1), ("0.25", 0)])
def test_records_of_another_processor_are_carried_over_by_kinds_on_which_both_codes_agree_here(
    tmp_path, monkeypatch, capsys, before, agreed
):
    """Stored results stay, even if they differ from what is measured here; times may differ."""
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
    arguments = ["--carry", "--results", str(results), "--device", "cpu"]
    carried = CASES * agreed // 2
    assert cli.main(arguments, {"fake": experiment}) == int(agreed < 2)
    said = capsys.readouterr()
    now = records.read(elsewhere)
    assert sum("carried" in record for record in now) == carried
    assert [record["repetitions"] for record in now] == [record["repetitions"] for record in found]
    assert sum(not provenance.changes(record, experiment.run) for record in now) == carried
    assert {(told["carried"]["reproduced"], told["carried"]["of"]) for told in now if "carried" in told} <= {
        (agreed, 2)
    }
    if agreed == 2:
        assert f"{CASES} records carried over" in said.out
        assert carrying.carry(experiment, results) == 0
    else:
        assert f"{carried} records carried over, but none of the {2 - agreed} kinds that differ" in said.err
        assert "index=1 work=1" in said.err


def test_commits_and_cases_that_fail(tmp_path, monkeypatch):
    """A commit that does not exist, and code that fails."""
    experiment = aged(tmp_path / "results")
    tree = tmp_path / "tree"
    commit = committed(tree, "no_number", 1.0)
    monkeypatch.setattr(carrying.code, "ROOT", tree)
    with pytest.raises(RecordError, match=f"{'0' * 40}: expected a commit of this repository"):
        carrying.carry(experiment, tmp_path / "results", echo=str)
    found = records.read(stored(tmp_path / "results"))
    for record in found:
        record["provenance"]["commit"] = commit
    records.write(stored(tmp_path / "results"), found)
    with pytest.raises(RecordError, match="a case failed in .*tree: NameError: name 'no_number'"):
        carrying.carry(experiment, tmp_path / "results", echo=str)
