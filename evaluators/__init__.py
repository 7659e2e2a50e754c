"""Tasks: data, prompts, answer matching and metrics."""
