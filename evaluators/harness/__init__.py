"""Tasks of lm-evaluation-harness."""
