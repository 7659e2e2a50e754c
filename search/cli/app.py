"""Entry point of the command line: its commands, its log, and exit codes for errors."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import import_module

import typer

import moevolve
from moevolve.search.cli.output.console import errors
from moevolve.search.running.observer import SEARCH

VARIABLE = "MOEVOLVE_LOG"


class JsonFormatter(logging.Formatter):
    """Formats a record as a line of JSON: time, level, logger and message; search, individual and exception if any."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "search": getattr(record, "search", None) or SEARCH.get(),
            "individual": getattr(record, "individual", None),
            "exception": self.formatException(record.exc_info) if record.exc_info else None,
        }
        return json.dumps({key: value for key, value in fields.items() if value is not None})


def set_up_logging() -> None:
    """Set up logging: MOEVOLVE_LOG=json writes records from level `info` on to stderr."""
    if os.environ.get(VARIABLE) == "json":
        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter())
        logging.basicConfig(level=logging.WARNING, handlers=[handler])
        logging.getLogger("moevolve").setLevel(logging.INFO)


COMMANDS = {
    "shrink": "shrinking",
    **dict.fromkeys(("launch", "resume", "retry", "pause", "stop", "cancel", "scale", "logs"), "running"),
    **dict.fromkeys(("plan", "study"), "running"),
    **dict.fromkeys(
        ("searches", "label", "compare", "effects", "best", "pareto", "show", "lineage", "tasks"),
        "searches",
    ),
    **dict.fromkeys(("evaluate", "answers"), "models"),
    **dict.fromkeys(("export", "recipe", "apply", "import_eep", "profile"), "checkpoints"),
    "plot": "searches",
    "analyse": "models",
    **dict.fromkeys(("report", "serve"), "searches"),
    **dict.fromkeys(("db.upgrade", "db.check", "db.prune", "db.copy"), "db"),
}
"""File of each command, which is a function of that name. Users type dashes for underscores, and a space for the dot
behind the name of a group, which the file's docstring describes."""


def make_app(commands: Mapping[str, str] = COMMANDS) -> typer.Typer:
    """Make the command line, with the commands in this order."""
    app = typer.Typer(
        help="Make mixture-of-experts language models smaller and faster for your tasks, using inference only.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    groups: dict[str, typer.Typer] = {"": app}
    for name, file in commands.items():
        group, _, verb = name.rpartition(".")
        module = import_module(f"moevolve.search.cli.{file}")
        if group not in groups:
            groups[group] = typer.Typer(help=module.__doc__, no_args_is_help=True)
            app.add_typer(groups[group], name=group)
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
