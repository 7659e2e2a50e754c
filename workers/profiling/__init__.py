"""The size, memory and speed of models, counted and measured."""
