"""Evidence where training data are few: made-up records of every outcome, and the batch that memory allows."""

import pytest
from learning_fakes import ALL, CPU, GPU, SEEDS, along_budgets, made_up, real, text

from ortho.cost.configurations import CONFIGURATIONS
from paper.claims import Verdict
from paper.claims.evidence import low_resource as evidence
from paper.claims.evidence import mechanism_table as comparison
from paper.experiments.learning import rates
from paper.memory import model_bytes

CONFIRMED, REFUTED = Verdict.CONFIRMED, Verdict.REFUTED
CONDITIONAL, UNTESTABLE = Verdict.CONDITIONAL, Verdict.UNTESTABLE


def little(arm, bits, **choice):
    """Runs on a small part of the text."""
    return text(arm, bits, **{"limit": 50_000, **choice})


# ---------------------------------------------------------------------------------------------------- the larger batch


def test_a_batch_by_hand():
    """One byte less than the model and n sequences take holds n - 1 sequences. In each layer freezing spares two
    matrices of d^2 weights, and their biases."""
    for name, by in (("BERT-base", "FP32"), ("ViT", "mixed"), ("GPT-2 medium", "mixed")):
        at, size = CONFIGURATIONS[evidence.SCENARIOS[name].published], evidence.PRECISIONS[by]
        spared = at.L * 2 * (at.d**2 + at.d)
        assert evidence.freed(name, by) == (size.gradient + size.optimiser) * spared
        enough = evidence.held(name, by) + 7 * evidence.one_sequence(name, by)
        assert [evidence.batch(name, by, enough - less) for less in (0, 1)] == [7, 6]
        more = evidence.more_sequences(name, by)
        assert evidence.batch(name, by, enough, frozen=True) == 7 + int(more)
        assert evidence.batch(name, by, enough - 1, frozen=True) in (6 + int(more), 7 + int(more))
        assert evidence.batch(name, by, 1) == 0


def test_activations_are_those_of_one_sequence_more():
    """They are the same with frozen matrices as with learned ones."""
    for name in evidence.SCENARIOS:
        published = evidence.SCENARIOS[name].published
        five, six = (model_bytes(published, B, projection="frozen") for B in (5, 6))
        assert evidence.one_sequence(name, "FP32") == six - five
        half, whole = (evidence.one_sequence(name, by) for by in ("mixed", "FP32"))
        assert whole / 2 < half < 0.51 * whole  # what norms keep besides stays in float32


def test_the_batch_holds_where_a_sequence_fits(monkeypatch):
    assert evidence.larger_batch().verdict == CONDITIONAL
    assert evidence.more_sequences("ViT", "FP32") > 1 > evidence.more_sequences("BERT-base", "FP32")
    monkeypatch.setattr(evidence, "one_sequence", lambda *_: 1)
    assert evidence.larger_batch().verdict == CONFIRMED
    monkeypatch.setattr(evidence, "one_sequence", lambda *_: 10**12)
    assert evidence.larger_batch().verdict == REFUTED


# ------------------------------------------------------------------------------------------------------- overfitting


def test_what_is_read_of_a_run():
    (record,) = little("learned", 2.5, gap=1.0, seeds=(3,))
    assert evidence.seen(record) == pytest.approx(1.7) and evidence.unseen(record) == pytest.approx(2.7)
    assert evidence.gap(record) == pytest.approx(1.0) and evidence.lost(record) == pytest.approx(0.1 * evidence.BITS)


def test_runs_by_bytes_and_dropout():
    records = [
        *text("learned", 2.0),
        *little("learned", 2.5),
        *little("learned", 2.4, dropout=0.1),
        *little("learned", 2.2, limit=200_000),
        *little("learned", 1.0, seeds=(rates.TUNING,)),
        *little("learned", 9.0, device=GPU),
    ]
    found = evidence.by_bytes(records, CPU)
    assert {size: list(arms) for size, arms in found.items()} == {
        50_000: ["learned", "learned, dropout 0.1"],
        200_000: ["learned"],
        ALL: ["learned"],
    }
    assert [evidence.is_little(arms) for arms in found.values()] == [True, True, False]
    assert found[50_000]["learned"].mean("bits") == pytest.approx(2.7)
    told = found[50_000]["learned"].configuration
    assert evidence.passes(found[50_000]["learned"], 50_000) == told["steps"] * 8 * 128 / 50_000


def gap_on_the_least():
    return evidence.smaller_gap(*evidence.on_least_text())


@pytest.mark.parametrize(
    ("frozen", "positional", "verdict"),
    [(1.5, 1.4, CONFIRMED), (1.5, 0.9, CONDITIONAL), (0.9, 0.8, REFUTED), (1.0, 1.0, REFUTED)],
)
def test_the_gap_is_judged_on_the_least_text(stored, frozen, positional, verdict):
    """All arms have the same loss on other text; their gaps differ by the losses on the text that they have seen."""
    least = [
        *little("learned", 2.5, gap=2.5 - 1.0),
        *little("frozen", 2.5, gap=2.5 - frozen),
        *little("positional", 2.5, gap=2.5 - positional),
    ]
    more = [*little("learned", 2.5, gap=2.5 - 1.0, limit=200_000), *little("frozen", 2.5, gap=2.5 - 9.0, limit=200_000)]
    stored(bytes_little=[*more, *least])
    found = gap_on_the_least()
    assert found.verdict == verdict
    assert "gone through 12 times" in found.ours


@pytest.mark.parametrize(
    ("frozen", "positional", "verdict"),
    [(2.2, 2.3, CONFIRMED), (2.2, 2.5, CONDITIONAL), (2.5, 2.8, REFUTED)],
)
def test_overfitting_takes_a_better_test(stored, frozen, positional, verdict):
    records = [*little("learned", 2.5), *little("frozen", frozen), *little("positional", positional)]
    stored(bytes_little=[*records, *little("learned", 2.4, dropout=0.1)])
    _, arms = evidence.on_least_text()
    found = evidence.better_on_the_test(arms)
    assert found.verdict == verdict
    assert "learned, dropout 0.1 -0.100" in found.ours


def test_gaps_within_the_noise_do_not_decide(stored):
    records = little("learned", 2.5, gap=1.5)
    records += little("frozen", 2.5, gap=[1.5 - (-1) ** seed * 0.3 for seed in SEEDS])
    stored(bytes_little=records)
    assert gap_on_the_least().verdict == UNTESTABLE


def test_without_records_overfitting_is_not_judged(stored):
    assert gap_on_the_least().verdict == UNTESTABLE and "no records" in gap_on_the_least().ours
    assert evidence.better_on_the_test({}).verdict == UNTESTABLE
    stored(bytes=[*text("learned", 2.0), *text("frozen", 2.0)])
    assert gap_on_the_least().verdict == UNTESTABLE, "all of the text is not little"
    stored(bytes_little=little("learned", 2.0, seeds=(1,)) + little("frozen", 2.0, seeds=(1, 2)))
    assert gap_on_the_least().verdict == UNTESTABLE, "one seed in common"


def test_text_at_equal_parameters_is_left_out(stored):
    stored(bytes=[*text("learned", 2.0, seeds=(1,)), *text("learned", 2.0, seeds=(1,), matched="parameters")])
    assert [record["configuration"]["matched"] for record in evidence.text_records()] == ["flop"]


# ------------------------------------------------------------------------------------------------------ fixed patterns


def test_the_printed_table_waits_for_its_size(stored):
    assert evidence.translation_table().verdict == evidence.parity().verdict == UNTESTABLE
    stored(translation=real({evidence.LEARNED: 0.3, evidence.FIXED: 0.32, evidence.SINGLE: 0.25}, 10_000))
    found = evidence.translation_table()
    assert found.verdict == evidence.parity().verdict == UNTESTABLE
    assert "8 learned 35.0, 7 fixed + 1 learned 37.0, 1 learned 30.0" in found.ours
    assert "Against 8 learned: 7 fixed + 1 learned +2.0 (better)" in found.ours
    assert "; 1 learned -5.0 (worse)" in found.ours and "has -1.4" in found.ours


@pytest.mark.parametrize(("fixed", "table", "parity"), [(0.354, CONFIRMED, CONFIRMED), (0.30, CONDITIONAL, REFUTED)])
def test_the_printed_table_is_judged_at_its_size(stored, monkeypatch, fixed, table, parity):
    """The made-up scores are 5 points higher than the scores that `real` is asked for."""
    monkeypatch.setattr(evidence, "STANDARD", 10_000)
    scores = {evidence.LEARNED: 0.355, evidence.FIXED: fixed, evidence.SINGLE: 0.341}
    stored(translation=real(scores, 10_000))
    assert (evidence.translation_table().verdict, evidence.parity().verdict) == (table, parity)
    assert "-0.2 BLEU at worst" in evidence.parity().ours


@pytest.mark.parametrize(
    ("fixed", "single", "gain", "beats"),
    [
        (0.33, 0.25, CONFIRMED, CONFIRMED),  # 3 points, the source's most
        (0.32, 0.25, CONDITIONAL, CONFIRMED),  # a gain of less than 3 points
        (0.37, 0.25, CONDITIONAL, CONFIRMED),  # a gain of more than 3 points
        (0.30, 0.25, REFUTED, CONFIRMED),
        (0.30, 0.30, REFUTED, REFUTED),
        (0.27, 0.35, REFUTED, REFUTED),
    ],
)
def test_fixed_patterns_are_judged_against_both(stored, fixed, single, gain, beats):
    stored(translation=real({evidence.LEARNED: 0.3, evidence.FIXED: fixed, evidence.SINGLE: single}, 10_000))
    assert evidence.fixed_gain().verdict == gain and evidence.fixed_beats_single().verdict == beats
    whole = evidence.from_few_pairs()
    assert whole.verdict == (REFUTED if REFUTED in (gain, beats) else gain)
    assert "went through 10,000 pairs " in whole.ours and "Not of its range" not in whole.ours


def test_a_gain_at_some_numbers_of_pairs_is_conditional_and_says_where(stored, monkeypatch):
    monkeypatch.setattr(evidence, "RANGE", (1_000, 165_000))
    scores = {evidence.LEARNED: 0.3, evidence.FIXED: 0.33, evidence.SINGLE: 0.2}
    stored(translation=[*real(scores), *real({**scores, evidence.FIXED: 0.3}, 10_000)])
    found = evidence.fixed_gain()
    assert found.verdict == CONDITIONAL
    assert "holds at 7 fixed + 1 learned (German to English, 1,000 pairs, BLEU); not shown" in found.ours
    assert "10,000 pairs, BLEU" in found.ours.partition("not shown at")[2]
    assert "1,000 pairs " in evidence.from_few_pairs().ours.partition("went through ")[2]


@pytest.mark.parametrize(("right", "verdict"), [(15, CONDITIONAL), (10, REFUTED)])
def test_long_runs_count_beside_short_ones(stored, right, verdict):
    """A gain of 25 points, more than the source's 3; or none, where the short runs have none either."""
    long = along_budgets(evidence.LEARNED, (4.0, 3.0), (1, 10)) + along_budgets(evidence.FIXED, (4.0, 3.0), (1, right))
    short = real({evidence.LEARNED: 0.3, evidence.FIXED: 0.3 if right == 10 else 0.33}, 10_000)
    stored(translation=short, translation_budgets=long)
    found = evidence.fixed_gain()
    assert found.verdict == verdict
    assert "7 fixed + 1 learned (German to English, 5,000 pairs, up to 3 passes, BLEU)" in found.ours
    assert "5,000 pairs 3 times, 10,000 pairs 2" in evidence.from_few_pairs().ours
    assert (
        "Of small models, Multi30k, 5,000 pairs, up to 3 passes, BLEU: 8 learned 50.0"
        in evidence.translation_table().ours
    )


def test_arms_of_long_runs_that_lack_a_seed_do_not_count(stored):
    long = along_budgets(evidence.LEARNED, (4.0,), (10,)) + along_budgets(evidence.FIXED, (4.0,), (15,), seeds=(1, 2))
    stored(translation_budgets=long)
    assert evidence.fixed_gain().verdict == UNTESTABLE and "no records" in evidence.fixed_gain().ours


def test_always_has_no_range_and_a_made_up_language_is_told_only(stored):
    """A gain over eight heads counts in the source's range, a gain over one head at all numbers of real pairs."""
    scores, other = (
        {evidence.LEARNED: 0.3, evidence.FIXED: 0.33, evidence.SINGLE: 0.25},
        {evidence.LEARNED: 0.3, evidence.FIXED: 0.2, evidence.SINGLE: 0.3},
    )
    rest = {"transduction": made_up(other)}
    stored(translation=[*real(scores, 10_000), *real(other)], **rest)
    found = evidence.from_few_pairs()
    assert found.verdict == CONDITIONAL and evidence.fixed_gain().verdict == CONFIRMED
    told = found.ours.partition("Not of its range, or no translation: ")[2]
    assert told.count("(worse)") == 3 and "10,000" not in told
    assert told.startswith("against 8 learned, German to English, 1,000 pairs, BLEU: -10")
    stored(translation=real(other), **rest)
    found = evidence.from_few_pairs()
    assert found.verdict == REFUTED and evidence.fixed_gain().verdict == UNTESTABLE


def test_the_most_is_what_is_shown_at_least(stored):
    base, fixed = real({evidence.LEARNED: 0.3}, 10_000), real({evidence.FIXED: 0.35}, 10_000)
    stored(translation=[*base, *fixed])
    assert "not at passed nowhere: 5 BLEU" in evidence.points_gained().ours
    for seed, one in enumerate(fixed):  # gains of 1 to 5: the gain that is shown is less than their mean
        (score,) = base[seed]["repetitions"]["test"]["bleu_fraction"]
        one["repetitions"]["test"]["bleu_fraction"] = [score + (seed + 1) / 100]
    stored(translation=[*base, *fixed])
    assert "not at reached somewhere" in evidence.points_gained().ours


def test_pairs_drawn_anew_are_not_few(stored):
    scores = {evidence.LEARNED: 0.3, evidence.FIXED: 0.4}
    stored(translation=real(scores, 10_000), transduction=made_up({**scores, evidence.FIXED: 0.1}, 0))
    assert evidence.from_few_pairs().ours.count("made-up") == 0 and "(better)" in evidence.fixed_gain().ours
    assert list(evidence.few_pairs("transduction")) == [] and list(evidence.by_pairs("transduction")) == [0]


def test_records_of_a_gpu_are_read_where_there_are_no_others(stored):
    """They give the numbers of pairs and the arms measured on such a device; a CPU's records take precedence."""
    large = real({evidence.LEARNED: 0.3, "8 stopped": 0.4}, 29_000, device=GPU)
    stored(translation=large)
    assert list(evidence.few_pairs("translation")) == [(29_000, 0)]
    assert "holds" not in evidence.advantage().ours and evidence.advantage().verdict == CONFIRMED
    stored(translation=[*large, *real({evidence.LEARNED: 0.3})])
    assert list(evidence.few_pairs("translation")) == [(1000, 0)]


# ---------------------------------------------------------------------------------------------------------- the causes


def test_without_a_gain_there_is_nothing_to_explain(stored):
    assert evidence.causes().verdict == UNTESTABLE and "no records of" in evidence.causes().ours
    stored(translation=real({evidence.LEARNED: 0.3, evidence.FIXED: 0.3, evidence.SINGLE: 0.2}))
    found = evidence.causes()
    assert found.verdict == UNTESTABLE and "have not a gain" in found.ours
    assert "8 learned: 9 trained, gap 0.50 nats, scores within 10.0 BLEU" in found.ours


@pytest.mark.parametrize(
    ("gap", "frozen", "verdict", "words"),
    [
        (0.2, 0.35, UNTESTABLE, "1,000 pairs: 0.3 (confirmed)"),  # steadiness is not known
        (0.9, 0.35, REFUTED, "no gain anywhere (refuted)"),
        (0.2, 0.31, REFUTED, "8 frozen (German to English, 1,000 pairs): 20 %: outside everywhere (refuted)"),
    ],
)
def test_a_gain_is_asked_for_its_causes(stored, gap, frozen, verdict, words):
    """Unseen pairs lose less against seen ones, or not; another arm with as few parameters gains as much, or not."""
    others = {evidence.LEARNED: 0.3, "8 frozen": frozen}
    stored(translation=[*real(others), *real({evidence.FIXED: 0.35}, gap=gap)])
    found = evidence.causes()
    assert found.verdict == verdict and words in found.ours
    assert "no records of the gradients of translating models" in found.ours


# -------------------------------------------------------------------------------------------------------- frozen heads


def test_the_advantage_is_looked_for_in_all_little_data(stored):
    assert evidence.advantage().verdict == UNTESTABLE
    equal = [*little("learned", 2.5), *little("frozen", 2.5), *little("stopped", 2.7)]
    stored(bytes_little=equal)
    assert evidence.advantage().verdict == REFUTED
    stored(bytes_little=[*equal, *little("positional", 1.0)])
    assert evidence.advantage().verdict == REFUTED, "positional heads are not frozen ones"
    better = [*little("learned", 2.5, limit=200_000), *little("frozen", 2.2, limit=200_000)]
    stored(bytes_little=[*equal, *better])
    found = evidence.advantage()
    assert found.verdict == CONDITIONAL and "holds at frozen (200,000 bytes, bits)" in found.ours
    assert "3 comparisons" in found.ours
    stored(bytes_little=equal, translation=real({evidence.LEARNED: 0.3, "8 frozen": 0.4}))
    assert "holds at 8 frozen (German to English, 1,000 pairs, BLEU)" in evidence.advantage().ours
    stored(bytes_little=better, transduction=made_up({evidence.LEARNED: 0.3, "8 frozen": 0.4}))
    assert evidence.advantage().verdict == CONFIRMED


def test_all_of_the_text_is_no_little_text(stored):
    stored(bytes=[*text("learned", 2.5), *text("frozen", 1.5)])
    assert evidence.advantage().verdict == UNTESTABLE


# ----------------------------------------------------------------------------------------------------------- the table


@pytest.mark.parametrize(("linear", "verdict"), [(2.5, CONFIRMED), (2.8, REFUTED)])
def test_linear_heads_on_little_text(stored, linear, verdict):
    assert comparison.near().verdict == UNTESTABLE
    stored(bytes_little=[*little("learned", 2.5), *little("linear", linear)])
    assert comparison.near().verdict == verdict
