"""Pairs that are selected by what queries and keys hold: one file a mechanism."""
