"""The command that follows a search from its first to its last evaluation, wherever it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

import moevolve
from moevolve.search.cli._requests import DEFAULT_STORE, StoreOption, takes
from moevolve.search.cli.output.console import STOPPED, errors, exit_with_message, output
from moevolve.search.cli.output.final_table import print_final_table
from moevolve.search.cli.output.progress import watch as bar_of
from moevolve.search.interface.control import WatchRequest
from moevolve.search.interface.progress import describe
from moevolve.search.interface.searches import FinalTableRequest

if TYPE_CHECKING:
    from moevolve import SearchState


@takes(WatchRequest)
def watch(request: WatchRequest, store: StoreOption = DEFAULT_STORE) -> None:
    """Follow a search until it ends. Ctrl-C ends the watching only; the search goes on."""
    with exit_with_message("the search goes on", ()):
        last = _follow(request, store)
    state, reason = (told(last.control.alive) for told in (last.search.state, last.search.reason))
    output.print(f"{last.search.name}: {state}{f' ({reason})' if reason else ''}", soft_wrap=True)
    if last.search.status == "finished":
        print_final_table(moevolve.ask(store, FinalTableRequest(request.search)), store)
        return
    raise typer.Exit(STOPPED if last.search.status in ("interrupted", "cancelled") else 1)


def _follow(request: WatchRequest, store: str) -> SearchState:
    """Show every state of a search: on a terminal as a bar, elsewhere as a line for each change; return the last."""
    states = moevolve.ask(store, request)
    if errors.is_terminal:
        with bar_of(request.search) as bar:
            for state in states:
                progress = state.control.progress
                bar.on_stage(_doing(state))
                if progress is not None:
                    bar.on_progress(progress)
        return state
    shown = None
    for state in states:
        progress = state.control.progress
        key = (_doing(state), None if progress is None else (progress.done, progress.best, progress.failed))
        if key != shown and not state.ended:
            line = "" if progress is None else f" {progress.done}/{progress.total} {describe(progress)}"
            output.print(f"{request.search}: {_doing(state)}{line}", soft_wrap=True)
        shown = key
    return state


def _doing(state: SearchState) -> str:
    """Return a search's activity: its driver's stage, or else its status, and the state that users desire."""
    control, status = state.control, state.search.status
    doing = control.stage or status if status == "running" else status
    asked = control.desired_state
    return doing if asked in ("running", status) else f"{doing} (asked to be {asked})"
