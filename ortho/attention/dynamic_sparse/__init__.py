"""Mechanisms that select pairs by the contents of queries and keys: one file for each."""
