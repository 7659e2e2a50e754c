"""Comparisons of searches and one-shot baselines over several seeds, with paired tests."""
