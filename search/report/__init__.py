"""A page about one search."""
