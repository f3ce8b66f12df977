"""What memories recall, by closed forms, draws and hand; narrow states over long sequences; what a state can track."""

from math import inf

import pytest
import torch
from seeded import generator

from ortho import MECHANISMS
from ortho.theory.estimates import SIGMAS, estimate
from ortho.theory.transitions import unit_keys
from paper.theory import delta_memory
from paper.theory.delta_memory import operands

# --------------------------------------------------------------------------------------------------------------- recall


def error_of(*args, **gates):
    return delta_memory.expected_answer(*args, **gates).error


@pytest.mark.parametrize("memory", ["linear", "delta"])
@pytest.mark.parametrize(
    ("K", "pairs", "beta", "decay"),
    [(1, 3, 1.0, 1.0), (2, 5, 1.0, 1.0), (4, 12, 1.0, 1.0), (4, 12, 0.6, 1.0), (4, 6, 2.0, 1.0), (6, 14, 1.5, 0.9)],
)
def test_drawn_errors_have_the_expected_mean(memory, K, pairs, beta, decay):
    """100 means in all, each beyond SIGMAS with probability 1e-5: a false alarm in 1 of 1,000 seeds."""
    gates = {"beta": beta, "decay": decay}
    found = delta_memory.sampled_errors(memory, K, pairs, draws=4000, generator=generator(), **gates)
    for age, error in enumerate(found):
        expected = error_of(memory, K, pairs, age, **gates)
        if age == 0 and beta == 1 and memory == "delta":
            assert expected == 0
            assert error.value < 1e-28  # the square of rounding
        else:
            assert abs(error.deviation(expected)) < SIGMAS
            assert error.standard_error < 0.1 * (1 + expected)


@pytest.mark.parametrize("memory", ["linear", "delta"])
def test_the_product_with_the_own_value_has_the_expected_mean(memory):
    """8 means, each beyond SIGMAS with probability 1e-5: a false alarm in 1 of 12,500 seeds."""
    gates = {"beta": 0.8, "decay": 0.95}
    k = unit_keys(4000, 8, 4, generator=generator())
    v = torch.randn(4000, 8, 16, generator=generator(1), dtype=torch.float64)
    products = (delta_memory.answers(memory, k, v, **gates) * v).mean(-1)
    for age, column in enumerate(products.flip(-1).mT):
        assert abs(estimate(column).deviation(delta_memory.expected_answer(memory, 4, 8, age, **gates).own)) < SIGMAS


@pytest.mark.parametrize("memory", ["linear", "delta"])
def test_the_best_multiple_of_the_answers(memory):
    """No other multiple has a smaller error, and the linear memory's error is that of a Wiener filter."""
    K, pairs = 8, 12
    found = [delta_memory.expected_answer(memory, K, pairs, age) for age in range(5)]
    own, square = (sum(values) / 5 for values in zip(*found, strict=True))
    least = delta_memory.mean_error(memory, K, pairs, last=5, scaled=True)
    errors = [1 - 2 * c * own + c**2 * square for c in torch.linspace(0, 2, 1001).tolist()]
    assert least <= min(errors) < least + 1e-5
    assert delta_memory.mean_error(memory, K, pairs, last=5) == pytest.approx(1 - 2 * own + square)
    assert delta_memory.mean_error("linear", K, pairs, scaled=True) == pytest.approx((pairs - 1) / (K + pairs - 1))


def test_by_hand():
    """In one dimension keys are +1 or -1: the delta rule answers every key with the last value or its negative."""
    assert error_of("delta", 1, 3, 0) == 0
    for age in (1, 2):
        assert error_of("delta", 1, 3, age) == pytest.approx(2)
        assert error_of("linear", 1, 3, age) == 2
    # Two pairs in two dimensions, query for the first: (1 - w_1)^2 + w_2^2 with w_1 = sin^2 and w_2 = cos of the angle.
    assert error_of("delta", 2, 2, 1) == pytest.approx(3 / 8 + 1 / 2)


@pytest.mark.parametrize("K", [4, 16, 64])
def test_the_printed_forms(K):
    rho, sigma = 1 - 1 / K, 1 - 2 * (K + 1) / (K * (K + 2))
    for pairs in (1, 2, K, 4 * K):
        for age in {0, pairs // 2, pairs - 1}:
            assert error_of("linear", K, pairs, age) == pytest.approx((pairs - 1) / K)
            printed = 2 * (1 - rho**age) - rho**pairs * (1 - (sigma / rho) ** age)
            assert error_of("delta", K, pairs, age) == pytest.approx(printed, abs=1e-12)


def test_a_decay_bounds_the_error_of_the_oldest():
    """The error is 1 for the lost value plus the sum of the later pairs' squared weights, 1 / K / (1 - decay^2 rho)."""
    K, decay = 16, 0.9
    rest = 1 / K / (1 - decay**2 * (1 - 1 / K))
    assert error_of("delta", K, 2000, 1500, decay=decay) == pytest.approx(1 + rest)
    assert error_of("delta", K, 2000, 1500) == pytest.approx(2)


def test_orthonormal_keys_are_recalled_by_both():
    """Exact up to rounding of K = 16 terms."""
    k = torch.linalg.qr(torch.randn(16, 16, generator=generator(), dtype=torch.float64))[0]
    v = torch.randn(16, 3, generator=generator(1), dtype=torch.float64)
    for memory in ("linear", "delta"):
        assert (delta_memory.answers(memory, k, v) - v).abs().max() < 1e-13
    twice, later = torch.cat([k, k]), torch.cat([v, 2 * v])
    assert (delta_memory.answers("linear", twice, later)[:16] - 3 * v).abs().max() < 1e-13
    assert (delta_memory.answers("delta", twice, later)[:16] - 2 * v).abs().max() < 1e-13


def test_decays_weigh_the_last_pair_with_beta_alone():
    k, v = unit_keys(1, 4, generator=generator()), torch.ones(1, 2, dtype=torch.float64)
    for memory in ("linear", "delta"):
        torch.testing.assert_close(delta_memory.answers(memory, k, v, beta=0.5, decay=0.1), 0.5 * v)


@pytest.mark.parametrize("memory", ["linear", "delta"])
def test_capacity_is_the_last_number_below_the_error(memory):
    for K, error in ((8, 0.1), (16, 0.5)):
        pairs = delta_memory.capacity(memory, K, error)
        assert delta_memory.mean_error(memory, K, pairs) <= error < delta_memory.mean_error(memory, K, pairs + 1)
    assert delta_memory.capacity("linear", 64, 0.5) == 33
    assert delta_memory.capacity("linear", 64, 0.1, beta=0.5) == 0  # even a single pair gives only half of its value


# -------------------------------------------------------------------------------------------------------- narrow states


STRENGTHS = ((0.0, 1.0), (0.0, 2.0), (2.0, 2.0))
STEPS, WIDTH = 4096, 8


@pytest.fixture(scope="module")
def run():
    """(operands, marks, exact memories), at a length that takes a second."""
    x, at = operands(STEPS, WIDTH, STRENGTHS, generator=torch.Generator().manual_seed(0)), delta_memory.marks(STEPS, 5)
    return x, at, delta_memory.chunked(x, at, torch.float64)


def test_rounding_error():
    """Measured on 2e6 normal numbers, with a relative standard error of about 1e-3; four times that is allowed."""
    x = torch.randn(2_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for dtype, bits in ((torch.bfloat16, 8), (torch.float16, 11), (torch.float32, 24)):
        y = x if dtype == torch.float32 else x.float().double()  # a second rounding, far below the first
        measured = float((y.to(dtype).double() - y).norm() / y.norm())
        assert measured == pytest.approx(delta_memory.rounding_error(bits), rel=4e-3)


def test_expected_error_is_its_recursion():
    """The recursion is e <- r e + u^2 s with s <- r s + 1, for strengths with r known by hand."""
    for strengths, r in (((1.0, 1.0), 1 - 1 / WIDTH), ((0.0, 2.0), 1 - 2 / 3 / WIDTH), ((2.0, 2.0), 1.0)):
        e = s = 0.0
        for _ in range(50):
            s = r * s + 1
            e = r * e + delta_memory.rounding_error(8) ** 2 * s
        assert delta_memory.expected_error(strengths, WIDTH, 50, 8) == pytest.approx((e / s) ** 0.5)
    # Rounded once per chunk: the same number of roundings, with a chunk's decay between them.
    assert delta_memory.expected_error((2.0, 2.0), WIDTH, 640, 8, every=64) == delta_memory.expected_error(
        (2.0, 2.0), WIDTH, 10, 8
    )


def test_exact_memories_are_the_recurrence(run):
    x, at, exact = run
    k, v, beta = (operand[:, : at[1]].double() for operand in x)
    k = torch.nn.functional.normalize(k, dim=-1)  # float32's unit keys are about 1e-8 too long for float64's check
    _, (S,) = MECHANISMS["delta"].reference(k, k, v, beta=beta, qk_l2norm=False, return_state=True)
    torch.testing.assert_close(exact[1], S, rtol=0, atol=1e-4)


def test_errors_are_as_derived(run):
    """In bfloat16 only roundings of the memory matter: within a factor of 2, as chance moves errors by about 1/WIDTH.

    float32's arithmetic rounds as finely as its state: within a factor of 2.5 for one step at a time. A chunk sums
    products of many tokens, with alternating signs at beta = 2: less than 30 times the derived error.
    """
    x, at, exact = run
    single, narrow = (
        delta_memory.relative_errors(S, exact) for S in delta_memory.recurrent(x, at, tuple(delta_memory.STATES))
    )
    in_chunks = delta_memory.relative_errors(delta_memory.chunked(x, at, torch.bfloat16), exact)
    single_chunks = delta_memory.relative_errors(delta_memory.chunked(x, at, torch.float32), exact)
    for i, steps in enumerate(at):
        for run_number, strengths in enumerate(STRENGTHS):
            by_step, by_chunk = (
                delta_memory.expected_error(strengths, WIDTH, steps, 8, every=every)
                for every in (1, delta_memory.CHUNK)
            )
            assert 0.5 < narrow[i, run_number] / by_step < 2
            assert 0.5 < in_chunks[i, run_number] / by_chunk < 2
            by_step = delta_memory.expected_error(strengths, WIDTH, steps, 24)
            assert 0.5 < single[i, run_number] / by_step < 2.5
            assert 0.5 < single_chunks[i, run_number] / by_step < 30
    assert narrow[-1, 0] < 2 * narrow[0, 0]  # errors decay
    assert narrow[-1, 2] > 3 * narrow[0, 2]  # but not at beta = 2


def test_marks():
    assert delta_memory.marks(STEPS, 5) == [64, 192, 512, 1472, 4096]
    assert all(mark % delta_memory.CHUNK == 0 for mark in delta_memory.marks(100_000))


# ------------------------------------------------------------------------------------------------------- state tracking


LENGTH = 300


def numbers(most, seed=0):
    return torch.randint(most, (2, 3, LENGTH), generator=generator(seed))


def tracked(name, form, operands):
    return MECHANISMS[name].form(form)(**operands, qk_l2norm=False, is_causal=True)


@pytest.mark.parametrize("form", ["reference", "fast"])
def test_parity_is_exact(form):
    """The outputs are products of 1 and -1 and sums with 0, without rounding."""
    bits = numbers(2)
    o = tracked("delta", form, delta_memory.parity_operands(bits))[..., 0]
    signs = 1 - 2 * (bits.cumsum(-1) % 2)
    assert torch.equal(o[..., 0], torch.ones(2, 3, dtype=o.dtype))
    assert torch.equal(o[..., 1:], signs.double())


@pytest.mark.parametrize("form", ["reference", "fast"])
@pytest.mark.parametrize("m", [2, 3, 5, 12])
def test_counting_round_a_circle(form, m):
    """Each step is off by a few eps of the circle's radius; a count is misread only if off by half a turn by m, pi/12
    at least."""
    steps = numbers(m)
    o = tracked("delta-product", form, delta_memory.counter_operands(steps, m))
    sums = steps.cumsum(-1) % m
    assert torch.equal(delta_memory.read_counts(o, m)[..., 1:], sums)
    assert torch.equal(delta_memory.read_counts(o, m)[..., 0], torch.zeros_like(sums[..., 0]))
    torch.testing.assert_close(o.norm(dim=-1), torch.ones_like(o[..., 0]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0, 1.7, 2.0])
def test_a_repeated_token(beta):
    """The closed form equals the recurrence, also for a key that is not of unit length."""
    g = generator()
    S, v, q = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((4, 3), (3,), (4,)))
    k = 0.8 * torch.nn.functional.normalize(torch.randn(4, generator=g, dtype=torch.float64), dim=0)
    steps = 30
    found = MECHANISMS["delta"].reference(
        *(x.expand(steps, -1) for x in (q, k, v)),
        beta=torch.full((steps,), beta, dtype=torch.float64),
        qk_l2norm=False,
        is_causal=True,
        initial_state=(S,),
    )
    torch.testing.assert_close(delta_memory.repeat(q, k, v, beta, S, steps), torch.cat([(q @ S)[None], found]))


def test_a_threshold_changes_sides_once_without_negative_eigenvalues():
    """For random tokens, memories, read-outs and thresholds; for beta above 1 the same search finds many changes."""
    g, steps = generator(), 60
    most = dict.fromkeys((0.2, 0.9, 1.0, 1.9), 0)
    for beta in most:
        for _ in range(100):
            q, k, v = torch.randn(3, 4, generator=g, dtype=torch.float64)
            S = torch.randn(4, 4, generator=g, dtype=torch.float64)
            o = delta_memory.repeat(q, k / k.norm(), v, beta, S, steps) @ torch.randn(
                4, 5, generator=g, dtype=torch.float64
            )
            # Thresholds lie between two values that occur, so that rounding does not decide.
            values = o.sort(0).values
            gap = torch.randint(steps, (5,), generator=g)
            threshold = (values[gap, range(5)] + values[gap + 1, range(5)]) / 2
            apart = values[gap + 1, range(5)] - values[gap, range(5)] > 1e-9
            most[beta] = max([most[beta], *delta_memory.sign_changes(o - threshold)[apart].tolist()])
    assert most.pop(1.9) > 20
    assert set(most.values()) == {1}


def test_the_most_that_one_change_of_sides_gets_right():
    """The closed form equals the best of all guesses that change sides once."""
    for count in range(1, 12):
        labels = [t % 2 for t in range(count)]
        best = 0
        for change in range(count + 1):
            for side in (0, 1):
                guesses = [side] * change + [1 - side] * (count - change)
                best = max(best, sum(a == b for a, b in zip(guesses, labels, strict=True)))
        assert delta_memory.most_right(count) == best


def test_sign_changes():
    x = torch.tensor([[1.0, -1, 2, 3, -1], [0, 0, 1, 1, 1]]).T
    assert delta_memory.sign_changes(x).tolist() == [3, 1]


def test_how_long_a_turn_lasts():
    """0.9^t falls below a half after ln 2 / ln (1 / 0.9) steps."""
    assert 0.9 ** delta_memory.lasts(1.9, 0.5) == pytest.approx(0.5)
    assert delta_memory.lasts(0.1, 0.5) == pytest.approx(delta_memory.lasts(1.9, 0.5))
    assert delta_memory.lasts(2, 0.5) == delta_memory.lasts(0, 0.5) == inf
    assert delta_memory.lasts(1, 0.5) == 0
