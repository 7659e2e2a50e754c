"""Genome kinds: what a search varies."""
