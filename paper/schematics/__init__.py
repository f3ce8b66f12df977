"""Schematic pictures, one module per family of mechanisms: what goes where, before any formula."""
