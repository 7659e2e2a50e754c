"""Evolutionary operators on plain arrays, each with the generator it draws from passed in."""
