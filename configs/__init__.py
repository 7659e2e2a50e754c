"""Data of the package: run, task and model configurations and the demo models."""
