"""Entry point of the command line: its commands, and exit codes for errors."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperOption

import moevolve
from moevolve.evaluators.errors import refused_paths
from moevolve.search.cli.output.console import errors

# The groups of commands in the order of `--help`, with the file of each command, which is a function of that name.
# Users type dashes for underscores, and a space for the dot behind the name of a group of its own, which the file's
# docstring describes.
GROUPS: Mapping[str, Mapping[str, str]] = {
    "Start": {
        "shrink": "shrinking",
        **dict.fromkeys(("plan", "launch", "study"), "running"),
        "tasks": "searches",
    },
    "Follow": {
        "watch": "following",
        **dict.fromkeys(("scale", "pause", "stop", "cancel", "resume", "retry"), "running"),
    },
    "Look": {
        **dict.fromkeys(("searches", "show", "best", "pareto", "compare", "effects", "lineage"), "searches"),
        **dict.fromkeys(("answers", "evaluate", "analyse"), "models"),
        **dict.fromkeys(("plot", "report", "serve"), "searches"),
    },
    "Use": dict.fromkeys(("export", "profile", "recipe", "apply"), "checkpoints"),
    "Maintain": {
        "import_eep": "checkpoints",
        **dict.fromkeys(("db.upgrade", "db.check", "db.prune", "db.copy"), "db"),
    },
}
COMMANDS: Mapping[str, str] = {name: file for group in GROUPS.values() for name, file in group.items()}

# Commands to begin with, by the verb whose help shows them.
_EXAMPLES = {
    "shrink": (
        "moevolve shrink ./model --data chats.jsonl --experts 50% -o small",
        "moevolve shrink ./model --data alpaca.json --size 16GiB --time 2h",
        "moevolve shrink ./model --data q.csv --columns prompt=q,answer=a --experts 4",
    ),
    "plan": ("moevolve plan run.yaml --pilot 20", "moevolve plan run.yaml --model mixtral-8x7b"),
    "launch": ("moevolve launch run.yaml --set genome.experts=4 --name second",),
    "watch": ("moevolve watch demo",),
    "resume": ("moevolve resume demo",),
    "searches": ("moevolve searches --status running", "moevolve searches --sort test"),
    "show": ("moevolve show demo", "moevolve show demo:137", "moevolve show demo:137 --genome"),
    "best": ("moevolve best --task boolq --experts 4", "moevolve best --search demo"),
    "pareto": ("moevolve pareto boolq", "moevolve pareto boolq --size active_parameters"),
    "answers": ("moevolve answers demo:137 --task boolq", "moevolve answers demo:137 --task boolq --only lost"),
    "export": ("moevolve export demo:137 ./smaller",),
    "profile": ("moevolve profile demo:137",),
    "db.copy": ("moevolve db copy demo --to sqlite:///copy.db",),
    "db.prune": ("moevolve db prune demo --dry-run",),
}


def _placeholder(parameter: Any, ctx: object) -> str | None:
    """Return what stands in help for an option's value; None for flags, and for arguments, which have names."""
    if isinstance(parameter, TyperArgument) or parameter.is_flag:
        return None
    return parameter.metavar or parameter.display_type(ctx)


for _kind in (TyperArgument, TyperOption):
    # Typer shows Python's types instead: <bool> behind a flag, <list[str]> behind an argument.
    setattr(_kind, "display_type_rich", _placeholder)  # noqa: B010


def make_app(commands: Mapping[str, str] = COMMANDS) -> typer.Typer:
    """Make the command line, with the commands in this order."""
    panels = {name: title for title, group in GROUPS.items() for name in group}
    app = typer.Typer(
        no_args_is_help=True, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
    )
    app.callback()(_about)
    groups: dict[str, typer.Typer] = {"": app}
    for name, file in commands.items():
        group, _, verb = name.rpartition(".")
        module = import_module(f"moevolve.search.cli.{file}")
        if group not in groups:
            groups[group] = typer.Typer(no_args_is_help=True)
            app.add_typer(groups[group], name=group, help=module.__doc__, rich_help_panel=panels.get(name))
        examples = _EXAMPLES.get(name)
        groups[group].command(
            verb.replace("_", "-"),
            rich_help_panel=None if group else panels.get(name),
            epilog=None if examples is None else "\n  ".join(("\b\nExamples:", *examples)),
        )(getattr(module, verb))
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moevolve {version('moevolve')}")
        raise typer.Exit


def _about(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Make mixture-of-experts and dense language models smaller and faster for your tasks, using inference only."""


app = make_app()


def main(command: typer.Typer = app) -> None:
    """Run the command line. Bad input ends with one line on stderr and exit code 2."""
    try:
        with refused_paths():
            command()
    except (moevolve.UserError, moevolve.StoreError) as error:
        errors.print(f"error: {error}", soft_wrap=True)
        sys.exit(2)
