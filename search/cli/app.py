"""Entry point: the commands, and how errors end them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module

import typer

import moevolve
from moevolve.search.cli._console import errors

COMMANDS = (
    "launch",
    "resume",
    "retry",
    "pause",
    "stop",
    "cancel",
    "scale",
    "logs",
    "plan",
    "compare",
    "searches",
    "best",
    "show",
    "lineage",
    "tasks",
    "evaluate",
    "answers",
    "export",
    "import_eep",
    "profile",
    "plot",
    "analyse",
    "report",
)
"""What a user types, with dashes for underscores: each is a file here with a function of that name."""


def make_app(commands: Iterable[str] = COMMANDS) -> typer.Typer:
    """The command line, in the order of the commands."""
    app = typer.Typer(
        help="Make mixture-of-experts language models smaller and faster for your tasks, using inference only.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
    )
    for name in commands:
        module = import_module(f"moevolve.search.cli.{name}")
        app.command(name.replace("_", "-"))(getattr(module, name))
    return app


app = make_app()


def main(command: typer.Typer = app) -> None:
    """Run the command line. Bad input ends with one line on stderr and exit code 2."""
    try:
        command()
    except (moevolve.UserError, moevolve.StoreError) as error:
        errors.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
