"""Strategies: how the next individual is made from the visible history."""
