"""Evidence for document S2, fixed attention patterns and efficient Transformers: one module a group of its sections."""
