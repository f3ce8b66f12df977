"""The evidence on learned heads beside others: other runs are another verdict, and missing ones are none."""

import copy
from math import log

import pytest
from experiment_fakes import SLUG

from paper import experiments
from paper.claims import Verdict
from paper.claims.evidence import one_learned_head as s2
from paper.experiments import measure
from paper.experiments.learning import language
from paper.experiments.learning.arms import BESIDE, arms
from paper.tasks import text

CONFIRMED, CONDITIONAL = Verdict.CONFIRMED, Verdict.CONDITIONAL
UNTESTABLE, REFUTED = Verdict.UNTESTABLE, Verdict.REFUTED
SIZES = {"B": 2, "N": 16, "d": 16, "H": 4, "L": 1, "tested": 4}
LEVEL = [2.0, 2.1, 2.2, 2.3, 2.4]  # bits a byte, over the seeds
# Bits a byte that an arm has more than learned heads.
AS_CLAIMED = {
    "learned": 0.0,
    **dict.fromkeys(s2.FIXED, 0.01),
    **{f"1 learned + 3 {kind}": -0.2 for kind in s2.FIXED},
    **{f"{kind} Gaussian": 0.3 for kind in s2.ORTHOGONAL},
}
BAD = {"frozen Gaussian": 0.8, "stopped Gaussian": 0.8}


@pytest.fixture(scope="module")
def measured():
    parts = text.Parts(*(bytes(range(256)) * count for count in (4, 2, 2)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "python_parts", lambda: parts)
        return measure(language.BYTES, language.case("learned", 1, steps=2, **SIZES), "cpu")


@pytest.fixture
def make(measured):
    """Makes the records of an arm over the seeds: what it has more than `LEVEL`, one number or one a seed."""

    def made(arm, more=0.0, *, device=SLUG, seeds=language.SEEDS, **choice):
        records = []
        for seed in seeds:
            found = copy.deepcopy(measured)
            own = more[seed - 1] if isinstance(more, list) else more
            found["device"] = device
            found["configuration"] = language.case(arm, seed, **{**SIZES, **choice})
            found["repetitions"]["test"]["loss_nats"] = [(LEVEL[seed - 1] + own) * log(2)]
            records.append(found)
        return records

    return made


@pytest.fixture
def stored(make, monkeypatch):
    """Puts records in the place of those that are stored."""

    def put(bytes_=AS_CLAIMED, parameters=(), budgets=()):
        if isinstance(bytes_, dict):
            bytes_ = [record for arm, more in bytes_.items() for record in make(arm, more)]
        found = {"bytes": bytes_, "bytes-parameters": list(parameters), "bytes-budgets": list(budgets)}
        monkeypatch.setattr(experiments, "load", found.__getitem__)

    return put


def test_a_claim_that_holds_is_confirmed(stored):
    stored()
    found = s2.learned_heads()
    assert found.verdict == CONFIRMED and found.rule == "loses_nothing, outperforms"
    assert "others positional: -0.21 bits a byte (better)" in found.ours
    assert "no record yet at equal parameters or other budgets" in found.ours


@pytest.mark.parametrize(
    ("changed", "verdict", "said"),
    [
        # every fixed kind loses without a learned head
        (dict.fromkeys(s2.FIXED, 0.5), REFUTED, "frozen: 0.5 bits a byte (worse)"),
        # and some do
        ({**BAD, "frozen": 0.5, "stopped": 0.5}, CONDITIONAL, "holds at positional, static random, identity; not"),
        # one learned head is not enough, wherever the others
        ({f"1 learned + 3 {kind}": 0.1 for kind in s2.FIXED}, REFUTED, "others frozen: 0.1 bits a byte (worse)"),
        # one learned head is no better than none
        ({f"1 learned + 3 {kind}": 0.01 for kind in s2.FIXED}, REFUTED, "others frozen: 0 bits a byte (equivalent)"),
        # orthogonal matrices are as good as Gaussian ones
        ({"frozen Gaussian": 0.02, "stopped Gaussian": 0.02}, REFUTED, "nowhere"),
        ({"frozen Gaussian": 0.02}, CONDITIONAL, "holds at stopped; not shown at frozen"),
        # nobody can tell
        ({arm: [0.4, -0.4, 0.3, -0.3, 0.0] for arm in BAD}, UNTESTABLE, "undecided"),
    ],
)
def test_other_runs_are_another_verdict(stored, changed, verdict, said):
    stored(AS_CLAIMED | changed)
    found = s2.learned_heads()
    assert found.verdict == verdict and said in found.ours


def test_without_records_nothing_is_judged(stored):
    stored([])
    assert s2.learned_heads().verdict == UNTESTABLE
    assert "there is no record of the experiment bytes" in s2.learned_heads().ours


@pytest.mark.parametrize("arm", AS_CLAIMED)
def test_until_every_seed_of_an_arm_has_run_nothing_is_decided(stored, make, arm):
    records = [record for other, more in AS_CLAIMED.items() if other != arm for record in make(other, more)]
    stored(records + make(arm, AS_CLAIMED[arm], seeds=(1, 2, 3, 4)))
    found = s2.learned_heads()
    assert found.verdict == UNTESTABLE and "there is no run of every seed of" in found.ours
    assert arm in found.ours


def test_a_cpu_is_judged_and_others_stand_beside(stored, make):
    gpu = [*make("learned", 0.0, device="a-gpu"), *make("frozen", 0.5, device="a-gpu")]
    stored([*gpu, *(record for arm, more in AS_CLAIMED.items() for record in make(arm, more))])
    found = s2.learned_heads()
    assert found.verdict == CONFIRMED
    assert "on a-gpu: frozen 0.5 (worse)" in found.ours
    stored(gpu)
    assert s2.learned_heads().verdict == UNTESTABLE and "static random" in s2.learned_heads().ours


def test_equal_parameters_and_other_budgets_stand_beside(stored, make):
    parameters = [*make("learned", matched="parameters"), *make("positional", 0.3, matched="parameters")]
    budgets = [
        record
        for steps, more in ((150, -0.4), (2400, 0.2))
        for record in (*make("learned", -1.0, steps=steps), *make("1 learned + 3 positional", more - 1, steps=steps))
    ]
    larger = [*make("learned", -0.5, d=32), *make("stopped", 0.5, d=32)]
    stored(parameters=parameters, budgets=[*budgets, *larger])
    said = s2.learned_heads().ours
    assert "at equal parameters and steps: positional 0.3 (worse)" in said
    assert "at 0.25 times the steps, $d = 16$: 1 learned + 3 positional -0.4 (better)" in said
    assert "at 4 times the steps, $d = 16$: 1 learned + 3 positional 0.2 (worse)" in said
    assert "at 1 times the steps, $d = 32$: stopped 1 (worse)" in said
    assert "at 1 times the steps, $d = 16$" not in said, "that is what is judged"


def by_arm(records, **wanted):
    return language.by_arm(records, SLUG, **wanted)


def test_the_middle_budget_joins_where_an_arm_is_followed(make):
    middle = by_arm([*make("learned"), *make("frozen"), *make("tied")])
    records = [*make("learned", steps=150), *make("frozen", steps=2400), *make("learned", d=32)]
    found = s2.along_budgets(records, SLUG, middle)
    assert {key: set(stage) for key, stage in found.items()} == {
        (16, 0.25): {"learned"},
        (16, 1.0): {"learned", "frozen"},
        (16, 4.0): {"frozen"},
        (32, 1.0): {"learned"},
    }
    assert list(found) == sorted(found)
    assert s2.along_budgets([], SLUG, middle) == {}


def test_an_early_lead_that_vanishes_is_a_crossing(make):
    def stages(*more):
        return {
            multiple: by_arm([*make("learned", steps=steps), *make("frozen", own, steps=steps)])
            for (multiple, steps), own in zip(((0.25, 150), (1.0, 600), (4.0, 2400)), more, strict=True)
        }

    lost = s2.crossed(stages(-0.3, -0.1, 0.2), "frozen", "learned")
    assert [(place.low, place.high, place.first_overtakes) for place in lost.places] == [(1.0, 4.0, False)]
    assert lost.loses_lead == pytest.approx(1) and lost.gains_lead == 0
    gained = s2.crossed(stages(0.3, -0.1, -0.2), "frozen", "learned")
    assert [(place.low, place.high, place.first_overtakes) for place in gained.places] == [(0.25, 1.0, True)]
    assert s2.crossed(stages(-0.3, -0.2, -0.1), "frozen", "learned").places == ()
    assert s2.crossed(stages(0, 0, 0), "tied", "learned") is None
    one = {1.0: by_arm([*make("learned"), *make("frozen", 0.1)])}
    assert s2.crossed(one, "frozen", "learned") is None
    apart = stages(-0.3, -0.1, 0.2)
    apart[4.0] = by_arm([*make("learned", seeds=(4, 5)), *make("frozen", seeds=(3, 4))])
    assert s2.crossed(apart, "frozen", "learned") is None, "one seed in common"


def test_fixed_heads_train_neither_queries_nor_keys():
    def trained(kind):
        return sum(p.numel() for p in arms(4, 16)[kind].build(256, 16, 1).parameters() if p.requires_grad)

    fewer = {kind: trained("learned") - trained(kind) for kind in BESIDE}
    assert {kind for kind, count in fewer.items() if count == 2 * 16 * 16} == set(s2.FIXED)
    assert {count for kind, count in fewer.items() if kind not in s2.FIXED} == {0}
