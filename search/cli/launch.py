"""`launch`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

import moevolve
from moevolve.search.cli._following import follow
from moevolve.search.cli._options import AddressOption, ConfigArgument, JsonOption, SetOption

if TYPE_CHECKING:
    from moevolve import Observer, Standings


def launch(
    config: ConfigArgument,
    overrides: SetOption = None,
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            "--server",
            envvar=["MOEVOLVE_SERVER", "MOEVOLVE_STORE"],
            help="SQLAlchemy URL; default: the config's. Or http(s) URL of a server, which knows CONFIG by name.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the search; default: the config's.")] = None,
    address: AddressOption = None,
    or_resume: Annotated[
        bool, typer.Option("--or-resume", help="Continue the search of this name if it exists.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Launch a search and follow it to its end. Ctrl-C leaves it resumable."""

    def run(observer: Observer) -> Standings:
        return moevolve.launch(
            config,
            store=store,
            name=name,
            address=address,
            overrides=overrides or (),
            or_resume=or_resume,
            observer=observer,
        )

    follow(run, as_json)
