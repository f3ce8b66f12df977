r"""Learning from little data: a larger batch, the risk of overfitting, fixed and frozen heads.

S0, section 5.1: overfitting is read from the records of language models that had little text to train on. For each run,
the loss on its training text in the last twentieth of the steps is compared with that on the validation part after the
last step. S2, sections 1.3 and 5.2: read from the records of small models that translate German to English and a
made-up language from few pairs, or learn from few bytes of text. Differences are judged by the rule that each record
holds. They are given as gains: bits a byte saved, points of BLEU, or points of sentences without a mistake.
"""

from paper.claims.evidence.low_resource import Amount, gap, long_runs, seen, unseen

__all__ = ["Amount", "gap", "long_runs", "seen", "unseen"]
