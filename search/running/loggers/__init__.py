"""Programs that keep experiments, and what a search tells them."""
