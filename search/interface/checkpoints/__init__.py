"""Use cases that write or read checkpoints: exports, recipes, imported coefficients, and profiles."""
