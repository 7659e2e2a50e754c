"""Comparing generated text with the accepted answers."""
