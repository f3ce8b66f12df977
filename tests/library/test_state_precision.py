"""Narrow states over long sequences: the rounding's size, and errors as derived."""

import pytest
import torch

from ortho import MECHANISMS
from ortho.theory.state_precision import (
    CHUNK,
    STATES,
    chunked,
    expected_error,
    marks,
    operands,
    recurrent,
    relative_errors,
    rounding_error,
)

STRENGTHS = ((0.0, 1.0), (0.0, 2.0), (2.0, 2.0))
STEPS, K = 4096, 8


@pytest.fixture(scope="module")
def run():
    """(operands, marks, exact memories), of a length that takes a second."""
    x, at = operands(STEPS, K, STRENGTHS, generator=torch.Generator().manual_seed(0)), marks(STEPS, 5)
    return x, at, chunked(x, at, torch.float64)


def test_rounding_error():
    """Against normal numbers, 2e6 of them: a relative standard error of some 1e-3 each; four times that is allowed."""
    x = torch.randn(2_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for dtype, bits in ((torch.bfloat16, 8), (torch.float16, 11), (torch.float32, 24)):
        y = x if dtype == torch.float32 else x.float().double()  # a second rounding, far below the first
        measured = float((y.to(dtype).double() - y).norm() / y.norm())
        assert measured == pytest.approx(rounding_error(bits), rel=4e-3)


def test_expected_error_is_its_recursion():
    """e <- r e + u^2 s with s <- r s + 1, for strengths whose r is known by hand."""
    for strengths, r in (((1.0, 1.0), 1 - 1 / K), ((0.0, 2.0), 1 - 2 / 3 / K), ((2.0, 2.0), 1.0)):
        e = s = 0.0
        for _ in range(50):
            s = r * s + 1
            e = r * e + rounding_error(8) ** 2 * s
        assert expected_error(strengths, K, 50, 8) == pytest.approx((e / s) ** 0.5)
    # Rounded once a chunk: as many roundings, with the chunk's decay between them.
    assert expected_error((2.0, 2.0), K, 640, 8, every=64) == expected_error((2.0, 2.0), K, 10, 8)


def test_exact_memories_are_the_recurrence(run):
    x, at, exact = run
    k, v, beta = (operand[:, : at[1]].double() for operand in x)
    k = torch.nn.functional.normalize(k, dim=-1)  # float32's unit keys are some 1e-8 too long for float64's check
    _, (S,) = MECHANISMS["delta"].reference(k, k, v, beta=beta, normalise=False, return_state=True)
    torch.testing.assert_close(exact[1], S, rtol=0, atol=1e-4)


def test_errors_are_as_derived(run):
    """bfloat16's roundings of the memory are all there is to see: within 2, where chance moves errors by about 1/K.

    float32's arithmetic rounds as finely as its state: within 2.5 for a step at a time. A chunk sums up products of
    many tokens, of alternating sign at beta = 2: above what is derived, by less than 30 times.
    """
    x, at, exact = run
    single, narrow = (relative_errors(S, exact) for S in recurrent(x, at, tuple(STATES)))
    in_chunks = relative_errors(chunked(x, at, torch.bfloat16), exact)
    single_chunks = relative_errors(chunked(x, at, torch.float32), exact)
    for i, steps in enumerate(at):
        for run_number, strengths in enumerate(STRENGTHS):
            by_step, by_chunk = (expected_error(strengths, K, steps, 8, every=every) for every in (1, CHUNK))
            assert 0.5 < narrow[i, run_number] / by_step < 2
            assert 0.5 < in_chunks[i, run_number] / by_chunk < 2
            by_step = expected_error(strengths, K, steps, 24)
            assert 0.5 < single[i, run_number] / by_step < 2.5
            assert 0.5 < single_chunks[i, run_number] / by_step < 30
    assert narrow[-1, 0] < 2 * narrow[0, 0]  # errors die out
    assert narrow[-1, 2] > 3 * narrow[0, 2]  # and do not at beta = 2


def test_marks():
    assert marks(STEPS, 5) == [64, 192, 512, 1472, 4096]
    assert all(mark % CHUNK == 0 for mark in marks(100_000))
