"""Layers: multi-head attention, heads of several kinds, the feed-forward network, experts, the Transformer block."""
