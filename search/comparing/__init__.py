"""Comparisons: several searches and baselines side by side, for several tasks and budgets."""
