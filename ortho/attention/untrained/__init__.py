"""Weights that are made of positions alone, applied by shifts and running sums."""
