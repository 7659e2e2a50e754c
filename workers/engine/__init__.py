"""Runs the resident model on prompts: batches, forward passes, decoding and scores."""
