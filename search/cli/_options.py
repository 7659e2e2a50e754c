"""Options that most commands have."""

from __future__ import annotations

from typing import Annotated

import typer

from moevolve.search.requests.parameters import SERVER_VARIABLE, STORE_VARIABLE

DEFAULT_STORE = "sqlite:///moevolve.db"

StoreOption = Annotated[
    str,
    typer.Option(
        "--store",
        "--server",
        envvar=[SERVER_VARIABLE, STORE_VARIABLE],
        help="SQLAlchemy URL of the store, or http(s) URL of a server.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
