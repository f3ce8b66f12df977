"""Evidence of S1 on FlashAttention: what is exact, what is kept, what the records say of time and memory."""

import pytest

from paper.claims import Verdict, judge
from paper.claims.evidence import hardware as s1

CONFIRMED, CONDITIONAL, UNTESTABLE = Verdict.CONFIRMED, Verdict.CONDITIONAL, Verdict.UNTESTABLE


def test_exactness():
    assert judge("S1.2.1a").verdict == CONFIRMED
    assert s1.largest("tiles") < s1.TOKENS**2 / 2 < s1.largest("reference")


def test_a_form_that_is_off_is_noticed(monkeypatch):
    right = s1.FORMS["tiles"]
    monkeypatch.setitem(s1.FORMS, "tiles", lambda *x, **options: right(*x, **options) * (1 + 1e-9))
    assert s1.exact_by_tiles().verdict == Verdict.REFUTED


def test_a_form_that_stores_all_scores_is_noticed(monkeypatch):
    monkeypatch.setattr(s1, "largest", lambda form: s1.TOKENS**2)
    assert s1.exact_by_tiles().verdict == Verdict.REFUTED


def row(N, ratio, memory, device="cuda-a", arm="materialised"):
    return {
        "N": N,
        "arm": arm,
        "device": device,
        "dtype": "float32",
        "ratio_alike": (ratio, ratio, ratio),
        "bytes_ratio": memory,
    }


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ([row(1024, 4.0, 3.3)], CONFIRMED),
        ([row(1024, 4.0, 3.3), row(4096, 9.0, 3.3)], CONDITIONAL),
        ([row(1024, 4.0, 3.3), row(4096, 4.0, 20.0)], CONDITIONAL),
        ([row(1024, 1.0, 20.0)], Verdict.REFUTED),
        ([row(1024, 1.0, 3.3, "cpu-a"), row(4096, 4.0, 3.3)], CONDITIONAL),
        ([row(1024, 1.0, 3.3, "cpu-a")], UNTESTABLE),
        ([row(1024, 4.0, 3.3), row(4096, 4.0, None)], CONFIRMED),
        ([], UNTESTABLE),
    ],
)
def test_by_the_clock(monkeypatch, found, verdict):
    monkeypatch.setattr(s1, "rows", lambda: found)
    assert s1.faster_and_leaner().verdict == verdict


def test_rows_are_of_the_materialised_form(monkeypatch):
    rows = [row(1024, 1.0, 2.0, arm=arm) for arm in ("flash", "materialised", "materialised causal")]
    monkeypatch.setattr(s1.experiments, "load", lambda name: [name])
    monkeypatch.setattr(s1.attention_rows, "beside_alike", lambda records, arms: rows if arms == "exact" else [])
    assert [found["arm"] for found in s1.rows()] == ["materialised", "materialised causal"]
