"""Pairs that are kept by their positions: one file a pattern, and attention that computes those pairs alone."""
