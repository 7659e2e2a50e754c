"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_STORE = "sqlite:///moevolve.db"

StoreOption = Annotated[
    str,
    typer.Option(
        "--store",
        "--server",
        envvar=["MOEVOLVE_SERVER", "MOEVOLVE_STORE"],
        help="SQLAlchemy URL of the store, or http(s) URL of a server.",
        show_envvar=True,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
ConfigArgument = Annotated[Path, typer.Argument(help="Run configuration (YAML).")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. genome.experts=4.")
]
NewStoreOption = Annotated[
    str | None, typer.Option("--store", envvar="MOEVOLVE_STORE", help="SQLAlchemy URL; default: the config's.")
]
SearchArgument = Annotated[str, typer.Argument(help="Name or id of the search.")]
AddressOption = Annotated[
    str | None, typer.Option("--address", help="Ray cluster to join (`auto` or host:port); default: start one here.")
]
InsecureOption = Annotated[
    bool, typer.Option("--insecure", help="Go on although whoever reaches the cluster can run programs on it.")
]
