"""Evolutionary operators, one per file: pure functions with the generator passed in."""
