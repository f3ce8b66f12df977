"""The attention functions that are timed: each agrees with its definition; a failure is recorded with its reason."""

import pytest
import torch
from tiny_arms import ALL, SETS, TINY

from ortho.attention import MECHANISMS
from ortho.attention.linear.feature_maps import HORIZON
from ortho.attention.recurrence import CHUNK
from ortho.cost import of
from ortho.cost.counting import Allocations
from paper.elementwise import elementwise
from paper.experiments import EXPERIMENTS, measure
from paper.experiments.speed import attention as speed
from paper.experiments.speed import attention_analysis as rows
from paper.experiments.speed import attention_variants as arms


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setitem(speed.CALL_SECONDS, "cpu", 1e-3)


# ---------------------------------------------------------------------------------------------- what is compared


@pytest.mark.parametrize(("name", "family", "left_out"), [(n, *of) for n, of in arms.FAMILIES.items()])
def test_a_family_is_every_mechanism_of_it(name, family, left_out):
    """Each mechanism in every direction that it serves, memories only causally."""
    found, others = arms.arms_of(SETS[name]), {arm.split()[0] for arm in left_out}
    for mechanism in MECHANISMS.values():
        if mechanism.family == family and mechanism.name not in others:
            both = mechanism.bidirectional and family != "recurrent"
            assert (mechanism.name in found, f"{mechanism.name} causal" in found) == (both, mechanism.causal)


def test_arms_that_keep_too_much_are_left_out():
    long = arms.arms_of(speed.case(4096, "family"))
    assert "cosformer" in long and "taylor" not in long  # Taylor's 4161 features would keep 1.1 GB
    assert "taylor" in arms.arms_of(speed.case(1024, "family"))


def test_cases_have_few_chunks_and_positions_below_the_horizon():
    """This holds on CUDA, where chunks run one after another in a loop; on a CPU only memories reach great lengths."""
    for cases, compiled in ((speed.cases, 16), (speed.memory_cases, 64)):
        for case in cases("cuda"):
            assert case["N"] % case["chunk"] == 0
            few = compiled if case["compiled"] and case["N"] > compiled * CHUNK else 128
            assert case["N"] // case["chunk"] <= few
            assert case["arms"] != "family" or case["N"] <= HORIZON
    assert max(case["N"] for case in speed.cases("cuda")) == 131072
    assert max(case["N"] for case in speed.memory_cases("cpu") if case["arms"] == "delta alone") == 32768


@pytest.mark.parametrize(("case", "arm"), ALL, ids=[f"{case['arms']}-{arm}" for case, arm in ALL])
def test_every_arm_passes_its_check_in_half_precision(case, arm):
    """test_speed.py has the check in float32."""
    arms.check({**case, "dtype": "bfloat16"}, arm, arms.function(arm, case["chunk"]))


@pytest.mark.parametrize("place", ["output", "gradient of q", "gradient of k", "gradient of v"])
@pytest.mark.parametrize("arm", ["sdpa causal", "linear causal"])
def test_the_check_finds_wrong_results(arm, place):
    """The output, or the gradient of one operand alone, is off by a thousandth."""
    right, where = arms.function(arm, 8), place[-1]

    def wrong(q, k, v):
        o, x = right(q, k, v), {"q": q, "k": k, "v": v}.get(where)
        return o * 1.001 if x is None else o + 1e-3 * (x - x.detach())

    with pytest.raises(AssertionError, match=f"{arm}, {place}: expected a relative error of at most .*, got"):
        arms.check(SETS["main"], arm, wrong)


def test_gates_are_timed_and_checked_with_the_operands():
    """The check finds a wrong gradient of one of an arm's gates."""
    case = SETS["delta"]
    operands, _ = arms.draw(case, "gated-delta causal")
    assert [x.shape for x in operands[3:]] == 2 * [operands[0].shape[:-1]]
    assert all(x.requires_grad for x in operands)
    assert torch.equal(operands[1], arms.draw(case)[0][1])  # q, k and v are those of the other arms
    right = arms.function("delta causal", 8)
    with pytest.raises(AssertionError, match="delta causal, gradient of beta: expected a relative error"):
        arms.check(case, "delta causal", lambda q, k, v, beta: right(q, k, v, beta.detach() + 1e-9 * beta))


def test_the_recurrence_takes_one_token_at_a_time():
    """Its products and its element-wise work double with N, forward and backward together."""
    work = []
    for N in (12, 24):
        case = speed.case(N, "recurrent", **TINY)
        (q, k, v), upstream = arms.draw(case)
        del upstream
        work.append((of(arms.recurrent, q, k, v).step, sum(c.total() for c in elementwise(arms.recurrent, q, k, v))))
    (short, a), (long, b) = work
    assert long == 2 * short > 0
    assert b == pytest.approx(2 * a, rel=0.05)  # the first and last token take a few sums fewer


# ------------------------------------------------------------------------------------------------- what fails


@pytest.mark.unchecked  # FlexAttention inspects the function that it is given
def test_a_kernel_that_does_not_serve_is_recorded_as_such():
    """Two of the named kernels serve on a CPU: one materialises the scores, one is fused."""
    record = measure(EXPERIMENTS["flash-speed"], SETS["kernels"], "cpu", seconds=0.01)
    served = {f"sdpa{kernel}{way}" for kernel in ("", " math", " flash") for way in ("", " causal")}
    assert set(record["repetitions"]) == served
    assert set(record["failures"]) == set(arms.SETS["kernels"]) - served
    assert "expected one that serves torch.float32 on cpu" in record["failures"]["sdpa cudnn"]
    assert "which FlexAttention does not have on a CPU" in record["failures"]["sdpa flex causal"]


def _fails_at_full_size(monkeypatch, arm):
    function, check = arms.function, arms.check

    def failing(name, chunk):
        def call(*_):
            raise torch.OutOfMemoryError("CUDA out of memory. See /usr/lib/x.md\nand more")

        return call if name == arm else function(name, chunk)

    monkeypatch.setattr(arms, "function", failing)
    monkeypatch.setattr(arms, "check", lambda case, name, call: check(case, name, function(name, case["chunk"])))


def test_an_arm_that_does_not_fit_is_recorded_as_such(monkeypatch):
    _fails_at_full_size(monkeypatch, "favor causal")
    record = measure(EXPERIMENTS["attention-speed"], SETS["main"], "cpu", seconds=0.01)
    assert record["failures"] == {"favor causal": "OutOfMemoryError: CUDA out of memory. See x.md"}
    assert set(record["repetitions"]) == set(arms.SETS["main"]) - {"favor causal"}
    assert "favor causal failed: OutOfMemoryError" in rows.line(record)
    assert "favor causal N=24 failed: OutOfMemoryError" in rows.table([record])


def test_without_the_yardstick_there_is_no_record(monkeypatch):
    _fails_at_full_size(monkeypatch, "sdpa")
    with pytest.raises(RuntimeError, match="sdpa: expected to fit into the device, got OutOfMemoryError"):
        speed.run(SETS["main"], seconds=0.01)


def test_wrong_arms_are_not_timed(monkeypatch):
    right = arms.function
    monkeypatch.setattr(arms, "function", lambda arm, chunk: lambda *x: right(arm, chunk)(*x) * 1.001)
    with pytest.raises(AssertionError, match="sdpa, output: expected a relative error"):
        speed.run(SETS["main"], seconds=0.01)


# ------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("arm", ["favor causal", "linear causal", "cosformer causal"])
def test_a_causal_call_stores_nothing_of_a_state_per_token(arm):
    """The largest tensor holds the features of all tokens (N m numbers) or a state for each chunk (N m V / C); a state
    for each token would take N m V. The memory that is held at once grows like N."""
    H, K, peaks = 2, 32, []
    m = MECHANISMS[arm.split()[0]].fast.feature_map.width(K)
    for N in (512, 1024):
        memory = _memory(arms.function(arm, CHUNK), N, H, K)
        assert memory.largest <= 4 * H * N * max(m, m * K // CHUNK, CHUNK, K)
        assert memory.largest < 4 * H * N * m * K / 8
        peaks.append(memory.peak)
    assert peaks[1] == pytest.approx(2 * peaks[0], rel=0.03)  # the state itself, and the features' rows, do not grow


def test_a_state_per_token_would_be_found_and_the_fused_softmax_keeps_one_number_a_row():
    def cumulative(q, k, v):
        S = (k[..., :, None] * v[..., None, :]).cumsum(-3)  # (B, H, N, K, V)
        return (q[..., None, :] @ S)[..., 0, :]

    N, H, K = 512, 2, 32
    assert _memory(cumulative, N, H, K).largest == 4 * H * N * K * K
    assert _memory(arms.function("sdpa", CHUNK), N, H, K).peak == 4 * H * N * (4 * K + 1)  # o, dq, dk, dv


def _memory(call, N, H, K):
    (q, k, v), upstream = arms.draw(speed.case(N, H=H, K=K))
    for _ in range(2):  # the first call draws the default features
        with Allocations() as memory:
            torch.autograd.grad(call(q, k, v), (q, k, v), upstream)
    return memory
