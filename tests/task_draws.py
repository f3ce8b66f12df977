"""Draws for the tests of tasks, and how their shares are tested."""

from seeded import SIGMAS, generator


def drawn(draw, count, seed=0):
    """Tokens and answers (count, N)."""
    (tokens,), answers = draw(count, generator(seed))
    return tokens, answers


def assert_shares(found, count):
    """Assert that each number (or each in a tensor) of `count` independent draws has the share beside it."""
    for what, (counts, share) in found.items():
        spread = (share * (1 - share) / count) ** 0.5
        assert ((counts / count - share).abs() <= SIGMAS * spread).all(), what
