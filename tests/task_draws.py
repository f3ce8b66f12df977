"""What the tests of tasks draw, and how they count it."""

from seeded import SIGMAS, generator


def drawn(draw, count, seed=0):
    """Tokens and answers (count, N)."""
    (tokens,), answers = draw(count, generator(seed))
    return tokens, answers


def assert_shares(found, count):
    """Of `count` independent draws, each of these numbers has the share beside it, or all in a tensor have."""
    for what, (counts, share) in found.items():
        spread = (share * (1 - share) / count) ** 0.5
        assert ((counts / count - share).abs() <= SIGMAS * spread).all(), what
