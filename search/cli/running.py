"""Commands that plan searches, run them and studies of several, and control running ones."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

import moevolve
from moevolve.search.cli._requests import DEFAULT_STORE, JsonOption, StoreOption, asked, shows, takes
from moevolve.search.cli.output.console import (
    INTERRUPTED,
    STOPPED,
    errors,
    exit_with_message,
    output,
    print_json,
)
from moevolve.search.cli.output.final_table import print_final_table
from moevolve.search.cli.output.progress import print_line, watch
from moevolve.search.interface.control import CancelRequest, PauseRequest, ScaleRequest, StopRequest
from moevolve.search.interface.plan import EstimateRequest
from moevolve.search.interface.running import LaunchRequest, ResumeRequest, RetryRequest, StudyRequest
from moevolve.store.errors import CancelledError
from moevolve.store.session import without_password

if TYPE_CHECKING:
    from moevolve import Control, FinalTable, RunConfig

T = TypeVar("T")


@takes(LaunchRequest)
def launch(request: LaunchRequest, as_json: JsonOption = False) -> None:
    """Launch a search and follow it to its end. Ctrl-C leaves it resumable."""
    # Cluster managers repeat the command until it succeeds. They must not restart a search that a user ended.
    stopped = 0 if request.or_resume else STOPPED
    try:
        follow(partial(moevolve.ask, None, request), as_json, stopped)
    except CancelledError as error:
        if not request.or_resume:
            raise
        errors.print(str(error), soft_wrap=True)


@takes(ResumeRequest)
def resume(request: ResumeRequest, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    follow(partial(moevolve.ask, store, request), as_json)


@takes(RetryRequest)
def retry(request: RetryRequest, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    follow(partial(moevolve.ask, store, request), as_json)


@shows(PauseRequest)
def pause(control: Control, request: PauseRequest) -> None:
    _print_asked(request.search, control, "pause")


@shows(StopRequest)
def stop(control: Control, request: StopRequest) -> None:
    _print_asked(request.search, control, "stop")


@shows(CancelRequest)
def cancel(control: Control, request: CancelRequest) -> None:
    _print_asked(request.search, control, "end for good")


@shows(ScaleRequest)
def scale(control: Control, request: ScaleRequest) -> None:
    _print_asked(request.search, control, f"have {request.workers} workers")


def _print_asked(search: str, control: Control, asked: str) -> None:
    """Print the request and the process that it went to."""
    if control.alive:
        output.print(f"{search}: {control.owner} was asked to {asked}", soft_wrap=True)
    else:
        output.print(f"{search}: cancelled; nobody ran it", soft_wrap=True)


@takes(EstimateRequest)
def plan(request: EstimateRequest, as_json: JsonOption = False) -> None:
    with exit_with_message("interrupted; nothing was stored", moevolve.PoolError):
        found = asked(None, request)
    if as_json:
        print_json(found)
        return
    # Imported late, since it loads what estimates are made with.
    from moevolve.search.cli.output.plan import print_plan

    print_plan(found)


@takes(StudyRequest)
def study(
    request: StudyRequest,
    out: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Also write the tables, with all splits, as Markdown."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run searches and baselines side by side and print one table. Ctrl-C leaves it resumable: run it again."""
    read = request.study()
    # Checked before hours of searches rather than after.
    if out is not None and not out.parent.is_dir():
        raise moevolve.UserError(f"{out}: the folder {out.parent} doesn't exist")
    if out is not None and (out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK)):
        raise moevolve.UserError(f"{out}: can't be written; give the path of a file")
    hint = "run the same command again to go on"
    with exit_with_message(f"{INTERRUPTED}, {hint}", moevolve.PoolError, hint):
        rows = moevolve.ask(None, StudyRequest(read), moevolve.Observer(on_note=print_line))
    # Imported late, since it loads what studies are made with.
    from moevolve.search.cli.output.study import print_tables, write_markdown

    if out is not None:
        write_markdown(read.name, rows, out)
    if as_json:
        print_json(rows)
    else:
        print_tables(read.name, rows)


def follow(run: Callable[..., FinalTable | None], as_json: bool, stopped: int = STOPPED) -> None:
    """Run a search with a progress bar, then print its final table if there is one.

    Args:
        run: Runs the search; takes its observer as `observer`.
        as_json: Print the table as JSON.
        stopped: Exit code if the search is stopped or cancelled from elsewhere.
    """
    found, config = watched(run, stopped)
    if found is None:
        return
    if as_json:
        print_json(found)
    else:
        assert config is not None
        print_final_table(found, config.store)


def watched(
    run: Callable[..., T], stopped: int = STOPPED, again: str | None = None, name: str | None = None
) -> tuple[T, RunConfig | None]:
    """Run a search with a progress bar; returns its answer, and its configuration if it has begun.

    Once the search is in the store and begins, Ctrl-C and a lack of workers end it with a line on how to continue.

    Args:
        run: Runs the search; takes its observer as `observer`.
        stopped: Exit code if the search is stopped or cancelled from elsewhere.
        again: Line on how to continue; None for the command that resumes the search.
        name: What to show before the search begins, for a run that does much before; None shows nothing before.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a start that is stopped takes its processes along
    begun: list[RunConfig] = []
    with ExitStack() as stack:
        names = [] if name is None else [name]
        shown = stack.enter_context(watch(name)) if name else moevolve.Observer()

        def begin(config: RunConfig) -> None:
            nonlocal shown
            begun.append(config)
            where = shlex.quote(without_password(config.store))
            hint = again or f"continue with: moevolve resume {config.name} --store {where}"
            message = f"{INTERRUPTED}, {hint}"
            stack.enter_context(exit_with_message(message, moevolve.PoolError, hint, stopped=stopped))
            if not names:
                names.append(config.name)
                shown = stack.enter_context(watch(config.name))

        found = run(
            observer=moevolve.Observer(
                begin,
                lambda note: errors.print(": ".join([*names, note]), soft_wrap=True),
                # `shown` is replaced when the search begins.
                lambda stage: shown.on_stage(stage),  # noqa: PLW0108
                lambda progress: shown.on_progress(progress),  # noqa: PLW0108
            )
        )
    return found, begun[0] if begun else None
