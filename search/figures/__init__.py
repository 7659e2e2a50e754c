"""Figures: drawn narrow enough to be read on a phone, given back as matplotlib figures."""
