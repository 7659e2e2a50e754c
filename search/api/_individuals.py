"""What searches found: asked for, run again, written as checkpoints, drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from moevolve.search.operations.opening import opened_reader

if TYPE_CHECKING:
    from moevolve.evaluators.tasks.config import TaskConfig
    from moevolve.search.loop.final_table import FinalTable
    from moevolve.search.operations.analyse import Analysis
    from moevolve.store.reader import StoreReader


def tasks() -> list[TaskConfig]:
    """The tasks that can be named in a configuration, by name.

    Raises:
        UserError: a folder in `MOEVOLVE_TASKS` doesn't exist, or a task's file is wrong.
    """
    from moevolve.evaluators.preparation.registry import list_tasks, load_task

    return [load_task(name) for name in list_tasks()]


def write_analysis(analysis: Analysis, folder: str | Path) -> list[Path]:
    """Write an analysis and its figures into a folder, which is made if need be; `analysis.json` is the first file.

    Raises:
        UserError: the folder can't be written.
    """
    from moevolve.search.operations import analyse as service

    return service.write_analysis(analysis, Path(folder))


def export_coefficients(store: str | StoreReader, individual: str, path: str | Path) -> None:
    """Write an EEP individual as a coefficient file (.pth) of the EEP authors' format.

    Raises:
        UserError: the file exists, or the individual can't be said in one.
        StoreError: no such store or individual.
    """
    from moevolve.search.operations import export as service

    with opened_reader(store) as opened:
        service.export_coefficients(opened, individual, Path(path))


def plot(store: str | StoreReader, search: str, path: str | Path, *, individual: str | None = None) -> None:
    """Draw a search: score over evaluations, and what was searched of an individual.

    Args:
        store: URL of the store, or of a server; or an open store, which is left open.
        search: name or id of the search.
        path: picture to write (.png, .svg, .pdf).
        individual: whose genome to draw; None takes the search's best.

    Raises:
        UserError: there is nothing to draw yet, or the file can't be written.
        StoreError: no such store, search or individual.
    """
    from moevolve._asking import ask
    from moevolve.search.requests import PlotRequest, refused_in_a_line

    with refused_in_a_line():
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
    """Write a page about a search: scores, figures, lineage, cost, how to do it again. Evaluates nothing.

    Args:
        store: URL of the store, or of a server; or an open store, which is left open.
        search: name or id of the search.
        path: HTML file to write.
        limit: how many of the best individuals are listed.
        analysis: of one of its individuals, or the folder that `write_analysis` wrote, to be shown too. A server takes
            none.

    Returns:
        The final table as the page has it; its `gaps` are what isn't measured.

    Raises:
        UserError: the analysis is of another search, or the file can't be written.
        StoreError: no such store or search.
    """
    from moevolve._asking import ask
    from moevolve.search.requests import ReportRequest, StandingsRequest, refused_in_a_line

    if analysis is None:
        with refused_in_a_line():
            request = ReportRequest(search, limit=limit)
        _write(Path(path), ask(store, request))
        return ask(store, StandingsRequest(search))
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
        from moevolve.evaluators.errors import UserError

        raise UserError(f"{path}: can't be written: {error.strerror}") from None


def as_data(record: Any) -> Any:
    """A record, or a collection of them, as what JSON knows: what the command of the same name prints with `--json`."""
    from moevolve.search.operations import data

    return data.as_data(record)
