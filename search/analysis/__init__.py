"""Analyses of what a store holds: what moved scores in a search."""
