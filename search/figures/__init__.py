"""Matplotlib figures of searches, narrow enough to be read on a phone."""
