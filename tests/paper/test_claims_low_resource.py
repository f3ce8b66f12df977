"""The evidence on little text: made-up records of every outcome, and the batch that memory allows."""

import pytest
from little_fakes import ALL, CPU, SEEDS, keep, text, text_runs

from ortho.cost.configurations import CONFIGURATIONS
from paper import experiments
from paper.claims import Verdict
from paper.claims.evidence import low_resource as s0
from paper.experiments.learning import rates

CONFIRMED, REFUTED = Verdict.CONFIRMED, Verdict.REFUTED
CONDITIONAL, UNTESTABLE = Verdict.CONDITIONAL, Verdict.UNTESTABLE


@pytest.fixture
def stored(monkeypatch):
    """What experiments have is given by name; nothing of the others."""
    return keep(monkeypatch, experiments)


# ---------------------------------------------------------------------------------------------------- the larger batch


def test_a_batch_by_hand():
    """A byte less than the model and n sequences take holds n - 1; what freezing spares is 2 d^2 a layer, of weights
    and biases."""
    for name, by in (("BERT-base", "FP32"), ("ViT", "mixed"), ("GPT-2 medium", "mixed")):
        at, size = CONFIGURATIONS[s0.SCENARIOS[name].published], s0.PRECISIONS[by]
        spared = at.L * 2 * (at.d**2 + at.d)
        assert s0.freed(name, by) == (size.gradient + size.optimiser) * spared
        enough = s0.held(name, by) + 7 * s0.one_sequence(name, by)
        assert [s0.batch(name, by, enough - less) for less in (0, 1)] == [7, 6]
        more = s0.more_sequences(name, by)
        assert s0.batch(name, by, enough, frozen=True) == 7 + int(more)
        assert s0.batch(name, by, enough - 1, frozen=True) in (6 + int(more), 7 + int(more))
        assert s0.batch(name, by, 1) == 0


def test_activations_are_those_of_one_sequence_more():
    """With frozen matrices as with learned ones."""
    for name in s0.SCENARIOS:
        at = CONFIGURATIONS[s0.SCENARIOS[name].published]
        five, six = (at.cost(B, projection="frozen").saved_bytes for B in (5, 6))
        assert s0.one_sequence(name, "FP32") == six - five
        half, whole = (s0.one_sequence(name, by) for by in ("mixed", "FP32"))
        assert whole / 2 < half < 0.51 * whole  # what norms keep beside stays in float32


def test_the_batch_holds_where_a_sequence_fits(monkeypatch):
    assert s0.larger_batch().verdict == CONDITIONAL
    assert s0.more_sequences("ViT", "FP32") > 1 > s0.more_sequences("BERT-base", "FP32")
    monkeypatch.setattr(s0, "one_sequence", lambda *_: 1)
    assert s0.larger_batch().verdict == CONFIRMED
    monkeypatch.setattr(s0, "one_sequence", lambda *_: 10**12)
    assert s0.larger_batch().verdict == REFUTED


# ------------------------------------------------------------------------------------------------------- overfitting


def test_what_is_read_of_a_run():
    record = text("learned", 3, 2.5, seen=1.5)
    assert s0.seen(record) == pytest.approx(1.7) and s0.unseen(record) == pytest.approx(2.7)
    assert s0.gap(record) == pytest.approx(1.0) and s0.lost(record) == pytest.approx(0.1 * s0.BITS)


def test_runs_by_bytes_and_dropout():
    records = [
        *text_runs("learned", 2.0, limit=0),
        *text_runs("learned", 2.5),
        *text_runs("learned", 2.4, dropout=0.1),
        *text_runs("learned", 2.2, limit=200_000),
        text("learned", rates.TUNING, 1.0),
        *text_runs("learned", 9.0, device="nvidia-h200"),
    ]
    found = s0.by_bytes(records, CPU)
    assert {size: list(arms) for size, arms in found.items()} == {
        50_000: ["learned", "learned, dropout 0.1"],
        200_000: ["learned"],
        ALL: ["learned"],
    }
    assert [s0.is_little(arms) for arms in found.values()] == [True, True, False]
    assert found[50_000]["learned"].mean("bits") == pytest.approx(2.7)
    told = found[50_000]["learned"].configuration
    assert s0.passes(found[50_000]["learned"], 50_000) == told["steps"] * 8 * 128 / 50_000


@pytest.mark.parametrize(
    ("frozen", "stopped", "verdict"),
    [(1.5, 1.4, CONFIRMED), (1.5, 0.9, CONDITIONAL), (0.9, 0.8, REFUTED), (1.0, 1.0, REFUTED)],
)
def test_the_gap_is_judged_on_the_least_text(stored, frozen, stopped, verdict):
    """All arms have the same loss on other text; what they have seen tells their gaps apart."""
    little = [
        *text_runs("learned", 2.5, seen=1.0),
        *text_runs("frozen", 2.5, seen=frozen),
        *text_runs("stopped", 2.5, seen=stopped),
    ]
    more = [*text_runs("learned", 2.5, seen=1.0, limit=200_000), *text_runs("frozen", 2.5, seen=9.0, limit=200_000)]
    stored(bytes_little=[*more, *little])
    found = s0.smaller_gap()
    assert found.verdict == verdict
    assert "frozen +0.000 (equivalent)" in found.ours and "gone through 12 times" in found.ours


def test_gaps_within_the_noise_do_not_decide(stored):
    little = text_runs("learned", 2.5)
    little += [text("frozen", seed, 2.5, seen=1.0 + (-1) ** seed * 0.3) for seed in SEEDS]
    stored(bytes_little=little)
    assert s0.smaller_gap().verdict == UNTESTABLE


def test_without_records_overfitting_is_not_judged(stored):
    assert s0.smaller_gap().verdict == UNTESTABLE and "no records" in s0.smaller_gap().ours
    stored(bytes=[*text_runs("learned", 2.0, limit=0), *text_runs("frozen", 2.0, limit=0)])
    assert s0.smaller_gap().verdict == UNTESTABLE, "all of the text is not little"
    stored(bytes_little=[text("learned", 1, 2.0), text("frozen", 1, 2.0), text("frozen", 2, 2.0)])
    assert s0.smaller_gap().verdict == UNTESTABLE, "one seed in common"


@pytest.mark.parametrize(
    ("frozen", "dropped", "words"),
    [
        (2.5, 2.5, "Neither freezing nor dropout is better"),
        (2.5, 2.2, "Dropout is better than learned heads alone, and freezing is not."),
        (2.2, 2.5, "Freezing is better than learned heads alone, and dropout is not."),
        (2.2, 2.1, "Both freezing and dropout are better"),
    ],
)
def test_freezing_beside_dropout(frozen, dropped, words):
    records = [*text_runs("learned", 2.5), *text_runs("frozen", frozen)]
    assert s0.beside_dropout(50_000, s0.by_bytes(records, CPU)[50_000]) == ""
    records += text_runs("learned", dropped, dropout=0.1)
    told = s0.beside_dropout(50_000, s0.by_bytes(records, CPU)[50_000])
    assert told.startswith(words)
    assert f"frozen {frozen - 2.5:+.3f}" in told and f"learned, dropout 0.1 {dropped - 2.5:+.3f}" in told
    outcome = "worse" if frozen > dropped else "better" if frozen < dropped else "equivalent"
    assert told.endswith(
        f"has {frozen - dropped:+.3f} bits a byte more than the best with dropout (learned, dropout 0.1): {outcome}."
    )


def test_text_at_equal_parameters_is_left_out(stored):
    stored(bytes=[text("learned", 1, 2.0, limit=0), text("learned", 1, 2.0, limit=0, matched="parameters")])
    assert [record["configuration"]["matched"] for record in s0.text_records()] == ["flop"]
