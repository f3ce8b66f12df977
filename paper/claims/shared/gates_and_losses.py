r"""S3, section 3, improvements 1, 2 and 5: gates, heads, updates of higher rank; and losses beyond least squares.

The source names Huber's loss and a contrastive one, but neither their constants nor a task. Here delta is about
three standard deviations of one number of the noise on the values. Steps and temperatures are those that do best on
other draws, without outliers.
"""

from paper.claims.evidence.gates_and_losses import OVERWRITTEN, gained, more_right

__all__ = ["OVERWRITTEN", "gained", "more_right"]
