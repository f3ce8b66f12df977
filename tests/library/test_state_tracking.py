"""What memories keep track of by construction, and what they cannot without negative eigenvalues."""

from math import inf

import pytest
import torch

from ortho import MECHANISMS
from ortho.theory.state_tracking import (
    counter_operands,
    lasts,
    most_right,
    parity_operands,
    read_counts,
    repeat,
    sign_changes,
)

LENGTH = 300


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def numbers(most, seed=0):
    return torch.randint(most, (2, 3, LENGTH), generator=generator(seed))


def answers(name, form, operands):
    return MECHANISMS[name].form(form)(**operands, normalise=False, is_causal=True)


@pytest.mark.parametrize("form", ["reference", "fast"])
def test_parity_is_exact(form):
    """Products of 1 and -1 and sums with 0: no rounding."""
    bits = numbers(2)
    o = answers("delta", form, parity_operands(bits))[..., 0]
    signs = 1 - 2 * (bits.cumsum(-1) % 2)
    assert torch.equal(o[..., 0], torch.ones(2, 3, dtype=o.dtype))
    assert torch.equal(o[..., 1:], signs.double())


@pytest.mark.parametrize("form", ["reference", "fast"])
@pytest.mark.parametrize("m", [2, 3, 5, 12])
def test_counting_round_a_circle(form, m):
    """Each step is off by a few eps of the circle's radius; a count is misread at half a turn by m, pi/12 at least."""
    steps = numbers(m)
    o = answers("delta-product", form, counter_operands(steps, m))
    sums = steps.cumsum(-1) % m
    assert torch.equal(read_counts(o, m)[..., 1:], sums)
    assert torch.equal(read_counts(o, m)[..., 0], torch.zeros_like(sums[..., 0]))
    torch.testing.assert_close(o.norm(dim=-1), torch.ones_like(o[..., 0]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0, 1.7, 2.0])
def test_a_repeated_token(beta):
    """The closed form is the recurrence's, for a key of any length."""
    g = generator()
    S, v, q = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((4, 3), (3,), (4,)))
    k = 0.8 * torch.nn.functional.normalize(torch.randn(4, generator=g, dtype=torch.float64), dim=0)
    steps = 30
    found = MECHANISMS["delta"].reference(
        *(x.expand(steps, -1) for x in (q, k, v)),
        beta=torch.full((steps,), beta, dtype=torch.float64),
        normalise=False,
        is_causal=True,
        initial_state=(S,),
    )
    torch.testing.assert_close(repeat(q, k, v, beta, S, steps), torch.cat([(q @ S)[None], found]))


def test_a_threshold_changes_sides_once_without_negative_eigenvalues():
    """Random tokens, memories, read-outs and thresholds; beyond 1 the same search finds any number of changes."""
    g, steps = generator(), 60
    most = dict.fromkeys((0.2, 0.9, 1.0, 1.9), 0)
    for beta in most:
        for _ in range(100):
            q, k, v = torch.randn(3, 4, generator=g, dtype=torch.float64)
            S = torch.randn(4, 4, generator=g, dtype=torch.float64)
            o = repeat(q, k / k.norm(), v, beta, S, steps) @ torch.randn(4, 5, generator=g, dtype=torch.float64)
            # Thresholds between two values that occur, so that no rounding decides.
            values = o.sort(0).values
            gap = torch.randint(steps, (5,), generator=g)
            threshold = (values[gap, range(5)] + values[gap + 1, range(5)]) / 2
            apart = values[gap + 1, range(5)] - values[gap, range(5)] > 1e-9
            most[beta] = max([most[beta], *sign_changes(o - threshold)[apart].tolist()])
    assert most.pop(1.9) > 20
    assert set(most.values()) == {1}


def test_the_most_that_one_change_of_sides_gets_right():
    """By trying them all."""
    for count in range(1, 12):
        labels = [t % 2 for t in range(count)]
        best = 0
        for change in range(count + 1):
            for side in (0, 1):
                guesses = [side] * change + [1 - side] * (count - change)
                best = max(best, sum(a == b for a, b in zip(guesses, labels, strict=True)))
        assert most_right(count) == best


def test_sign_changes():
    x = torch.tensor([[1.0, -1, 2, 3, -1], [0, 0, 1, 1, 1]]).T
    assert sign_changes(x).tolist() == [3, 1]


def test_how_long_a_turn_lasts():
    """0.9^t falls below a half after ln 2 / ln (1 / 0.9) steps."""
    assert 0.9 ** lasts(1.9, 0.5) == pytest.approx(0.5)
    assert lasts(0.1, 0.5) == pytest.approx(lasts(1.9, 0.5))
    assert lasts(2, 0.5) == lasts(0, 0.5) == inf
    assert lasts(1, 0.5) == 0


@pytest.mark.bad_input
def test_errors():
    with pytest.raises(ValueError, match="m: expected an integer of at least 1, got 0"):
        counter_operands(numbers(2), 0)
    with pytest.raises(ValueError, match="count: expected an integer of at least 1, got 0"):
        most_right(0)
    with pytest.raises(ValueError, match=r"beta: expected a number in \[0, 2\], got 2.5"):
        lasts(2.5, 0.5)
    with pytest.raises(ValueError, match=r"margin: expected a number in \(0, 1\), got 1"):
        lasts(1.5, 1)
