"""The paper's apparatus: claims and verdicts, tasks, training, experiments, figures. Runs from the source tree."""
