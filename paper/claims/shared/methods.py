r"""S0, sections 3.1, 3.2 and 5.2b: the methods compared, by what they cost and by what they can do."""

from paper.claims.evidence.methods import COSTS, FAVOR_WIDTH, _scores, favor_misplaced, misplaced, unlike_softmax

__all__ = ["COSTS", "FAVOR_WIDTH", "_scores", "favor_misplaced", "misplaced", "unlike_softmax"]
