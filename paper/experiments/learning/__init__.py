"""What attention can learn: models trained on tasks, arm by arm and seed by seed."""
