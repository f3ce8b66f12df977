"""The schematic of linear attention shows what the two orders store."""

import matplotlib.pyplot as plt
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from paper.plots import VERMILION
from paper.schematics.kernels import FEATURES, TINTS, TOKENS, VALUES, orders


def test_orders():
    drawn = orders()
    stored = to_rgb(TINTS[VERMILION])
    squares = [patch for patch in drawn.axes[0].patches if isinstance(patch, Rectangle)]
    tinted = [patch for patch in squares if patch.get_facecolor()[:3] == stored]
    # The weights of all pairs of tokens in the first row, the state of m x V numbers in the second.
    assert len(tinted) == TOKENS**2 + FEATURES * VALUES
    # In each row the features of queries and keys, the values and the outputs, beside what is stored.
    assert len(squares) == len(tinted) + 2 * TOKENS * (2 * FEATURES + 2 * VALUES)
    plt.close(drawn)
