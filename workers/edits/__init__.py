"""Edits: the per-layer changes a worker makes to its resident model."""
