"""`logs`."""

from __future__ import annotations

from typing import Annotated

import typer

import moevolve
from moevolve.search.cli._console import told_in_a_line
from moevolve.search.cli._options import InsecureOption, SearchArgument


def logs(
    search: SearchArgument,
    cluster: Annotated[str, typer.Option("--cluster", metavar="URL", help="The cluster it was submitted to.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until its driver ends.")] = False,
    insecure: InsecureOption = False,
) -> None:
    """Print what the driver of a submitted search wrote. Ctrl-C ends the printing only."""
    with told_in_a_line("the search goes on", moevolve.PoolError):
        for piece in moevolve.logs(search, cluster, follow=follow, insecure=insecure):
            typer.echo(piece, nl=False)
