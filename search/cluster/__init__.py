"""Searches sent to a Ray cluster as jobs, with the files that they need."""
