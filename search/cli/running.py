"""Commands that run searches, or ask something of those that run."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

import moevolve
from moevolve.search.cli._options import (
    DEFAULT_STORE,
    AddressOption,
    ConfigArgument,
    InsecureOption,
    JsonOption,
    SearchArgument,
    SetOption,
    StoreOption,
)
from moevolve.search.cli._requests import takes
from moevolve.search.cli.output.console import INTERRUPTED, STOPPED, errors, exit_with_message, output, print_json
from moevolve.search.cli.output.final_table import print_standings
from moevolve.search.cli.output.progress import watch
from moevolve.search.requests import (
    CancelRequest,
    PauseRequest,
    ResumeRequest,
    RetryRequest,
    ScaleRequest,
    StopRequest,
)
from moevolve.store.errors import CancelledError
from moevolve.store.session import without_password

if TYPE_CHECKING:
    from moevolve import FinalTable, Observer, RunConfig, Submitted


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

    def run(observer: Observer) -> FinalTable:
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


@takes(ResumeRequest)
def resume(request: ResumeRequest, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """Continue a search from the store: the population comes out as if it had never stopped."""
    _go_on(moevolve.resume, request, store, as_json)


@takes(RetryRequest)
def retry(request: RetryRequest, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """Evaluate individuals again that failed by fault of workers or of time, and all that was made in their sight."""
    _go_on(moevolve.retry, request, store, as_json)


def _go_on(
    verb: Callable[..., FinalTable | None], request: ResumeRequest | RetryRequest, store: str, as_json: bool
) -> None:
    def run(observer: Observer) -> FinalTable | None:
        return verb(store, request.search, overrides=request.overrides, address=request.address, observer=observer)

    follow(run, as_json)


@takes(PauseRequest)
def pause(request: PauseRequest, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    _tell_asked(request.search, moevolve.ask(store, request), "pause", as_json)


@takes(StopRequest)
def stop(request: StopRequest, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    _tell_asked(request.search, moevolve.ask(store, request), "stop", as_json)


@takes(CancelRequest)
def cancel(request: CancelRequest, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    _tell_asked(request.search, moevolve.ask(store, request), "end for good", as_json)


@takes(ScaleRequest)
def scale(request: ScaleRequest, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    asked = [] if request.workers is None else [f"have {request.workers} workers"]
    asked += [] if request.priority is None else [f"run with priority {request.priority}"]
    _tell_asked(request.search, moevolve.ask(store, request), " and ".join(asked), as_json)


def logs(
    search: SearchArgument,
    cluster: Annotated[str, typer.Option("--cluster", metavar="URL", help="The cluster it was submitted to.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until its driver ends.")] = False,
    insecure: InsecureOption = False,
) -> None:
    """Print what the driver of a submitted search wrote. Ctrl-C ends the printing only."""
    with exit_with_message("the search goes on", moevolve.PoolError):
        for piece in moevolve.logs(search, cluster, follow=follow, insecure=insecure):
            typer.echo(piece, nl=False)


def follow(run: Callable[[Observer], FinalTable | None], as_json: bool, stopped: int = STOPPED) -> None:
    """Run a search under a progress bar, then print its final table, if it has come to one.

    From when the search is in the store and begins, Ctrl-C and a lack of workers end it with a line that says how to
    go on.

    Args:
        run: runs it.
        as_json: print the table as JSON.
        stopped: exit code if the search is stopped or cancelled from elsewhere.
    """
    begun: list[RunConfig] = []
    with ExitStack() as stack:
        shown = moevolve.Observer()

        def begin(config: RunConfig) -> None:
            nonlocal shown
            begun.append(config)
            where = shlex.quote(without_password(config.store))
            hint = f"continue with: moevolve resume {config.name} --store {where}"
            told = f"{INTERRUPTED}, {hint}"
            if config.store.startswith("http"):
                told = f"the search goes on; end it with: moevolve stop {config.name} --server {where}"
            stack.enter_context(exit_with_message(told, moevolve.PoolError, hint, stopped=stopped))
            shown = stack.enter_context(watch(config.name))

        found = run(
            moevolve.Observer(
                begin,
                lambda note: errors.print(f"{begun[0].name}: {note}", soft_wrap=True),
                # `shown` is another one by then.
                lambda stage: shown.on_stage(stage),  # noqa: PLW0108
                lambda progress: shown.on_progress(progress),  # noqa: PLW0108
            )
        )
    if found is None:
        return
    if as_json:
        print_json(found)
    else:
        print_standings(found, begun[0].store)


def _tell_asked(search: str, control: moevolve.Control, told: str, as_json: bool) -> None:
    """Say what was asked of whom."""
    if as_json:
        print_json(control)
    elif control.alive:
        output.print(f"{search}: {control.owner} was asked to {told}", soft_wrap=True)
    else:
        output.print(f"{search}: it is cancelled; nobody ran it", soft_wrap=True)
