"""Attention that depends on token order: rotary embeddings, ALiBi, FoX, PaTH, the positional delta rule."""
