"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

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
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="PATH", help="The search's checkpoint (folder or hub id), if it isn't where the store says."
    ),
]
LoadingOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting of `model.*` or `engine.*` of the search."),
]
DeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"] | None,
    typer.Option("--device", help="Where to hold the model; default: where the search ran, the CPU if it isn't there."),
]
DtypeOption = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option("--dtype", help="Of the parameters; default: the search's."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
IndividualArgument = Annotated[str, typer.Argument(metavar="INDIVIDUAL", help="SEARCH:INDEX, for example demo:137.")]

ConfigArgument = Annotated[Path, typer.Argument(help="Run configuration (YAML).")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. genome.experts=4.")
]
NewStoreOption = Annotated[
    str | None, typer.Option("--store", envvar="MOEVOLVE_STORE", help="SQLAlchemy URL; default: the config's.")
]
SearchArgument = Annotated[str, typer.Argument(help="Name or id of the search.")]
ChangeOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Only `workers.*` and `final.*` may change.")
]
AddressOption = Annotated[
    str | None, typer.Option("--address", help="Ray cluster to join (`auto` or host:port); default: start one here.")
]
InsecureOption = Annotated[
    bool, typer.Option("--insecure", help="Go on although whoever reaches the cluster can run programs on it.")
]
