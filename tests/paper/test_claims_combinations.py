"""The evidence on combinations and on other fields: other outcomes of the records, other verdicts."""

import copy

import pytest
import torch
from experiment_fakes import SLUG

from ortho import MultiheadAttention
from ortho.cost.counting import count_step
from paper import experiments
from paper.claims import Verdict
from paper.claims.evidence import combinations as s2
from paper.claims.evidence import combinations as s4
from paper.experiments import measure
from paper.experiments.learning import images, language, rates, synthetic

CONFIRMED, CONDITIONAL, REFUTED, UNTESTABLE = (
    Verdict.CONFIRMED,
    Verdict.CONDITIONAL,
    Verdict.REFUTED,
    Verdict.UNTESTABLE,
)
NOISE = (0.002, -0.001, 0.001, -0.002, 0.0)  # of five seeds; no difference is the same in all of them
TEXT = {"identity": 3.0, "frozen": 2.5} | {f"{how}{kind}": 2.6 for how in ("", "frozen ") for kind in s2.KINDS}
DIGITS = {"identity": 0.7, "learned": 0.95} | dict.fromkeys(("frozen", "linear", "frozen linear", "FAVOR+"), 0.9)


def record(name, device, arm, seed, case, test, **values):
    """A record as far as it is read."""
    configuration = {**case, "arm": arm, "seed": seed}
    tests = {quantity: [value] for quantity, value in values.items()}
    facts = {"validation": [], "parameters": 1, "train_s": 1.0}
    made = {"experiment": name, "device": device, "configuration": configuration, "facts": facts}
    return made | {"repetitions": {test: tests}}


@pytest.fixture
def stored(monkeypatch):
    """Puts records of these levels into the place of those that are stored: arm -> bits, share of digits, and
    task -> arm -> runs of ten that learn it."""
    monkeypatch.setattr(rates, "table", dict)  # whatever rates were chosen for those that are stored

    def store(text=TEXT, digits=DIGITS, tasks=None, device=SLUG):
        cases = language.case("learned"), images.case("learned")
        found = {
            "bytes": [
                record("bytes", device, arm, seed, cases[0], "test", loss_nats=(bits + NOISE[seed - 1] * i) * 0.6931)
                for i, (arm, bits) in enumerate(text.items())
                for seed in (1, 2, 3, 4, 5)
            ],
            "images": [
                record(
                    "images",
                    device,
                    arm,
                    seed,
                    cases[1],
                    "test",
                    loss_nats=1.0,
                    correct_fraction=share + NOISE[seed - 1] * i / 10,
                )
                for i, (arm, share) in enumerate(digits.items())
                for seed in (1, 2, 3, 4, 5)
            ],
            "synthetic": [
                record(
                    "synthetic",
                    device,
                    arm,
                    seed,
                    synthetic.case(task, arm),
                    "any",
                    correct_fraction=1.0 if seed <= successes else 0.2,
                )
                for task, arms in (tasks or {}).items()
                for arm, successes in arms.items()
                for seed in range(1, 11)
            ],
        }
        monkeypatch.setattr(experiments, "load", lambda name: copy.deepcopy(found[name]))
        return found

    return store


def test_made_up_records_have_what_is_read_of_real_ones():
    real = measure(images.IMAGES, images.case("linear", 1, steps=2, B=2, d=16, L=1, tested=8), "cpu")
    made = record("images", SLUG, "linear", 1, images.case("linear"), "test", loss_nats=1.0, correct_fraction=0.5)
    assert made.keys() <= real.keys() and made["repetitions"].keys() == real["repetitions"].keys()
    assert made["configuration"].keys() == real["configuration"].keys()
    assert made["facts"].keys() <= real["facts"].keys()
    assert made["repetitions"]["test"].keys() <= real["repetitions"]["test"].keys()


@pytest.mark.parametrize("kind", s2.KINDS)
def test_costs_are_those_that_are_counted(kind, monkeypatch):
    monkeypatch.setattr(s2, "D", 32)
    monkeypatch.setattr(s2, "H", 4)
    for projection in ("learned", "frozen"):
        made = MultiheadAttention(32, 4, projection=projection, attention=s2.KINDS[kind])
        counts = count_step(made, torch.zeros(1, 200, 32, requires_grad=True), is_causal=True)
        assert s2.step(kind, 200, projection) == counts.forward + counts.backward


def test_nothing_is_lost_where_arms_are_alike(stored):
    stored()
    found = s2.with_other_attention()
    assert found.verdict == CONFIRMED
    assert "More bits a byte than softmax" in found.ours and "Left out" not in found.ours


@pytest.mark.parametrize(
    ("text", "digits", "verdict"),
    [
        ({"frozen delta": 2.9}, {}, CONDITIONAL),  # one of six
        ({f"frozen {kind}": 2.9 for kind in s2.KINDS}, {"frozen linear": 0.8}, REFUTED),
        ({f"frozen {kind}": 2.9 for kind in s2.KINDS}, {}, CONDITIONAL),  # digits lose nothing
        ({f"frozen {kind}": 2.9 for kind in s2.KINDS}, {"linear": 0.8, "frozen linear": 0.8}, CONDITIONAL),
        ({}, {"frozen": 0.95}, CONDITIONAL),  # beside ORA
        ({f"frozen {kind}": 2.2 for kind in s2.KINDS}, {"frozen linear": 0.99}, CONFIRMED),
        ({"frozen": 1.0}, {}, CONFIRMED),  # on bytes ORA has positions as well, and is only noted
    ],
)
def test_the_verdict_follows_what_is_lost(stored, text, digits, verdict):
    stored(TEXT | text, DIGITS | digits)
    assert s2.with_other_attention().verdict == verdict


def test_where_there_is_nothing_to_lose_nothing_is_judged(stored):
    """Beside an arm that is no better than heads which see no other token there is no loss, and nothing else."""
    stored(TEXT | {"linear": 3.0, "frozen linear": 3.0})
    found = s2.with_other_attention()
    assert found.verdict == CONFIRMED
    assert (
        "not shown to be better than heads that see no other token: frozen linear against linear, bits a byte"
        in found.ours
    )
    stored(dict.fromkeys(TEXT, 3.0), dict.fromkeys(DIGITS, 0.7))
    found = s2.with_other_attention()
    assert found.verdict == UNTESTABLE
    assert "there is no difference that shows, nor an arm shown to be better" in found.ours


@pytest.mark.parametrize(("level", "outcome"), [(3.5, CONDITIONAL), (2.5, CONFIRMED)])
def test_a_difference_that_shows_is_kept(stored, level, outcome):
    """Also beside an arm that is no better than heads which see no other token."""
    stored(TEXT | {"linear": 3.0, "frozen linear": level})
    found = s2.with_other_attention()
    assert found.verdict == outcome and "Left out" not in found.ours
    if outcome == CONDITIONAL:
        assert "not shown at frozen linear against linear, bits a byte" in found.ours


def test_losses_beside_arms_that_gain_nothing_refute(stored):
    stored(dict.fromkeys(TEXT, 3.0) | {"frozen linear": 3.5}, dict.fromkeys(DIGITS, 0.7))
    assert s2.with_other_attention().verdict == REFUTED


@pytest.mark.parametrize("lacking", ["frozen window", "window", "identity"])
def test_missing_runs_are_named(stored, lacking):
    stored({arm: bits for arm, bits in TEXT.items() if arm != lacking})
    found = s2.with_other_attention()
    assert found.verdict == UNTESTABLE
    assert "not yet two runs of the arms of" in found.ours and "frozen window against window" in found.ours


def test_without_records_nothing_is_judged(monkeypatch):
    monkeypatch.setattr(experiments, "load", lambda _: [])
    assert s2.with_other_attention().verdict == s4.other_fields().verdict == UNTESTABLE
    assert "More bits a byte" not in s2.with_other_attention().ours


def test_a_step_that_is_not_linear_refutes(stored, monkeypatch):
    stored()
    right = s2.step
    monkeypatch.setattr(s2, "step", lambda kind, N, projection: right(kind, N, projection) + N * N)
    assert s2.with_other_attention().verdict == REFUTED


def test_a_step_that_freezing_makes_dearer_refutes(stored, monkeypatch):
    stored()
    right = s2.step
    monkeypatch.setattr(
        s2, "step", lambda kind, N, projection: right(kind, N, "learned") + N * (projection == "frozen")
    )
    monkeypatch.setattr(s2, "share", lambda kind, N: 1.1)
    assert s2.with_other_attention().verdict == REFUTED


BOTH = {"learned": 10, "linear": 10}
ONE = {"learned": 10, "linear": 0}


@pytest.mark.parametrize(
    ("tasks", "digits", "verdict"),
    [
        ({"copying": BOTH, "mqar": BOTH}, {}, CONFIRMED),
        ({"copying": BOTH, "mqar": ONE}, {}, CONDITIONAL),
        ({"copying": ONE, "mqar": ONE}, {}, REFUTED),
        ({"copying": {"learned": 10, "linear": 6}}, {}, UNTESTABLE),  # six of ten may be chance
        ({"copying": {"learned": 0, "linear": 0}}, {}, UNTESTABLE),  # nobody learns it
        ({"copying": BOTH, "mqar": {"learned": 5, "linear": 0}}, {}, CONFIRMED),  # nor that, for sure
        ({"copying": {"learned": 10}}, {}, UNTESTABLE),
        ({}, {}, UNTESTABLE),
        ({"copying": BOTH}, {"linear": 0.7}, CONDITIONAL),
        ({"copying": BOTH}, {"linear": 0.7, "FAVOR+": 0.6}, REFUTED),
        ({"copying": BOTH}, {"learned": 0.99}, CONFIRMED),  # softmax sees more: noted
    ],
)
def test_linear_attention_in_other_fields(stored, tasks, digits, verdict):
    stored(TEXT, DIGITS | digits, tasks)
    found = s4.other_fields()
    assert found.verdict == verdict and "No model here hears speech" in found.ours


def test_runs_are_counted_in_words(stored):
    stored(tasks={"copying": {"learned": 9, "linear": 2}})
    told = s4.other_fields().ours
    assert "of softmax in brackets: copying 2 of 10 (9 of 10)" in told
    assert "More % of the digits than softmax: linear: " in told and "(worse)" in told


def test_images_without_one_of_the_arms(stored):
    stored(digits={arm: share for arm, share in DIGITS.items() if arm != "FAVOR+"}, tasks={"copying": BOTH})
    found = s4.other_fields()
    assert found.verdict == UNTESTABLE and "not yet two runs of FAVOR+" in found.ours
