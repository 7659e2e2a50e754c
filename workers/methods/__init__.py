"""Compression methods: each kind of edit, and how it is applied, calibrated, observed and exported."""
