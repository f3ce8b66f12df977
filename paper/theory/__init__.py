"""Exact figures and simulations that single chapters need, beside those of `ortho.theory`."""
