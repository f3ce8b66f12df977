"""Evidence for document S3, linear attention's cost and DeltaNet: one module a group of its sections."""
