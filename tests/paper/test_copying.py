"""Learning to copy: a run's evaluations, the rule for the jump, the hypotheses."""

from math import inf

import pytest
from experiment_fakes import made_up

from paper import plots
from paper.experiments.learning import copying, ladder
from paper.experiments.learning.copying_analysis import (
    CONVOLVED,
    HYPOTHESES,
    KV_SHIFT,
    LOOKS,
    SELECTIVE,
    judged,
    jump,
    sign_flips,
)

TINY = {"base": 12, "tested": 8, "N": 32, "B": 2, "d": 16, "L": 1}


@pytest.fixture(scope="module")
def outcome():
    case = copying.case("python", copying.SELECTING, seed=1, budget=4, **TINY) | {"validated": 6, "blocks": 3}
    return case, copying.run(case)


def test_a_run(outcome):
    """Every budget is tested as the ladder tests it, to the bit; the model is evaluated on the way."""
    case, found = outcome
    facts = found["facts"]
    assert [one["budget"] for one in facts["validation"]] == [1, 2, 4]
    assert [one["step"] for one in facts["looks"]] == [12, 24]  # the trunk of 4 times 12 steps ends at 38
    assert {"bits", "repeats_bits", "step"} == set(facts["looks"][0])
    assert found["repetitions"] == ladder.run(case)["repetitions"]


def record(kind, seed, jumps_at, bits, step_s=0.1):
    """A run whose bits on go-on bytes fall from 1 to .4 at a multiple of the least budget."""
    arm, width = kind
    case = copying.case("python", arm, convolution=width, seed=seed)
    looks = [{"step": 300 * n, "repeats_bits": {"goes on": 0.4 if n >= jumps_at else 1.0}} for n in copying.LOOKS]
    last = {"budget": 64, "step": 19200, "step_s": step_s, "repeats_bits": {"goes on": 0.4 if jumps_at <= 64 else 1.0}}
    repetitions = {"32 x": {"test_bits": [bits + 0.1]}, "64 x": {"test_bits": [bits]}}
    return made_up("copying", case, repetitions, looks=looks, validation=[last])


def test_the_jump():
    """The first evaluation from which on all stay below; a run that goes back has not jumped before."""
    size = 300 * 1024
    assert [jump(record(CONVOLVED, 1, n, 2.0)) for n in (1, 7, 64, 65)] == [size, 8 * size, 64 * size, inf]
    back = record(CONVOLVED, 1, 7, 2.0)
    back["facts"]["looks"][10]["repeats_bits"]["goes on"] = 0.9
    assert jump(back) == 22 * size


def test_sign_flips():
    """Exact: of n negative differences one sign pattern in 2^n is as low; with one positive, by hand."""
    assert sign_flips([-1.0] * 5) == 1 / 32
    assert sign_flips([-1.0, -1.0, 1.0]) == 4 / 8
    assert sign_flips([]) == 1.0


def test_hypotheses():
    """Ten seeds of which every one agrees are shown after Holm's correction over the family; what differs by nothing,
    or was not measured, is not."""
    records = [record(SELECTIVE, seed, 1, 1.5 + seed / 1e4) for seed in copying.SEEDS]
    records += [record(CONVOLVED, seed, 10 + 5 * seed, 1.6 + seed / 10) for seed in copying.SEEDS]
    records += [record(KV_SHIFT, seed, 1, 1.5 + seed / 1e4, step_s=0.05) for seed in copying.SEEDS]
    found = judged(records)
    assert {name for name, (_, shown) in found.items() if shown} == {
        "selective before convolved",
        "KV shift before convolved",
        "selective less spread than convolved",
        "selective fewer bits at equal steps than convolved",
        "selective fewer bits at equal FLOPs than convolved",
        "selective fewer bits at equal time than convolved",
    }
    assert found["n-gram before convolved"] == (None, False)
    # in the time of the rival's whole budget the dearer run has read half of its own
    assert found["selective fewer bits at equal time than KV shift"][0].mean == pytest.approx(0.1)


def test_looks():
    """Every kind that is asked about has a look of its own, in the palette's colours."""
    assert {kind for one in HYPOTHESES for kind in (one.less, one.more)} <= set(LOOKS)
    assert {look.colour for look in LOOKS.values()} <= set(plots.PALETTE)
    for what in (lambda look: look.name, lambda look: look[1:]):
        assert len({what(look) for look in LOOKS.values()}) == len(LOOKS)
