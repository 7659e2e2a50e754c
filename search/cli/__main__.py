"""Runs the command line as `python -m moevolve.search.cli`, for where the installed script isn't on the path."""

from moevolve.search.cli.app import main

main()
