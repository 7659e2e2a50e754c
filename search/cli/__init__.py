"""The moevolve command line."""
