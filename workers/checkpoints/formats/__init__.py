"""Formats of quantised weights, one file per format."""
