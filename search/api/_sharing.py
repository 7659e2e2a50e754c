"""Showing searches to others: as a picture, as a page, or over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from moevolve._asking import ask, takes, takes_store
from moevolve.evaluators.errors import UserError
from moevolve.search.operations.opening import opened_reader
from moevolve.search.requests.record import one_line_errors, record
from moevolve.search.requests.searches import (
    FinalTableRequest,
    PlotFileRequest,
    PlotRequest,
    ReportFileRequest,
    ReportRequest,
)
from moevolve.search.requests.stores import ServeRequest

if TYPE_CHECKING:
    from moevolve.search.loop.final_table import FinalTable
    from moevolve.store.reader import StoreReader


@takes_store(PlotFileRequest)
def plot(store: str | StoreReader, asked: PlotFileRequest) -> None:
    with one_line_errors():
        form = asked.path.suffix.lstrip(".")
        request = PlotRequest(asked.search, individual=asked.individual, form=form)  # type: ignore[arg-type]
    _write(asked.path, ask(store, request))


@takes_store(ReportFileRequest)
def report(store: str | StoreReader, asked: ReportFileRequest) -> FinalTable:
    if asked.analysis is None:
        _write(asked.path, ask(store, ReportRequest(asked.search, limit=asked.limit)))
        return ask(store, FinalTableRequest(asked.search))
    from moevolve.search.analysis.analyse import read_analysis
    from moevolve.search.report.contents import gather
    from moevolve.search.report.page import render_page

    with opened_reader(store) as opened:
        found = read_analysis(asked.analysis) if isinstance(asked.analysis, Path) else asked.analysis
        contents = gather(opened, asked.search, asked.limit, found)
    _write(asked.path, render_page(contents).encode())
    return contents.standings


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UserError(f"{path}: can't be written: {error.strerror}") from None


@record
class _Serve(ServeRequest):
    __doc__ = ServeRequest.__doc__
    _: KW_ONLY
    on_ready: Annotated[
        Callable[[tuple[str, ...]], None],
        Field(description="Called with the server's URLs once it can be reached."),
    ] = lambda _: None


@takes(_Serve)
def serve(asked: _Serve) -> None:
    from moevolve.search.server.run import serve as run
    from moevolve.search.server.settings import read_settings

    names = ("store", "host", "port", "hosts", "tokens")
    changes = {name: getattr(asked, name) for name in names}
    run(read_settings(asked.settings, changes), asked.on_ready)
