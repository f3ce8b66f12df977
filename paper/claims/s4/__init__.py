"""Evidence for document S4, sparse and linear attention: one module a group of its sections."""
