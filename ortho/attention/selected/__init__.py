"""Pairs that are chosen by what queries and keys hold: one file a mechanism."""
