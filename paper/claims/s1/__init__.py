"""Evidence for document S1, methods of optimising Transformers: one module a group of its sections."""
