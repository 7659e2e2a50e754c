"""Entry point: the commands, and how errors end them."""

from __future__ import annotations

import sys

import typer

from moevolve.evaluators.errors import UserError
from moevolve.search.cli import (
    analyses,
    checkpoints,
    comparisons,
    listings,
    pictures,
    plans,
    profiles,
    reports,
    searches,
)
from moevolve.search.cli._console import errors
from moevolve.store.errors import StoreError

app = typer.Typer(
    help="Make mixture-of-experts language models smaller and faster for your tasks, using inference only.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for module in (searches, plans, comparisons, listings, checkpoints, profiles, pictures, analyses, reports):
    module.register(app)


def main() -> None:
    """Run the command line. Bad input ends with one line on stderr and exit code 2."""
    try:
        app()
    except (UserError, StoreError) as error:
        errors.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
