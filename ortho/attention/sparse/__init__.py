"""Sparse attention whose pairs depend on positions alone: one file a pattern, and attention over these pairs only."""
