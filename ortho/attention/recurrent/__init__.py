"""States that are written to, erased from and read: the delta rule, gated linear attention, test-time training."""
