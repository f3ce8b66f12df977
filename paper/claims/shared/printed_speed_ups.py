r"""S0, sections 3.3 and 4.1: the printed operations and speed-ups, the rules that give them, and what counts allow."""

from paper.claims.evidence.printed_speed_ups import HEAD_WIDTH, RANGES, SPEED_UPS, limit, sides, table_rule

__all__ = ["HEAD_WIDTH", "RANGES", "SPEED_UPS", "limit", "sides", "table_rule"]
