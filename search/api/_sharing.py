"""Showing searches to others: as a picture, as a page, or over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moevolve._asking import ask
from moevolve.evaluators.errors import UserError
from moevolve.search.operations.opening import opened_reader
from moevolve.search.requests.record import one_line_errors
from moevolve.search.requests.searches import FinalTableRequest, PlotRequest, ReportRequest

if TYPE_CHECKING:
    from moevolve.search.loop.final_table import FinalTable
    from moevolve.search.requests.answers import Analysis
    from moevolve.store.reader import StoreReader


def plot(store: str | StoreReader, search: str, path: str | Path, *, individual: str | None = None) -> None:
    """Draw a search: scores over evaluations, and the searched parameters of an individual.

    Args:
        store: URL of the store, or of a server; or an open store, which is left open.
        search: Name or id of the search.
        path: Picture to write (.png, .svg, .pdf).
        individual: The individual whose genome to draw, `SEARCH:INDEX`; None takes the search's best.

    Raises:
        UserError: there is nothing to draw yet, or the file can't be written.
        StoreError: there is no such store, search or individual.
    """
    with one_line_errors():
        request = PlotRequest(search, individual=individual, form=Path(path).suffix.lstrip("."))  # type: ignore[arg-type]
    _write(Path(path), ask(store, request))


def report(
    store: str | StoreReader,
    search: str,
    path: str | Path,
    *,
    limit: int = 5,
    analysis: Analysis | str | Path | None = None,
) -> FinalTable:
    """Write a page about a search: scores, figures, lineage, cost, how to repeat it. Evaluates nothing.

    Args:
        store: URL of the store, or of a server; or an open store, which is left open.
        search: Name or id of the search.
        path: HTML file to write.
        limit: Number of best individuals to list.
        analysis: An analysis of one of its individuals to show, or the folder that `write_analysis` wrote. A server
            takes none.

    Returns:
        The final table as the page has it; its `gaps` are the missing measurements.

    Raises:
        UserError: the analysis is of another search, or the file can't be written.
        StoreError: there is no such store or search.
    """
    if analysis is None:
        with one_line_errors():
            request = ReportRequest(search, limit=limit)
        _write(Path(path), ask(store, request))
        return ask(store, FinalTableRequest(search))
    from moevolve.search.operations.analyse import read_analysis
    from moevolve.search.report.contents import gather
    from moevolve.search.report.page import render_page

    with opened_reader(store) as opened:
        found = read_analysis(Path(analysis)) if isinstance(analysis, str | Path) else analysis
        contents = gather(opened, search, limit, found)
    _write(Path(path), render_page(contents).encode())
    return contents.standings


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UserError(f"{path}: can't be written: {error.strerror}") from None


def serve(
    settings: str | Path | None = None,
    *,
    store: str | None = None,
    host: str | None = None,
    port: int | None = None,
    hosts: Sequence[str] | None = None,
    tokens: str | Path | None = None,
    on_ready: Callable[[tuple[str, ...]], None] = lambda _: None,
) -> None:
    """Serve a store until the process is stopped: pages for browsers, and an API under /api.

    An argument that is left out takes the settings file's value, or else the default of
    `moevolve.search.server.settings`.

    Args:
        settings: Settings of the server (YAML).
        store: URL of the store, made if need be.
        host: Address to listen at.
        port: Port to listen at; 0 takes a free one.
        hosts: Further host names of the server, instead of the settings'.
        tokens: File of tokens that only its owner may read.
        on_ready: Called with the server's URLs once it can be reached.

    Raises:
        UserError: a setting is wrong, the address can't be listened at, or tokens are needed and there are none.
        StoreError: the store can't be opened.
    """
    from moevolve.search.server.run import serve as run
    from moevolve.search.server.settings import read_settings

    changes = {"store": store, "host": host, "port": port, "hosts": hosts, "tokens": tokens and str(tokens)}
    run(read_settings(None if settings is None else Path(settings), changes), on_ready)
