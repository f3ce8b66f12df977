"""The evidence on few pairs, on frozen heads with little data, and on the table of mechanisms."""

import pytest
from little_fakes import keep, made_up, pair_runs, real, text_runs

from paper import experiments
from paper.claims import Verdict, judge
from paper.claims.evidence import low_resource as s2
from paper.claims.evidence import mechanism_table as comparison
from paper.experiments.learning import translating

CONFIRMED, REFUTED = Verdict.CONFIRMED, Verdict.REFUTED
CONDITIONAL, UNTESTABLE = Verdict.CONDITIONAL, Verdict.UNTESTABLE


@pytest.fixture
def stored(monkeypatch):
    """What experiments have is given by name; nothing of the others."""
    return keep(monkeypatch, experiments)


# ------------------------------------------------------------------------------------------------------ fixed patterns


def test_the_printed_table_waits_for_its_size(stored):
    assert s2.translation_table().verdict == UNTESTABLE
    stored(translation=real({s2.LEARNED: 0.3, s2.FIXED: 0.32, s2.SINGLE: 0.25}, 10_000))
    found = s2.translation_table()
    assert found.verdict == UNTESTABLE
    assert "8 learned 35.0, 7 fixed + 1 learned 37.0, 1 learned 30.0" in found.ours
    assert "7 fixed + 1 learned (German to English, 10,000 pairs, BLEU) +2.0 (better)" in found.ours
    assert "1 learned (German to English, 10,000 pairs, BLEU) -5.0 (worse)" in found.ours and "has -1.4" in found.ours


@pytest.mark.parametrize(
    ("fixed", "single", "gain", "beats"),
    [
        (0.33, 0.25, CONFIRMED, CONFIRMED),
        (0.30, 0.25, REFUTED, CONFIRMED),
        (0.30, 0.30, REFUTED, REFUTED),
        (0.27, 0.35, REFUTED, REFUTED),
    ],
)
def test_fixed_patterns_are_judged_against_both(stored, fixed, single, gain, beats):
    stored(translation=real({s2.LEARNED: 0.3, s2.FIXED: fixed, s2.SINGLE: single}, 10_000))
    assert s2.fixed_gain().verdict == gain and s2.fixed_beats_single().verdict == beats
    whole = s2.from_few_pairs()
    assert whole.verdict == (CONFIRMED if gain == beats == CONFIRMED else REFUTED)
    assert "from 10,000 pairs" in whole.ours and "Not of the source's range" not in whole.ours


def test_a_gain_at_some_numbers_of_pairs_is_conditional_and_says_where(stored, monkeypatch):
    monkeypatch.setattr(s2, "RANGE", (1_000, 165_000))
    scores = {s2.LEARNED: 0.3, s2.FIXED: 0.37, s2.SINGLE: 0.2}
    stored(translation=[*real(scores), *real({**scores, s2.FIXED: 0.3}, 10_000)])
    found = s2.fixed_gain()
    assert found.verdict == CONDITIONAL
    assert found.ours.startswith("holds at 7 fixed + 1 learned (German to English, 1,000 pairs, BLEU); not shown")
    assert "10,000 pairs, BLEU" in found.ours.partition("not shown at")[2]
    assert s2.beside_most() == "above that from 1,000 pairs, below that from 10,000 pairs"
    assert "from 1,000 and 10,000 pairs" in s2.from_few_pairs().ours


def test_what_the_source_does_not_speak_of_is_told_and_not_judged(stored):
    """Too few pairs, and a made-up language, whatever they say; alone they decide nothing."""
    scores, other = {s2.LEARNED: 0.3, s2.FIXED: 0.32, s2.SINGLE: 0.25}, {s2.LEARNED: 0.3, s2.FIXED: 0.2, s2.SINGLE: 0.3}
    rest = {"transduction": made_up(other)}
    stored(translation=[*real(scores, 10_000), *real(other)], **rest)
    found = s2.from_few_pairs()
    assert found.verdict == CONFIRMED
    told = found.ours.partition("Not of the source's range, or no translation: ")[2]
    assert told.count("(worse)") == 4 and "10,000" not in told
    assert told.startswith("against 8 learned, German to English, 1,000 pairs, BLEU: -10")
    stored(translation=real(other), **rest)
    found = s2.from_few_pairs()
    assert found.verdict == UNTESTABLE and found.ours.count("(worse)") == 4 and "Of small models" not in found.ours


def test_a_gain_is_set_beside_the_printed_most(stored):
    base, fixed = real({s2.LEARNED: 0.3}, 10_000), real({s2.FIXED: 0.35}, 10_000)
    stored(translation=[*base, *fixed])
    assert s2.beside_most() == "above that from 10,000 pairs" and s2.beside_most() in s2.fixed_gain().ours
    for seed, one in enumerate(fixed):  # gains of 1 to 5
        (score,) = base[seed]["repetitions"]["test"]["bleu_fraction"]
        one["repetitions"]["test"]["bleu_fraction"] = [score + (seed + 1) / 100]
    stored(translation=[*base, *fixed])
    assert s2.beside_most() == "around that from 10,000 pairs"
    assert "3 BLEU" not in s2.fixed_gain().source, "how much is not in what is judged"


def test_pairs_drawn_anew_are_not_few(stored):
    scores = {s2.LEARNED: 0.3, s2.FIXED: 0.4}
    stored(translation=real(scores, 10_000), transduction=made_up({**scores, s2.FIXED: 0.1}, 0))
    assert s2.from_few_pairs().ours.count("made-up") == 0 and s2.fixed_gain().verdict == CONFIRMED
    assert list(s2.few_pairs("transduction")) == [] and list(s2.by_pairs("transduction")) == [0]


def test_records_of_a_gpu_are_read_where_there_are_no_others(stored):
    """With the numbers of pairs and the arms that there are on such a device; a CPU's go before them."""
    large = [
        {
            **one,
            "configuration": translating.case(
                "translation", arm, one["configuration"]["seed"], 0.01, pairs=29_000, device="cuda"
            ),
        }
        for arm, score in ((s2.LEARNED, 0.3), ("8 stopped", 0.4))
        for one in pair_runs("translation", arm, 1000, score, device="nvidia-h200")
    ]
    stored(translation=large)
    assert list(s2.few_pairs("translation")) == [29_000]
    assert "holds" not in s2.advantage().ours and s2.advantage().verdict == CONFIRMED
    stored(translation=[*large, *real({s2.LEARNED: 0.3})])
    assert list(s2.few_pairs("translation")) == [1000]


def test_a_made_up_language_alone_is_no_translation(stored):
    stored(transduction=made_up({s2.LEARNED: 0.3, s2.FIXED: 0.4, s2.SINGLE: 0.2}))
    assert s2.from_few_pairs().verdict == UNTESTABLE


# ---------------------------------------------------------------------------------------------------------- the causes


def test_without_a_gain_there_is_nothing_to_explain(stored):
    assert s2.causes().verdict == UNTESTABLE and "no records of" in s2.causes().ours
    stored(translation=real({s2.LEARNED: 0.3, s2.FIXED: 0.3, s2.SINGLE: 0.2}))
    found = s2.causes()
    assert found.verdict == UNTESTABLE and "have not a gain" in found.ours
    assert "8 learned: 9 trained, gap 0.50 nats, scores within 10.0 BLEU" in found.ours


@pytest.mark.parametrize(
    ("gap", "verdict", "words"),
    [
        (0.2, UNTESTABLE, "1,000 pairs: 0.3 (confirmed)"),  # neither the number nor steadiness is told apart
        (0.9, REFUTED, "no gain anywhere (refuted)"),
    ],
)
def test_a_gain_is_asked_for_its_causes(stored, gap, verdict, words):
    """Unseen pairs take less more than seen ones, or not; other arms with fewer parameters are named."""
    others = {s2.LEARNED: 0.3, s2.SINGLE: 0.2, "8 frozen": 0.35}
    stored(translation=[*real(others), *real({s2.FIXED: 0.35}, gap=gap)])
    found = s2.causes()
    assert found.verdict == verdict and words in found.ours
    assert "1 learned (German to English, 1,000 pairs, BLEU) worse; 8 frozen" in found.ours
    assert "the source has no measure of steadiness" in found.ours


# -------------------------------------------------------------------------------------------------------- frozen heads


def test_the_advantage_is_looked_for_in_all_little_data(stored):
    assert s2.advantage().verdict == UNTESTABLE
    little = [*text_runs("learned", 2.5), *text_runs("frozen", 2.5), *text_runs("stopped", 2.7)]
    stored(bytes_little=little)
    assert s2.advantage().verdict == REFUTED
    stored(bytes_little=[*little, *text_runs("positional", 1.0)])
    assert s2.advantage().verdict == REFUTED, "positional heads are not frozen ones"
    better = [*text_runs("learned", 2.5, limit=200_000), *text_runs("frozen", 2.2, limit=200_000)]
    stored(bytes_little=[*little, *better])
    found = s2.advantage()
    assert found.verdict == CONDITIONAL and "holds at frozen (200,000 bytes, bits)" in found.ours
    assert "3 comparisons" in found.ours
    stored(bytes_little=little, translation=real({s2.LEARNED: 0.3, "8 frozen": 0.4}))
    assert "holds at 8 frozen (German to English, 1,000 pairs, BLEU)" in s2.advantage().ours
    stored(bytes_little=better, transduction=made_up({s2.LEARNED: 0.3, "8 frozen": 0.4}))
    assert s2.advantage().verdict == CONFIRMED


def test_all_of_the_text_is_no_little_text(stored):
    stored(bytes=[*text_runs("learned", 2.5, limit=0), *text_runs("frozen", 1.5, limit=0)])
    assert s2.advantage().verdict == UNTESTABLE


def test_gains_of_text_are_what_is_saved(stored):
    stored(bytes_little=[*text_runs("learned", 2.5), *text_runs("frozen", 2.2)])
    ((label, (ends, outcome)),) = s2.of_text().items()
    assert (label, outcome) == ("frozen (50,000 bytes, bits)", "better") and ends == pytest.approx((0.3, 0.3))


# ----------------------------------------------------------------------------------------------------------- the table


def test_the_table_is_refuted_by_what_linear_heads_cannot_see(stored):
    found = comparison.mechanisms()
    assert found.verdict == REFUTED
    parts = comparison.expressive()
    assert {name: part.verdict for name, part in parts.items()} == {
        "standard, full": CONFIRMED,
        "fixed, limited": CONFIRMED,
        "linear, full": REFUTED,
        "ORA, full": CONDITIONAL,
        "Performer, nearly full": UNTESTABLE,
    }


def test_more_features_would_be_enough(monkeypatch):
    monkeypatch.setattr(comparison.lookup, "low_rank_error", lambda entries, width: 0.0)
    assert comparison.expressive()["linear, full"].verdict == CONFIRMED


def test_matrices_that_are_not_orthogonal_are_noticed(monkeypatch):
    assert comparison.orthogonal_error() < 1e-13
    made = comparison.MultiheadAttention
    monkeypatch.setattr(comparison, "MultiheadAttention", lambda *x, **o: _scaled(made(*x, **o)))
    assert comparison.orthogonal_error() == pytest.approx(3)


def _scaled(layer):
    for buffer in layer.buffers():
        buffer.mul_(2)
    return layer


@pytest.mark.parametrize(("linear", "verdict"), [(2.5, CONFIRMED), (2.8, REFUTED)])
def test_linear_heads_on_little_text(stored, linear, verdict):
    assert comparison.near().verdict == UNTESTABLE
    stored(bytes_little=[*text_runs("learned", 2.5), *text_runs("linear", linear)])
    assert comparison.near().verdict == verdict


@pytest.mark.parametrize("claim", ["S0.5.1a", "S2.1.3a", "S2.1.3b", "S2.1.3c", "S2.5.2a", "S2.4.4a"])
def test_every_claim_has_a_verdict(claim):
    entry = judge(claim)
    assert entry.verdict in list(Verdict) and entry.chapter == s2.CHAPTER
