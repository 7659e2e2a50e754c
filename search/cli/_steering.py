"""What commands share that ask something of a search that runs elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import moevolve
from moevolve.search.cli._console import output, print_json
from moevolve.search.cli._options import DEFAULT_STORE, JsonOption, SearchArgument, StoreOption


def asking(verb: Callable[..., moevolve.Control], said: str, told: str) -> Callable[..., None]:
    """A command that asks something of a search.

    Args:
        verb: the function of the package that does it.
        said: what `--help` says of the command.
        told: what was asked, for people.
    """

    def command(search: SearchArgument, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
        tell(search, verb(search, store=store), told, as_json)

    command.__doc__ = said
    return command


def tell(search: str, control: moevolve.Control, told: str, as_json: bool) -> None:
    """Say what was asked of whom."""
    if as_json:
        print_json(control)
    elif control.alive:
        output.print(f"{search}: {control.owner} was asked to {told}", soft_wrap=True)
    else:
        output.print(f"{search}: it is cancelled; nobody ran it", soft_wrap=True)
