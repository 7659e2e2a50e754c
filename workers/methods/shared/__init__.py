"""Helpers that several methods use."""
