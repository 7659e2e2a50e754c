"""Entry point: the commands, and how errors end them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module

import typer

import moevolve
from moevolve.search.cli._console import errors
from moevolve.search.cli._logging import set_up_logging

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
    "serve",
    "db.upgrade",
    "db.check",
    "db.prune",
    "db.copy",
)
"""What a user types, with dashes for underscores, and a space for a dot: each is a file here, or in a folder of the
group's name, with a function of its own name."""


def make_app(commands: Iterable[str] = COMMANDS) -> typer.Typer:
    """The command line, in the order of the commands."""
    app = typer.Typer(
        help="Make mixture-of-experts language models smaller and faster for your tasks, using inference only.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
    )
    groups: dict[str, typer.Typer] = {"": app}
    for name in commands:
        group, _, verb = name.rpartition(".")
        if group not in groups:
            said = import_module(f"moevolve.search.cli.{group}").__doc__
            groups[group] = typer.Typer(help=said, no_args_is_help=True)
            app.add_typer(groups[group], name=group)
        module = import_module(f"moevolve.search.cli.{name}")
        groups[group].command(verb.replace("_", "-"))(getattr(module, verb))
    return app


app = make_app()


def main(command: typer.Typer = app) -> None:
    """Run the command line. Bad input ends with one line on stderr and exit code 2."""
    set_up_logging()
    try:
        command()
    except (moevolve.UserError, moevolve.StoreError) as error:
        errors.print(f"error: {error}", soft_wrap=True)
        sys.exit(2)
