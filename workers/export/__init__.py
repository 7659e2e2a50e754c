"""Writes edited models as verified checkpoints that plain `transformers` loads."""
