"""Evidence for document S0, orthogonal random attention's complexity analysis: one module a group of its sections."""
