"""The schematics of layers show what the package does."""

import matplotlib.pyplot as plt
import torch
from matplotlib.patches import Rectangle
from seeded import generator

from ortho import InductionHeads
from paper.schematics.heads import heads_of_several_kinds, induction_pairs
from paper.schematics.tiles import attention_by_tiles, tile_states


def test_induction_pairs():
    # With orthogonal tokens, a head as wide as the tokens gives its pairs a score, and no score to all others.
    assert induction_pairs("abca") == [(3, 1)]
    letters = "abcabc"
    x = torch.eye(3, dtype=torch.float64)[["abc".index(letter) for letter in letters]]
    q, k = InductionHeads(3, 1, generator=generator(), dtype=torch.float64).projection(x[None])
    scores = (q[0, 0] @ k[0, 0].T).tril()
    high = scores > scores.max() / 2  # other tokens have score 0
    assert [tuple(pair) for pair in high.nonzero().tolist()] == induction_pairs(letters)


def test_heads_of_several_kinds():
    drawn = heads_of_several_kinds()
    squares = [patch for patch in drawn.axes[0].patches if isinstance(patch, Rectangle)]
    tinted = [patch for patch in squares if patch.get_facecolor()[:3] != (1, 1, 1)]
    # Six tokens: all pairs of the past, each token before, and the pairs of the induction head.
    assert (len(squares), len(tinted)) == (3 * 36, 21 + 5 + len(induction_pairs("abcabc")))
    plt.close(drawn)


def test_tile_states():
    states = tile_states(4, (2, 1))
    assert states[0] == ["done", "never", "never", "never"]
    assert states[2] == ["done", "now", "to come", "never"]
    assert states[3] == ["to come"] * 4


def test_attention_by_tiles():
    drawn = attention_by_tiles()
    squares = [patch for patch in drawn.axes[0].patches if isinstance(patch, Rectangle)]
    assert len(squares) == 25 + 3 * 5  # tiles of scores; of keys, of queries and of the output
    plt.close(drawn)
