"""Tasks and their scores: data, prompts, answer matching, fitness and metrics."""
