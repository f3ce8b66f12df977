"""The evidence that decides each claim: one module per topic, like the chapters. Search for a claim's id to find it."""
