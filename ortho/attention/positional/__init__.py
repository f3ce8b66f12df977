"""Attention weights made from positions alone, applied by shifts and running sums."""
