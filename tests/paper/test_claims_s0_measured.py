"""Evidence that reads records: which ones it takes, what it makes of them, and that it does without any."""

import pytest

from paper import experiments
from paper.claims import Verdict
from paper.claims.evidence import measured_step as measured
from paper.experiments.speed import analysis as summary
from paper.experiments.speed import training_step


def record(device="cpu-a", seconds=(2.0, 1.0), threads=1, **case):
    """A record of a device whose phases take `seconds` each, learned and frozen, by the process's own clock."""
    arms = {}
    for arm, value in zip(("learned", "frozen"), seconds, strict=True):
        arms[arm] = {f"{p}_cpu_s": [value] * 3 for p in measured.PHASES} | {
            f"{p}_s": [9.0] * 3 for p in measured.PHASES
        }
    origin = {"threads": threads, "device_name": "A", "torch": "2", "python": "3", "commit": None, "clean": None}
    origin |= {"date_utc": "2026-01-02T00:00:00+00:00"}
    configuration = training_step.case(**case)
    return {"device": device, "configuration": configuration, "repetitions": arms, "provenance": origin}


def stored(monkeypatch, **by_name):
    monkeypatch.setattr(experiments, "load", lambda name: by_name.get(name.replace("-", "_"), []))


def test_the_main_setting_is_one_case_a_length():
    records = [record(N=N) for N in (512, 128)]
    others = [{"N": 64, "d": 512}, {"causal": True}, {"input_grad": False}, {"compiled": True}, {"dtype": "bfloat16"}]
    records += [record(**{"N": 96, **other}) for other in others]
    records += [record("gpu", N=256, dtype=dtype) for dtype in ("bfloat16", "bfloat16", "float32")][1:]
    chosen = measured.main_setting(records, "layer")
    assert [(r["device"], r["configuration"]["N"], r["configuration"]["dtype"]) for r in chosen] == [
        ("cpu-a", 128, "float32"),
        ("cpu-a", 512, "float32"),
        ("gpu", 256, "bfloat16"),
    ]


def test_phases_are_compared_by_the_process_own_time():
    assert measured.phase_ratio(record(), "frozen", "backward") == (0.5, 0.5, 0.5)
    assert measured.phase_ratio(record(threads=2), "frozen", "backward") == (1, 1, 1)
    assert measured.seconds is summary.seconds  # the one rule for every page


def test_time_saved_beside_the_flops_saved():
    saved = measured.saved_time(record(N=768, d=768))
    assert saved["flops"] == 4 * 768**3  # two products of 2 N d^2
    assert saved["flops_share"] == pytest.approx(4 / 26)
    assert (saved["seconds"], saved["seconds_share"]) == (1.0, 0.5)


def test_provenance_of_records_without_a_commit():
    rows = dict(measured.provenance([record(), record()]))
    assert rows["commit"] == "`unknown`"
    assert (rows["measured on"], rows["cases"]) == ("2026-01-02", "2")


def test_verdicts_without_any_record(monkeypatch):
    stored(monkeypatch)
    assert measured.parts_of_a_step().verdict == Verdict.REFUTED
    assert measured.inference().verdict == Verdict.UNTESTABLE


def test_measured_parts_enter_the_verdict(monkeypatch):
    stored(monkeypatch, training_step=[record(N=4096), record(N=128)])
    ours = measured.parts_of_a_step().ours
    assert "backward, $N \\gg d$: holds at $N = 4,096$ on cpu-a, measured; not at" in ours
    assert "optimiser, measured: median on cpu-a: 0.5 (confirmed)" in ours
    assert "forward, measured: least on cpu-a: 0.5, most on cpu-a: 0.5: outside everywhere (refuted)" in ours
