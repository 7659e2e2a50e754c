"""Pictures, pages, a server, checkpoints from recipes, the list of tasks, and records as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter

from moevolve._asking import ask, takes, takes_store
from moevolve.evaluators.errors import UserError
from moevolve.search.operations.opening import opened_reader
from moevolve.search.requests.recipes import ApplyRequest
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
    from moevolve.evaluators.tasks.config import TaskConfig
    from moevolve.search.loop.final_table import FinalTable
    from moevolve.search.results.expert_usage import Analysis
    from moevolve.store.reader import StoreReader
    from moevolve.workers.contract.card import ExportReport


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
    from moevolve.search.report.contents import gather
    from moevolve.search.report.page import render_page
    from moevolve.search.report.usage import read_analysis

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


def tasks() -> list[TaskConfig]:
    """List the tasks that can be named in a configuration, by name.

    Raises:
        UserError: a folder in `MOEVOLVE_TASKS` doesn't exist, or a task's file is wrong.
    """
    from moevolve.evaluators.preparation.registry import list_tasks, load_task

    return [load_task(name) for name in list_tasks()]


def write_analysis(analysis: Analysis, folder: str | Path) -> list[Path]:
    """Write an analysis and its figures into a folder, made if need be, and return the files, `analysis.json` first.

    Raises:
        UserError: the folder can't be written.
    """
    from moevolve.search.report import usage

    return usage.write_analysis(analysis, Path(folder))


@takes(ApplyRequest)
def apply(asked: ApplyRequest) -> ExportReport:
    from moevolve.search.operations import recipes

    return recipes.apply(asked)


def as_data(record: Any) -> Any:
    """Turn records into plain JSON data, the same as the HTTP API sends and as commands print with `--json`.

    Takes a record, or a list or mapping of records. Paths and times become text; numbers that aren't finite become
    None.
    """
    if isinstance(record, Mapping):
        return {str(key): as_data(item) for key, item in record.items()}
    if isinstance(record, list | tuple):
        return [as_data(item) for item in record]
    kind: Any = type(record) if is_dataclass(record) or isinstance(record, BaseModel) else Any
    return _adapter(kind).dump_python(record, mode="json")


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
