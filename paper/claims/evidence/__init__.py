"""What decides each claim: one module a topic, as the chapters are; a claim's id is found by a search for it."""
