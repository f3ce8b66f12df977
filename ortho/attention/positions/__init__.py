"""Attention that knows of order: rotary embeddings, ALiBi, FoX, PaTH, the positional delta rule."""
