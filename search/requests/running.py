"""Requests that launch searches, continue them, and control those that are running."""

from __future__ import annotations

from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, InstanceOf

from moevolve.search.config.run import RunConfig
from moevolve.search.requests.parameters import (
    SERVER_VARIABLE,
    SETTINGS,
    STORE_VARIABLE,
    Insecure,
    NewStore,
    Overrides,
    RayAddress,
    RunSettings,
    SearchRef,
)
from moevolve.search.requests.record import Flag, Request, about, record
from moevolve.store.repository import Store

if TYPE_CHECKING:  # the answers
    from collections.abc import Iterator

    from moevolve.search.loop.final_table import FinalTable
    from moevolve.store.records import Control

RunFile = Annotated[
    str | Path | InstanceOf[RunConfig], about("Run configuration (YAML)."), Flag(metavar="CONFIG", kind=Path)
]
"""What to search. Python also takes a configuration that was read before."""
NewSearchName = Annotated[str | None, about("Name of the search; the configuration's if left out.")]


@record
class LaunchRequest(Request["FinalTable"]):
    """Launch a search and follow it to its end. Interrupting it leaves it resumable.

    The answer is the winner and the final table.

    Raises:
        UserError: the configuration asks for something that can't be had, or the name is taken.
        StoreError: the store can't be opened, or the search to continue was cancelled.
        PoolError: no worker can be started; `resume` continues the search.
    """

    config: RunFile
    _: KW_ONLY
    overrides: RunSettings = ()
    store: Annotated[
        str | InstanceOf[Store] | None,
        about(
            "SQLAlchemy URL of the store, made if need be; the configuration's if left out. Or "
            "http(s) URL of a server, which launches its own configuration of this name."
        ),
        Flag("--store --server", kind=str, variables=(SERVER_VARIABLE, STORE_VARIABLE)),
    ] = None
    name: NewSearchName = None
    address: RayAddress = None
    or_resume: Annotated[
        bool, about("Continue the search of this name if it exists. The command exits with 0 if it is stopped.")
    ] = False
    search_id: Annotated[
        str | None, about("Id of the search, which continues if it exists; a fresh one if left out."), Flag("--id")
    ] = None


@record
class SubmitRequest(Request[Any]):  # its answer, `Submitted`, is of a package above this one
    """Send a search's driver to a Ray cluster and return at once. Repeated requests send it once.

    The job takes along what it needs: this package, task files, and a local folder of a model if it is small.

    Raises:
        UserError: the configuration asks for something that can't be had or sent, another search has the name or the
            id, or the cluster can't be reached.
    """

    config: RunFile
    cluster: Annotated[
        str,
        about("Send the driver to the Ray cluster with this dashboard (http://HEAD:8265)."),
        Flag("--submit", "URL"),
    ]
    _: KW_ONLY
    overrides: RunSettings = ()
    store: NewStore = None
    name: NewSearchName = None
    search_id: Annotated[
        str | None,
        about("Id of the search; made from the request if left out, so that repeating it is safe."),
        Flag("--id"),
    ] = None
    insecure: Insecure = False
    shared_paths: Annotated[bool, about("Send no files: all nodes have model and tasks at the same paths.")] = False


@record
class LogsRequest(Request["Iterator[str]"]):
    """Read what the driver of a submitted search wrote, piece by piece.

    Raises:
        UserError: the cluster can't be reached, or it has no driver of that search.
    """

    search: SearchRef
    cluster: Annotated[str, about("Dashboard of the cluster it was submitted to."), Flag("--cluster", "URL")]
    _: KW_ONLY
    follow: Annotated[bool, about("Go on until the driver ends."), Flag("--follow -f")] = False
    insecure: Insecure = False


@record
class ResumeRequest(Request["FinalTable | None"]):
    """Continue a search from the store; the population comes out as if it had never stopped.

    The answer is its final table, or None for a search that was paused: it goes on where it runs.

    Raises:
        UserError: model, tasks or settings are not what the search was launched with.
        StoreError: there is no such store or search, another process runs it, or it was cancelled.
        PoolError: no worker can be had; try again.
    """

    search: SearchRef
    _: KW_ONLY
    overrides: Annotated[Overrides, about("Change settings of `workers.*` or `final.*`."), SETTINGS] = ()
    address: RayAddress = None


@record
class RetryRequest(ResumeRequest):
    """Evaluate individuals again that failed because of workers or time limits, and all later ones that saw them.

    The answer is the search's final table, or None if there is nothing to retry.

    Raises:
        UserError, StoreError, PoolError: as `resume`.
    """


@record
class PauseRequest(Request["Control"]):
    """Ask a running search to release its workers and wait; `resume` lets it go on where it runs.

    Evaluations in progress are made again later. No individual changes by that.

    Raises:
        StoreError: there is no such store or search, or no process runs it.
    """

    search: SearchRef


@record
class StopRequest(Request["Control"]):
    """Ask a running search to end, as Ctrl-C does at its terminal; `resume` continues it.

    Raises:
        StoreError: there is no such store or search, or no process runs it.
    """

    search: SearchRef


@record
class CancelRequest(Request["Control"]):
    """End a search for good, whether it is running or not; what it evaluated stays in the store.

    Raises:
        StoreError: there is no such store or search.
        UserError: the search is finished or cancelled already.
    """

    search: SearchRef


@record
class ScaleRequest(Request["Control"]):
    """Change the number of workers or the priority of a running search; no individual changes by that.

    Raises:
        StoreError: there is no such store or search, or no process runs it.
        UserError: neither is given.
    """

    needs_one = ("workers", "priority")
    search: SearchRef
    workers: Annotated[int | None, about("Number of workers from now on.", ge=1, le=100_000)] = None
    _: KW_ONLY
    priority: Annotated[
        int | None, about("Searches that share a cluster get workers in the order of priority.", ge=-1000, le=1000)
    ] = None
