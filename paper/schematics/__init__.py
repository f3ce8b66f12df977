"""Schematic pictures, one module a family of mechanisms: what goes where, before any formula."""
