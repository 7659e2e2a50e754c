"""Kinds of fitness: how a model's answers are scored."""
