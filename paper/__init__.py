"""The paper's apparatus: claims and verdicts, tasks, training, experiments, plots. Runs from the source tree."""
