"""`import-eep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

import moevolve
from moevolve.search.cli._console import print_json, print_table
from moevolve.search.cli._options import DEFAULT_STORE, JsonOption, LoadingOption, StoreOption


def import_eep(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="The EEP authors' coefficient files (.pth).")],
    experts_of: Annotated[
        str,
        typer.Option(
            "--experts-of",
            metavar="MODEL_OR_CONFIG",
            help="What they are for: a checkpoint, a folder with its config.json, or a run configuration.",
        ),
    ],
    active: Annotated[
        int | None, typer.Option("--active", min=1, help="Experts per token; default: the model's.")
    ] = None,
    router_space: Annotated[Literal["probs", "logits"], typer.Option("--router-space")] = "probs",
    overrides: LoadingOption = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Store coefficient files as individuals, one search per file, ready to be shown, evaluated and exported.

    No weights are needed before an individual is run: name them then, with --model. Without a run configuration its
    originals stay on the host, in the checkpoint's dtype, and prompts for a Mixtral are wrapped as the authors do it.
    """
    imported = moevolve.import_eep(
        *files,
        experts_of=experts_of,
        active=active,
        router_space=router_space,
        overrides=overrides or (),
        store=store,
    )
    if as_json:
        print_json(imported)
        return
    rows = [[item.ref, str(item.path), str(item.experts), str(item.groups), item.summary] for item in imported]
    columns = [("individual", False), ("file", False), ("experts", True), ("groups", True), ("genome", False)]
    print_table(None, columns, rows)
