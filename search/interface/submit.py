"""A search whose driver runs on a Ray cluster: sending it there, and reading its log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY
from typing import TYPE_CHECKING, Annotated

from moevolve.search.config.files import as_run_config, override_lines
from moevolve.search.interface.parameters import (
    Insecure,
    NewSearchName,
    NewStore,
    RunFile,
    RunSettings,
    SearchRef,
    given_lines,
)
from moevolve.search.interface.request import Flag, Request, about, record

if TYPE_CHECKING:  # it loads Ray
    from moevolve.search.pools.submit import Submitted


@record
class SubmitRequest(Request):
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
        about("Id of the search; default: made from the request, so that repeating it is safe."),
        Flag("--id"),
    ] = None
    insecure: Insecure = False
    shared_paths: Annotated[bool, about("Send no files: all nodes have model and tasks at the same paths.")] = False

    def answer(self) -> Submitted:
        changes = given_lines({"store": self.store, "name": self.name})
        settings = as_run_config(self.config, (*override_lines(self.overrides), *changes))

        from moevolve.search.pools.submit import submit

        return submit(settings, self.cluster, self.search_id, self.insecure, self.shared_paths)


@record
class LogsRequest(Request):
    """Read what the driver of a submitted search wrote, piece by piece.

    Raises:
        UserError: the cluster can't be reached, or it has no driver of that search.
    """

    search: SearchRef
    cluster: Annotated[str, about("Dashboard of the cluster it was submitted to."), Flag("--cluster", "URL")]
    _: KW_ONLY
    follow: Annotated[bool, about("Go on until the driver ends."), Flag("--follow -f")] = False
    insecure: Insecure = False

    def answer(self) -> Iterator[str]:
        from moevolve.search.pools.submit import logs

        return logs(self.cluster, self.search, self.follow, self.insecure)
