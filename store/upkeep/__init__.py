"""Maintenance of whole stores: checking, pruning, and copying to another database."""
