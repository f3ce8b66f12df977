"""The experiment attention-speed: right before it is timed, in turn, what fails is recorded; on a CPU and on CUDA."""

import pytest
import torch
from experiment_fakes import SLUG, within
from tiny_arms import ALL, SETS, TINY

from ortho.attention.chunking import CHUNK
from ortho.attention.linear.feature_maps import HORIZON
from ortho.cost.counting import Allocations
from paper import experiments
from paper.experiments import Experiment, measure
from paper.experiments.engine import records
from paper.experiments.speed import attention as speed
from paper.experiments.speed import attention_analysis as rows
from paper.experiments.speed import attention_variants as arms
from paper.experiments.speed import (
    flash as flash_speed,
)
from paper.experiments.speed import (
    memory as memory_speed,
)
from paper.experiments.speed import (
    patterns as pattern_speed,
)


@pytest.fixture(scope="module", autouse=True)
def at_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(speed.CALL_SECONDS, "cpu", 1e-3)
        yield


@pytest.fixture(scope="module")
def measured(at_once):
    return measure(speed.ATTENTION_SPEED, SETS["main"], "cpu", seconds=0.01)


def test_every_arm_runs_once_a_repetition_in_a_drawn_order(measured):
    orders = measured["facts"]["order"]
    assert all(sorted(order) == sorted(arms.SETS["main"]) for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert speed.REPETITIONS["cpu"][0] <= len(orders) <= speed.REPETITIONS["cpu"][1]
    for arm in arms.SETS["main"]:
        quantities = measured["repetitions"][arm]
        assert set(quantities) == {f"{p}{c}_s" for p in ("forward", "backward") for c in ("", "_cpu")}
        assert {len(values) for values in quantities.values()} == {len(orders)}
        facts = measured["facts"][arm]
        assert facts["calls"] >= 1
        assert facts["peak_bytes"] >= facts["largest_bytes"] > 0


def test_a_timing_is_the_mean_of_its_calls(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(speed.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(speed.time, "process_time", lambda: 0.0)
    ran = []
    operands, upstream = arms.draw(SETS["main"])
    call = arms.function("linear", 8)
    times = speed.timed(lambda *x: ran.append(1) or call(*x), operands, upstream, 4)
    assert len(ran) == 4
    assert times == {"forward_s": 1.0, "forward_cpu_s": 0.0, "backward_s": 1.0, "backward_cpu_s": 0.0}


class OnCuda(torch.Tensor):
    """Says of itself that it lies on CUDA."""

    is_cuda = True


@pytest.fixture
def cuda(monkeypatch):
    """A CUDA device whose events are a millisecond apart; what was called, in order."""
    called, ticks = [], iter(range(10**6))

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(ticks)
            called.append("event")

        def elapsed_time(self, other):
            return float(other.at - self.at)

    def draw(case, *arm):
        operands, upstream = drawn({**case, "device": "cpu"}, *arm)
        return tuple(x.detach().as_subclass(OnCuda).requires_grad_() for x in operands), upstream.as_subclass(OnCuda)

    drawn = arms.draw
    monkeypatch.setattr(arms, "draw", draw)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    held = {"memory_allocated": 100, "max_memory_allocated": 180, "reset_peak_memory_stats": None}
    for name, value in held.items():
        monkeypatch.setattr(torch.cuda, name, lambda name=name, value=value: called.append(name) or value)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: called.append(name))
    return called


@pytest.mark.unchecked
def test_on_cuda_time_comes_from_events_behind_an_untimed_call(cuda):
    operands, upstream = arms.draw(SETS["main"])
    ran = []
    call = arms.function("linear causal", 8)
    times = speed.timed(lambda *x: ran.append(1) or call(*x), operands, upstream, 2)
    assert times == {"forward_s": 0.001, "backward_s": 0.001}
    assert len(ran) == 3
    assert cuda == 9 * ["event"] + ["synchronize"]  # nothing is waited for between the calls


@pytest.mark.unchecked
def test_a_case_on_cuda(cuda):
    case = speed.case(24, device="cuda", dtype="bfloat16", **TINY)
    outcome = speed.run(case, seconds=0.01)
    for arm in arms.SETS["main"]:
        assert set(outcome["repetitions"][arm]) == {"forward_s", "backward_s"}
        assert outcome["facts"][arm]["peak_bytes"] == 80
        assert outcome["facts"][arm]["calls"] == 5  # two milliseconds each, of the ten that a timing should take
    assert not outcome["failures"]
    assert cuda.count("empty_cache") == len(arms.SETS["main"])
    assert cuda.index("memory_allocated") < cuda.index("reset_peak_memory_stats") < cuda.index("max_memory_allocated")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", arms.SETS)
@pytest.mark.parametrize("dtype", speed.RATES["cuda"])
def test_a_case_runs_on_cuda(name, dtype):
    case = speed.case(256, name, device="cuda", dtype=dtype, compiled=name in ("main", "delta"))
    record = measure(memory_speed.MEMORY_SPEED, case, "cuda", seconds=0.05)
    assert not record["failures"]
    assert set(arms.arms_of(case)) <= set(record["repetitions"])
    assert all(record["facts"][arm]["peak_bytes"] > 0 for arm in record["repetitions"])


def test_a_kernel_that_does_not_serve_is_recorded_as_such():
    """On a CPU, of the kernels by their names, one materialises and one is fused."""
    record = measure(flash_speed.FLASH_SPEED, SETS["kernels"], "cpu", seconds=0.01)
    ways = ("", " causal")
    served = {f"sdpa{kernel}{way}" for kernel in ("", " math", " flash") for way in ways}
    assert set(record["repetitions"]) == served
    assert set(record["failures"]) == set(arms.SETS["kernels"]) - served
    assert "expected one that serves torch.float32 on cpu" in record["failures"]["sdpa cudnn"]
    assert "which FlexAttention does not have on a CPU" in record["failures"]["sdpa flex causal"]


def test_an_arm_that_does_not_fit_is_recorded_as_such(monkeypatch):
    _fails_at_full_size(monkeypatch, "favor causal")
    record = measure(speed.ATTENTION_SPEED, SETS["main"], "cpu", seconds=0.01)
    assert record["failures"] == {"favor causal": "OutOfMemoryError: CUDA out of memory. See x.md"}
    assert set(record["repetitions"]) == set(arms.SETS["main"]) - {"favor causal"}
    assert "favor causal failed: OutOfMemoryError" in rows.line(record)
    assert "favor causal N=24 failed: OutOfMemoryError" in rows.table([record])


def test_without_the_yardstick_there_is_no_record(monkeypatch):
    _fails_at_full_size(monkeypatch, "sdpa")
    with pytest.raises(RuntimeError, match="sdpa: expected to fit into the device, got OutOfMemoryError"):
        speed.run(SETS["main"], seconds=0.01)


def _fails_at_full_size(monkeypatch, arm):
    function, check = arms.function, arms.check

    def failing(name, chunk):
        def call(*_):
            raise torch.OutOfMemoryError("CUDA out of memory. See /usr/lib/x.md\nand more")

        return call if name == arm else function(name, chunk)

    monkeypatch.setattr(arms, "function", failing)
    monkeypatch.setattr(arms, "check", lambda case, name, call: check(case, name, function(name, case["chunk"])))


def test_a_compiler_that_fails_or_is_off_is_recorded_as_such(monkeypatch):
    def compiler(call, **_):
        compiled.append(call)
        if len(compiled) == 1:
            raise RuntimeError("no kernel in /usr/lib/x/kernel.so\nand more")
        return lambda *x: call(*x) * (2 if len(compiled) == 2 else 1)

    compiled = []
    monkeypatch.setattr(torch, "compile", compiler)
    record = measure(speed.ATTENTION_SPEED, {**SETS["main"], "compiled": True}, "cpu", seconds=0.01)
    assert record["failures"]["linear compiled"] == "RuntimeError: no kernel in kernel.so"
    assert "linear causal compiled, output: expected a relative error" in record["failures"]["linear causal compiled"]
    assert set(record["repetitions"]) == {*arms.SETS["main"], "favor compiled", "favor causal compiled"}
    found = {row["arm"]: row for row in rows.rows([record])}
    assert found["favor causal compiled"]["flops_ratio"] == found["favor causal"]["flops_ratio"]


def test_wrong_arms_are_not_timed(monkeypatch):
    right = arms.function
    monkeypatch.setattr(arms, "function", lambda arm, chunk: lambda *x: right(arm, chunk)(*x) * 1.001)
    with pytest.raises(AssertionError, match="sdpa, output: expected a relative error"):
        speed.run(SETS["main"], seconds=0.01)


@pytest.mark.parametrize(
    "experiment",
    [speed.ATTENTION_SPEED, memory_speed.MEMORY_SPEED, pattern_speed.PATTERN_SPEED, flash_speed.FLASH_SPEED],
    ids=lambda experiment: experiment.name,
)
def test_the_sources_are_all_that_a_timed_call_runs(experiment):
    with Allocations():  # the first of its kind imports much of PyTorch, which need not be watched
        torch.zeros(1)
    sets = {case["arms"] for case in experiment.cases("cpu")}
    for case, arm in ((case, arm) for case, arm in ALL if case["arms"] in sets):
        operands, upstream = arms.draw(case, arm)
        call = arms.function(arm, case["chunk"])
        with within(experiment), Allocations():
            speed.timed(call, operands, upstream, 1)


@pytest.mark.parametrize("module", [speed, memory_speed, pattern_speed, flash_speed])
def test_the_arms_that_readers_need_are_in_every_case(module):
    (experiment,) = (x for x in vars(module).values() if isinstance(x, Experiment) and x.cases is module.cases)
    for case in (*module.cases("cpu"), *module.cases("cuda")):
        assert set(experiment.needs.arms) <= set(arms.arms_of(case))


def test_cases_on_cuda_have_few_chunks_and_positions_below_the_horizon():
    for case in speed.cases("cuda"):
        assert case["N"] % case["chunk"] == 0
        assert case["N"] // case["chunk"] <= (16 if case["compiled"] and case["N"] > 16 * CHUNK else 128)
        assert case["arms"] != "family" or case["N"] <= HORIZON
    assert max(case["N"] for case in speed.cases("cuda")) == 131072


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"arms": "all"}, "arms: expected one of"), ({"N": 0}, "N: "), ({"dtype": "int8"}, "dtype: expected one of")],
)
def test_an_impossible_case_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        speed.case(**{"N": 8, **wrong})


def test_memories_on_cuda_have_few_chunks_and_on_a_cpu_go_far():
    for case in memory_speed.cases("cuda"):
        assert case["N"] % case["chunk"] == 0
        assert case["N"] // case["chunk"] <= (64 if case["compiled"] else 128)
    assert max(case["N"] for case in memory_speed.cases("cpu") if case["arms"] == "delta alone") == 32768


def test_without_a_yardstick_there_is_no_ratio():
    """And no crossing, but growth."""
    case = SETS["delta alone"]
    record = measure(memory_speed.MEMORY_SPEED, case, "cpu", seconds=0.01)
    found = rows.rows([record])
    assert [row["arm"] for row in found] == list(arms.SETS["delta alone"])
    assert all(row["ratio"] is row["ratio_alike"] is row["bytes_ratio"] is None for row in found)
    longer = [record | {"configuration": {**case, "N": N}} for N in (2048, 4096, 8192)]
    assert rows.crossovers(longer) == []
    assert len(rows.growth(longer)) == 2
    assert "gated-delta causal -" in rows.line(record)


def test_gates_are_timed_and_checked_with_the_operands(monkeypatch):
    """An arm's gradient of a gate that is off is found."""
    case = SETS["delta"]
    operands, _ = arms.draw(case, "gated-delta causal")
    assert [x.shape for x in operands[3:]] == 2 * [operands[0].shape[:-1]]
    assert all(x.requires_grad for x in operands)
    assert torch.equal(operands[1], arms.draw(case)[0][1])  # q, k and v are those of the other arms
    right = arms.function("delta causal", 8)
    with pytest.raises(AssertionError, match="delta causal, gradient of beta: expected a relative error"):
        arms.check(case, "delta causal", lambda q, k, v, beta: right(q, k, v, beta.detach() + 1e-9 * beta))


def test_the_view_prints_ratios_and_crossovers(measured, tmp_path, capsys):
    file = records.path(tmp_path, "attention-speed", SLUG)
    records.write(file, [measured | {"configuration": {**SETS["main"], "N": N}} for N in (2048, 4096, 8192)])
    assert experiments.main(["--show", "attention-speed", "--results", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    loaded = experiments.load("attention-speed", tmp_path)
    for row in rows.rows(loaded):
        low, middle, high = row["ratio"]
        assert f"{middle:.4f} [{low:.4f}, {high:.4f}]" in text
    assert "main float32 favor: N^-0.00 in time" in text or "main float32 favor: N^0.00 in time" in text
    for row in rows.crossovers(loaded):
        assert f"main float32 {row['arm']}: faster than sdpa {rows.in_words(row['yardstick'])}" in text
