"""`python -m moevolve.search.cli`: the command line, where the installed script isn't on the path."""

from moevolve.search.cli.app import main

main()
