"""Runs the resident model over prompts: batches, passes, decoding, scores."""
