"""Whole models built from the blocks: language models, encoders, encoder and decoder."""
