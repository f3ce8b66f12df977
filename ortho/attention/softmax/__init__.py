"""Softmax attention: its definition, the fused and the tiled form, and the gradient of the values alone."""
