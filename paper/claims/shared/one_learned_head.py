r"""S2, section 4.1: whether projections need to be trained, what one learned head brings, and whether orthogonal
matrices are better than Gaussian ones; by the records of language models of bytes."""

from paper.claims.evidence.one_learned_head import BASELINE, along_budgets, name, part, whole

__all__ = ["BASELINE", "along_budgets", "name", "part", "whole"]
