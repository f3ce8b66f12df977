r"""S0, sections 4.2 to 4.4 and 5.3: the memory of a training step, the cost of inference, and three models."""

from paper.claims.evidence.printed_models import (
    PRECISIONS,
    SCENARIOS,
    SHARE,
    memory,
    millions,
    saved_bytes,
    saved_share,
    whole_limit,
)

__all__ = ["PRECISIONS", "SCENARIOS", "SHARE", "memory", "millions", "saved_bytes", "saved_share", "whole_limit"]
