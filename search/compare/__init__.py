"""Searches and baselines side by side, several seeds, with paired tests."""
