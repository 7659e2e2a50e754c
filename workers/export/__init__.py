"""Edited models as checkpoints that plain `transformers` loads."""
