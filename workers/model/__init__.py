"""Facts about a model from its config, and the loaded model that edits are applied to."""
