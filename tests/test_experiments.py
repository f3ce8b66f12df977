"""Experiments: records whole or not at all, resumed runs, budgets, and the training step measured on a tiny case."""

import copy
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ortho import cost, experiments
from ortho.experiments import Experiment, RecordError, cli, measure, provenance, records, run, summary
from ortho.experiments import training_step as step

PACKAGE = Path(experiments.__file__).parent.parent
SLUG = provenance.device_slug("cpu")
TINY = {"N": 24, "d": 32, "H": 2}


class Clock:
    """A clock that moves only when it is told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def outcome(value=1.0):
    return {"seeds": {"inputs": 0}, "repetitions": {"arm": {"forward_s": [value, value]}}}


def fake(run=lambda _: outcome(), name="fake", works=(1, 1, 1), **kwargs):
    def cases(_):
        return [{"index": index, "work": work} for index, work in enumerate(works)]

    kwargs.setdefault("work", lambda case: case["work"])
    return Experiment(name, "a title", cases, run, ("experiments/records.py",), **kwargs)


def stored(results, name="fake"):
    return records.path(results, name, SLUG)


def indices(results):
    return [record["configuration"]["index"] for record in records.read(stored(results))]


def go(experiment, results, **kwargs):
    kwargs.setdefault("echo", lambda _: None)
    return run([experiment], "cpu", results, **kwargs)


# --- running


def test_runs_what_is_missing_and_nothing_twice(tmp_path):
    ran = []
    experiment = fake(lambda case: ran.append(case["index"]) or outcome())
    assert len(go(experiment, tmp_path).done) == 3
    assert go(experiment, tmp_path).done == []
    assert ran == [0, 1, 2]
    assert len(go(experiment, tmp_path, rerun=True).done) == 3
    assert indices(tmp_path) == [0, 1, 2]


def test_a_record_is_complete_on_its_own(tmp_path):
    go(fake(), tmp_path)
    record = json.loads(stored(tmp_path).read_text())[1]
    assert record["experiment"] == "fake"
    assert record["configuration"] == {"index": 1, "work": 1}
    assert record["repetitions"] == {"arm": {"forward_s": [1.0, 1.0]}}
    origin = record["provenance"]
    assert origin["torch"] == torch.__version__
    assert origin["threads"] == torch.get_num_threads()
    assert origin["date_utc"].endswith("+00:00")
    assert origin["digest"] == provenance.digest(["experiments/records.py"])
    assert (origin["commit"] is None) == (origin["clean"] is None)


def test_an_interrupted_run_resumes(tmp_path):
    def interrupted(case):
        if case["index"] == 1:
            raise KeyboardInterrupt
        return outcome()

    with pytest.raises(KeyboardInterrupt):
        go(fake(interrupted), tmp_path)
    assert indices(tmp_path) == [0]
    assert len(go(fake(), tmp_path).done) == 2


def test_a_killed_run_loses_the_case_in_flight_alone(tmp_path):
    script = """
import os, signal, sys
from pathlib import Path
from ortho.experiments import Experiment, run
def one(case):
    if case["index"] == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"seeds": {}, "repetitions": {"arm": {"forward_s": [1.0]}}}
cases = lambda device: [{"index": i, "work": 1} for i in range(3)]
run([Experiment("fake", "", cases, one, ("experiments/records.py",))], "cpu", Path(sys.argv[1]))
"""
    process = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        check=False,
    )
    assert process.returncode == -signal.SIGKILL
    assert indices(tmp_path) == [0, 1]
    assert len(go(fake(), tmp_path).done) == 1  # and the dead run's lock is gone


def test_a_kill_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    go(fake(works=(1,)), tmp_path)
    before = stored(tmp_path).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            go(fake(), tmp_path)
    assert stored(tmp_path).read_bytes() == before
    assert records.read_all(tmp_path, "fake") == json.loads(before)  # the half-made file is not taken for records
    assert len(go(fake(), tmp_path).done) == 2


def test_the_budget_is_kept_and_smaller_cases_still_run(tmp_path):
    clock = Clock()

    def one(case):
        clock.now += case["work"]
        return outcome()

    report = go(fake(one, works=(1, 2, 10, 1, 1)), tmp_path, budget=5.0, clock=clock)
    assert indices(tmp_path) == [0, 1, 3, 4]
    assert report.left == ["fake: index=2 work=10"]
    assert clock.now <= 5
    assert go(fake(one, works=(1, 2, 10, 1, 1)), tmp_path, clock=clock).done == ["fake: index=2 work=10"]


def test_nothing_starts_after_the_budget(tmp_path):
    clock = Clock()

    def slow(_):
        clock.now += 100
        return outcome()

    report = go(fake(slow), tmp_path, budget=10.0, clock=clock)
    assert len(report.done) == 1  # nothing was known of it beforehand
    assert len(report.left) == 2


def test_estimates_come_from_the_nearest_case_and_never_shrink():
    from ortho.experiments.runner import estimate

    measured = [(1.0, 2.0), (100.0, 50.0)]
    assert estimate(fake(), {"work": 2}, measured) == 4
    assert estimate(fake(), {"work": 80}, measured) == 50
    assert estimate(fake(), {"work": 1}, []) is None


def test_a_failing_case_is_reported_and_the_others_run(tmp_path, capsys):
    def broken(case):
        if case["index"] == 0:
            raise AssertionError("output: expected a relative error of at most 1e-05, got 0.3")
        return outcome() if case["index"] == 1 else outcome(math.nan)

    experiment = fake(broken)
    assert cli.main(["--results", str(tmp_path), "--device", "cpu"], {"fake": experiment}) == 1
    assert indices(tmp_path) == [1]
    said = capsys.readouterr()
    assert "index=0 work=1: AssertionError: output: expected a relative error" in said.err
    assert "index=2 work=1: ValueError: record.repetitions.arm.forward_s: expected a finite number" in said.err


# --- staleness


def test_stale_records_are_measured_again(tmp_path):
    go(fake(), tmp_path)
    found = records.read(stored(tmp_path))
    assert not any(map(experiments.is_stale, found))
    found[1]["provenance"]["digest"] = "0" * 64
    records.write(stored(tmp_path), found)
    assert list(map(experiments.is_stale, records.read(stored(tmp_path)))) == [False, True, False]
    assert go(fake(), tmp_path).done == ["fake: index=1 work=1"]
    assert not any(map(experiments.is_stale, records.read(stored(tmp_path))))
    assert indices(tmp_path) == [0, 1, 2]


def test_the_digest_is_of_names_and_normalised_bytes(tmp_path):
    (tmp_path / "a.py").write_bytes(b"x = 1\n")
    (tmp_path / "b.py").write_bytes(b"x = 1\r\n")
    one = provenance.digest(["a.py"], tmp_path)
    assert one != provenance.digest(["b.py"], tmp_path)
    (tmp_path / "a.py").write_bytes(b"x = 1\r\n")
    assert one == provenance.digest(["a.py"], tmp_path)
    (tmp_path / "a.py").write_bytes(b"x = 2\n")
    assert one != provenance.digest(["a.py"], tmp_path)
    with pytest.raises(ValueError, match=r"sources: .*'c\.py'"):
        provenance.digest(["c.py"], tmp_path)


def test_every_experiment_names_files_that_exist():
    for experiment in experiments.EXPERIMENTS.values():
        provenance.digest(experiment.sources)
        for device in cli.DEVICES:
            cases = experiment.cases(device)
            assert len({records.key(case) for case in cases}) == len(cases) > 0
            assert all(experiment.work(case) > 0 and case["device"] == device for case in cases)


# --- damaged files


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
    "other schema": (_put(99, "schema"), "schema: expected 1, got 99"),
    "no repetitions": (_put([], "repetitions", "arm", "forward_s"), "forward_s: expected a list of at least one"),
    "no arm": (_put({}, "repetitions"), "repetitions: expected at least one arm"),
    "text for a number": (_put(["1"], "repetitions", "arm", "forward_s"), "expected numbers, got '1'"),
    "no unit": (_put([1.0, 1.0], "repetitions", "arm", "time"), "expected a name that ends in its unit"),
    "ragged": (_put([1.0], "repetitions", "arm", "backward_s"), "expected as many repetitions"),
    "no digest": (lambda found: found[1]["provenance"].pop("digest"), "provenance.digest: missing"),
    "of another experiment": (_put("other", "experiment"), "experiment: expected 'fake'"),
    "of another device": (_put("abacus", "device"), "device: expected"),
    "twice the same case": (_put({"index": 0, "work": 1}, "configuration"), "the same case as record 0"),
    "nested configuration": (_put([1], "configuration", "index"), "configuration.index: expected a scalar"),
    "seed": (_put(0.5, "seeds", "inputs"), "seeds.inputs: expected an integer"),
}
RAW = {
    "half written": (lambda text: text[: len(text) // 2], "damaged"),
    "empty": (lambda _: "", "damaged"),
    "not a list": (lambda _: '{"a": 1}', "expected a list of records, got dict"),
    "not a record": (lambda _: "[1]", "expected a record"),
    "not a number": (lambda text: text.replace("[1.0,", "[NaN,", 1), "expected finite numbers, got NaN"),
    "overflow": (lambda text: text.replace("[1.0,", "[1e999,", 1), "expected a finite number, got inf"),
    "binary": (lambda _: "\udcff\udcfe", "utf-8"),
}


@pytest.mark.parametrize("kind", [*DAMAGES, *RAW])
def test_a_damaged_file_is_refused_and_left_as_it_is(tmp_path, kind, capsys):
    go(fake(), tmp_path)
    file = stored(tmp_path)
    if kind in DAMAGES:
        damage, message = DAMAGES[kind]
        found = json.loads(file.read_text())
        damage(found)
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


def test_an_ill_formed_record_is_not_written(tmp_path):
    go(fake(), tmp_path)
    before = stored(tmp_path).read_bytes()
    found = records.read(stored(tmp_path))
    found[0]["repetitions"]["arm"]["forward_s"][0] = math.inf
    with pytest.raises(RecordError, match="refused to write: record 0: .*finite"):
        records.write(stored(tmp_path), found)
    assert stored(tmp_path).read_bytes() == before


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


# --- the command


def test_unknown_names_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        experiments.main(["trainingstep"])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "expected one of 'training-step'" in said
    assert "did you mean 'training-step'?" in said
    with pytest.raises(ValueError, match="expected one of 'training-step', got 'nothing'"):
        experiments.load("nothing")
    assert experiments.load("training-step", tmp_path) == []


@pytest.mark.parametrize("budget", ["0", "-1", "nan", "inf", "soon"])
def test_a_bad_budget_is_refused(budget, capsys):
    with pytest.raises(SystemExit) as caught:
        experiments.main(["--budget", budget])
    assert caught.value.code == 2
    assert "expected a positive number of seconds" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_missing_cuda_device_is_refused(capsys):
    with pytest.raises(SystemExit):
        experiments.main(["--device", "cuda"])
    assert "--device: expected cpu, got cuda" in capsys.readouterr().err


def test_list_and_show_measure_nothing(tmp_path, capsys):
    known, arguments = {"fake": fake(works=(1, 1))}, ["--results", str(tmp_path), "--device", "cpu"]
    assert cli.main(["--show", "fake", *arguments], known) == 0
    assert "no records in" in capsys.readouterr().out
    go(fake(works=(1,)), tmp_path)
    assert cli.main(["--list", *arguments], known) == 0
    assert capsys.readouterr().out.split()[:4] == ["fake:", "a", "title", "fresh"]
    assert cli.main(["--show", *arguments], known) == 0
    assert "index=0 work=1" in capsys.readouterr().out
    assert indices(tmp_path) == [0]


def test_the_command_alone_starts_over_for_cpu_timing(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(os, "execve", lambda *arguments: started.append(arguments))
    monkeypatch.setattr(provenance, "in_cpu_environment", lambda: False)
    arguments = ["--results", str(tmp_path), "--device", "cpu"]
    assert cli.main(arguments, {"fake": fake(quiet=True)}) == 0
    assert started == []  # this process is not the command
    monkeypatch.setattr(cli, "_is_own_process", lambda: True)
    assert cli.main(arguments, {"fake": fake(quiet=True)}) == 0
    ((program, command, environment),) = started
    assert program == command[0] == sys.executable
    assert provenance.CPU_ENVIRONMENT.items() <= environment.items()


def test_runs_from_a_bare_source_tree_on_torch_and_numpy_alone(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "ortho", ignore=shutil.ignore_patterns("__pycache__"))
    script = """
import runpy, sys
for name in ("sympy", "scipy", "matplotlib", "yaml", "IPython", "jaxtyping"):
    sys.modules[name] = None
import ortho.experiments.training_step as step
step._cpu_cases = lambda: [step.case("layer", 24, 32, H=2)]
step.SECONDS["cpu"] = 0.1
sys.argv = ["ortho", "experiments", "training-step", "--budget", "60", "--device", "cpu"]
runpy.run_module("ortho", run_name="__main__", alter_sys=True)
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "ORTHO", "GIT"))}
    process = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment | provenance.CPU_ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert "FLOP bound" in process.stdout
    (record,) = records.read_all(tmp_path / "results", "training-step")
    assert record["provenance"]["environment"] == provenance.CPU_ENVIRONMENT
    assert record["provenance"]["commit"] is None


# --- the training step


@pytest.fixture(scope="module")
def measured():
    case = step.case("block", **TINY)
    return measure(experiments.EXPERIMENTS["training-step"], case, "cpu", seconds=0.05)


def test_every_variant_runs_once_a_repetition_in_a_drawn_order(measured):
    orders = measured["facts"]["order"]
    assert all(sorted(order) == sorted(step.VARIANTS) for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert step.REPETITIONS["cpu"][0] <= len(orders) <= step.REPETITIONS["cpu"][1]
    for variant in step.VARIANTS:
        quantities = measured["repetitions"][variant]
        assert set(quantities) == {f"{p}{c}_s" for p in ("forward", "backward", "optimiser") for c in ("", "_cpu")}
        assert {len(values) for values in quantities.values()} == {len(orders)}


def test_saved_bytes_are_those_of_the_closed_forms(measured):
    rows = experiments.memory([measured])
    assert [row["variant"] for row in rows] == list(step.VARIANTS)
    for row in rows:
        assert row["saved_bytes"] == row["declared_saved_bytes"] > 0
        assert row["device"] == SLUG


def test_speedups_are_medians_of_ratios_within_repetitions(measured):
    record = copy.deepcopy(measured)
    record["provenance"]["threads"] = 1
    for arm, forward in (("learned", [3.0, 8.0, 5.0]), ("frozen", [2.0, 4.0, 5.0]), ("stopped", [1.0, 1.0, 1.0])):
        phases = {"forward": forward, "backward": [0.0] * 3, "optimiser": [1.0] * 3}
        record["repetitions"][arm] = {f"{phase}_cpu_s": values for phase, values in phases.items()}
        record["repetitions"][arm] |= {f"{phase}_s": [9.0] * 3 for phase in phases}
    frozen, stopped = experiments.speedups([record])
    assert frozen["speedup"] == (1.25, 1.5, 1.75)
    assert frozen["speedup_with_optimiser"][1] == pytest.approx(4 / 3)
    assert stopped["speedup"] == (4.0, 5.0, 6.5)
    record["provenance"]["threads"] = 2  # the process's time then adds up threads
    assert experiments.speedups([record])[0]["speedup"] == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("scope", ["layer", "block"])
def test_the_bound_is_the_ratio_of_the_flops(scope):
    case = step.case(scope, 1024, 768)
    r, own = 1024 / 768, 48 if scope == "block" else 0
    bounds = [summary.declared(case, "learned").step / summary.declared(case, v).step for v in ("frozen", "stopped")]
    standard = 24 + own + 14 * r  # units of N d^2; the fused kernel computes the scores again
    assert bounds == pytest.approx([standard / (20 + own + 14 * r), standard / (16 + own + 14 * r)])


def test_the_view_prints_the_measured_speedup_beside_the_bound(measured, tmp_path, capsys):
    records.write(records.path(tmp_path, "training-step", SLUG), [measured])
    assert experiments.main(["--show", "training-step", "--results", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for row in experiments.speedups(experiments.load("training-step", tmp_path)):
        low, middle, high = row["speedup"]
        assert f"{middle:.3f} [{low:.3f}, {high:.3f}]" in text
        assert f"{row['bound']:.3f}" in text
    assert "earlier state of the code" not in text


@pytest.mark.parametrize("variant", step.VARIANTS)
@pytest.mark.parametrize("settings", [{}, {"causal": True}, {"dtype": "bfloat16"}, {"scope": "block"}], ids=str)
def test_correct_variants_pass_the_check(variant, settings):
    case = step.case(**{**TINY, **settings})
    step.check(case, variant, step.build(case, variant))


def test_the_check_finds_wrong_results(monkeypatch):
    case = step.case(**TINY)
    module = step.build(case, "frozen")
    fused = torch.nn.functional.scaled_dot_product_attention

    def wrong(q, k, v, **kwargs):
        return fused(q, k, v, **kwargs) * (1 + 1e-3)

    monkeypatch.setattr("ortho.attention.softmax.scaled_dot_product_attention", wrong)
    with pytest.raises(AssertionError, match="frozen, output: expected a relative error"):
        step.check(case, "frozen", module)


def test_the_check_finds_a_frozen_weight_that_is_trained():
    case = step.case(**TINY)
    with pytest.raises(AssertionError, match=rf"expected {2 * 32**2} trained weights, got {4 * 32**2}"):
        step.check(case, "frozen", step.build(case, "learned"))


def test_a_compiler_that_fails_or_is_off_is_recorded_as_such(monkeypatch):
    def compiler(module, **_):
        if module.projection.weight_q.requires_grad:
            raise RuntimeError("no kernel in /usr/lib/x/kernel.so\nand more")
        return lambda x, **kwargs: module(x, **kwargs) * (1 if module.projection.stop_gradient else 2)

    monkeypatch.setattr(torch, "compile", compiler)
    record = measure(experiments.EXPERIMENTS["training-step"], step.case(**TINY, compiled=True), "cpu", seconds=0.01)
    assert set(record["repetitions"]) == {*step.VARIANTS, "stopped-compiled"}
    assert record["failures"]["learned-compiled"] == "RuntimeError: no kernel in kernel.so"
    assert "frozen compiled, output: expected a relative error" in record["failures"]["frozen-compiled"]
    assert "learned-compiled failed" in summary.line(record)
    assert [row["arm"] for row in experiments.speedups([record])] == ["frozen", "stopped"]


def test_the_closed_forms_know_every_case():
    for device in cli.DEVICES:
        for case in step.cases(device):
            assert isinstance(summary.declared(case, "stopped"), cost.Cost)
            assert case["d"] % case["H"] == 0
