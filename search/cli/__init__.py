"""The moevolve command line."""

from moevolve.search.cli.app import main

__all__ = ["main"]
