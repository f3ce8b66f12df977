"""The arms of attention-speed: each does what its definition does, and a causal one keeps no state per token."""

import pytest
import torch
from tiny_arms import ALL, SETS, TINY

from ortho.attention import MECHANISMS
from ortho.attention.chunking import CHUNK
from ortho.cost.counting import Allocations, OperationCounter
from paper.experiments.speed import attention as speed
from paper.experiments.speed import attention_variants as arms

# ---------------------------------------------------------------------------------------------- what is compared


@pytest.mark.parametrize(("name", "family", "left_out"), [(n, *of) for n, of in arms.FAMILIES.items()])
def test_a_family_is_every_mechanism_of_it(name, family, left_out):
    """Each in all ways that it serves, memories causal."""
    found, others = arms.arms_of(SETS[name]), {arm.split()[0] for arm in left_out}
    for mechanism in MECHANISMS.values():
        if mechanism.family == family and mechanism.name not in others:
            both = mechanism.bidirectional and family != "memory"
            assert (mechanism.name in found, f"{mechanism.name} causal" in found) == (both, mechanism.causal)


def test_arms_that_keep_too_much_are_left_out():
    long = arms.arms_of(speed.case(4096, "family"))
    assert "cosformer" in long and "taylor" not in long  # whose 4161 features would keep 1.1 GB
    assert "taylor" in arms.arms_of(speed.case(1024, "family"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("case", "arm"), ALL, ids=[f"{case['arms']}-{arm}" for case, arm in ALL])
def test_every_arm_passes_its_check(case, arm, dtype):
    case = {**case, "dtype": dtype}
    arms.check(case, arm, arms.function(arm, case["chunk"]))


@pytest.mark.parametrize("place", ["output", "gradient of q", "gradient of k", "gradient of v"])
@pytest.mark.parametrize("arm", arms.SETS["main"])
def test_the_check_finds_wrong_results(arm, place):
    """An output that is off by a thousandth, or the gradient of one operand alone."""
    right, where = arms.function(arm, 8), place[-1]

    def wrong(q, k, v):
        o = right(q, k, v)
        return o * 1.001 if place == "output" else o + _without_value(1e-3 * {"q": q, "k": k, "v": v}[where])

    with pytest.raises(AssertionError, match=f"{arm}, {place}: expected a relative error of at most .*, got"):
        arms.check(SETS["main"], arm, wrong)


def _without_value(x):
    return x - x.detach()


def test_the_recurrence_takes_one_token_at_a_time():
    """The products of its closed form, and work in proportion to N, forward and backward."""
    work = []
    for N in (12, 24):
        case = speed.case(N, "recurrent", **TINY)
        (q, k, v), upstream = arms.draw(case)
        with OperationCounter() as counter:
            torch.autograd.grad(arms.recurrent(q, k, v), (q, k, v), upstream)
        work.append((counter.flops.total(), counter.elementwise.total()))
    (short, a), (long, b) = work
    assert long == 2 * short > 0
    assert b == pytest.approx(2 * a, rel=0.05)  # the first and last token take a few sums less


# ------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("arm", ["favor causal", "linear causal", "hyperbolic causal", "cosformer causal"])
def test_a_causal_call_stores_nothing_of_a_state_per_token(arm):
    """The largest tensor has the features of all tokens, N m numbers, or a state for each chunk, N m V / C; a state for
    each token would have N m V. All that is held at once grows like N."""
    H, K, peaks = 2, 32, []
    m = MECHANISMS[arm.split()[0]].fast.keywords["feature_map"].width(K)
    for N in (512, 1024):
        memory = _memory(arms.function(arm, CHUNK), N, H, K)
        assert memory.largest <= 4 * H * N * max(m, m * K // CHUNK, CHUNK, K)
        assert memory.largest < 4 * H * N * m * K / 8
        peaks.append(memory.peak)
    assert peaks[1] == pytest.approx(2 * peaks[0], rel=0.03)  # the state itself, and the features' rows, do not grow


def test_a_state_per_token_would_be_found():
    def cumulative(q, k, v):
        S = (k[..., :, None] * v[..., None, :]).cumsum(-3)  # (B, H, N, K, V)
        return (q[..., None, :] @ S)[..., 0, :]

    N, H, K = 512, 2, 32
    assert _memory(cumulative, N, H, K).largest == 4 * H * N * K * K


def test_the_fused_softmax_keeps_one_number_a_row():
    N, H, K = 512, 2, 32
    assert _memory(arms.function("sdpa", CHUNK), N, H, K).peak == 4 * H * N * (4 * K + 1)  # o, dq, dk, dv


def _memory(call, N, H, K):
    (q, k, v), upstream = arms.draw(speed.case(N, H=H, K=K))
    for _ in range(2):  # the first call draws the default features
        with Allocations() as memory:
            torch.autograd.grad(call(q, k, v), (q, k, v), upstream)
    return memory
