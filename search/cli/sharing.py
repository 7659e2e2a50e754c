"""Commands that show searches to others: as a picture, as a page, or as a site."""

from __future__ import annotations

import os

import moevolve
from moevolve.search.cli._requests import DEFAULT_STORE, StoreOption, takes
from moevolve.search.cli.output.console import output
from moevolve.search.requests.searches import PlotFileRequest, ReportFileRequest
from moevolve.search.requests.stores import ServeRequest


@takes(PlotFileRequest)
def plot(request: PlotFileRequest, store: StoreOption = DEFAULT_STORE) -> None:
    moevolve.plot(store, **request.arguments())
    output.print(f"wrote {request.path}")


@takes(ReportFileRequest)
def report(request: ReportFileRequest, store: StoreOption = DEFAULT_STORE) -> None:
    # Notes on rows that were set aside need the tasks' data, which must not be downloaded for them.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    found = moevolve.report(store, **request.arguments())
    output.print(f"wrote {request.path}", soft_wrap=True)
    for gap in found.gaps if found.tasks else ():
        output.print(f"not measured: {gap.what}; {gap.command}", soft_wrap=True)


@takes(ServeRequest)
def serve(request: ServeRequest) -> None:
    def on_ready(urls: tuple[str, ...]) -> None:
        output.print(f"serving at {', '.join(urls)}; Ctrl-C stops it", soft_wrap=True)

    moevolve.serve(**request.arguments(), on_ready=on_ready)
