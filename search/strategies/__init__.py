"""Strategies: they make the next individual from the history that it may depend on."""
