"""Tasks, files of individuals, and records as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, TypeAdapter

from moevolve._asking import takes
from moevolve.search.requests.recipes import ApplyRequest

if TYPE_CHECKING:
    from moevolve.evaluators.tasks.config import TaskConfig
    from moevolve.search.requests.answers import Analysis
    from moevolve.workers.contract.card import ExportReport


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
    from moevolve.search.analysis import analyse

    return analyse.write_analysis(analysis, Path(folder))


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
