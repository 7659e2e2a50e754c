"""`launch`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

import moevolve
from moevolve.search.cli._console import STOPPED, errors, output, print_json
from moevolve.search.cli._following import follow
from moevolve.search.cli._options import AddressOption, ConfigArgument, InsecureOption, JsonOption, SetOption
from moevolve.store.errors import CancelledError

if TYPE_CHECKING:
    from moevolve import Observer, Standings, Submitted


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
        bool,
        typer.Option(
            "--or-resume", help="Continue the search of this name if it exists; exit with 0 if it is stopped."
        ),
    ] = False,
    search_id: Annotated[
        str | None, typer.Option("--id", help="Id of the search, which continues if it exists; default: a fresh one.")
    ] = None,
    submit: Annotated[
        str | None,
        typer.Option(
            "--submit", metavar="URL", help="Send the driver to a Ray cluster (http://HEAD:8265), and return at once."
        ),
    ] = None,
    insecure: InsecureOption = False,
    shared_paths: Annotated[
        bool,
        typer.Option("--shared-paths", help="Every node has model and tasks at these paths: submit without files."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Launch a search and follow it to its end, or submit it to a cluster. Ctrl-C leaves it resumable."""
    if submit is not None:
        if address is not None:
            raise moevolve.UserError("--address: with --submit the driver runs on the cluster, and joins that one")
        sent = moevolve.submit(
            config,
            submit,
            store=store,
            name=name,
            overrides=overrides or (),
            search_id=search_id,
            insecure=insecure,
            shared_paths=shared_paths,
        )
        _tell(sent, as_json)
        return

    def run(observer: Observer) -> Standings:
        return moevolve.launch(
            config,
            store=store,
            name=name,
            address=address,
            overrides=overrides or (),
            or_resume=or_resume,
            search_id=search_id,
            observer=observer,
        )

    # Who repeats the command until it succeeds, as cluster managers do, is not to begin again what somebody has ended.
    repeated = or_resume or search_id is not None
    try:
        follow(run, as_json, stopped=0 if repeated else STOPPED)
    except CancelledError as error:
        if not repeated:
            raise
        errors.print(str(error), soft_wrap=True)


def _tell(sent: Submitted, as_json: bool) -> None:
    """Say where a search is, and how to watch it."""
    if as_json:
        print_json(sent)
        return
    if sent.new:
        done = f"was sent to {sent.cluster} as job {sent.job}"
    elif sent.job is not None:
        done = f"is on {sent.cluster} already, as job {sent.job}"
    else:
        done = f"is in the store already: {sent.status}"
    lines = [f"search {sent.name} ({sent.id}) {done}"]
    if sent.job is not None:
        lines.append(f"follow it with: moevolve logs {sent.name} --follow --cluster {sent.cluster}")
    output.print("\n".join(lines), soft_wrap=True)
