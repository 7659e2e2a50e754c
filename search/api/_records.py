"""Reading configurations and tasks, and records as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, TypeAdapter

from moevolve.search.config.files import load_run_config, override_lines
from moevolve.search.config.run import RunConfig
from moevolve.search.interface.parameters import Overrides
from moevolve.search.interface.running import StudyRequest

if TYPE_CHECKING:
    from moevolve.evaluators.tasks.config import TaskConfig
    from moevolve.search.config.study import Study
    from moevolve.store.repository import Store


def load_config(path: str | Path, overrides: Overrides = ()) -> RunConfig:
    """Read a run configuration, to look at or to `launch`.

    Raises:
        UserError: the file is missing, isn't YAML, or has an unknown key or a bad value; the message names the field.
    """
    return load_run_config(Path(path), override_lines(overrides))


def load_study(path: str | Path, *, overrides: Overrides = (), store: str | Store | None = None) -> Study:
    """Read a study, to look at it or to run it with `study`, which has the same parameters.

    Raises:
        UserError: the file is missing, isn't YAML, or has an unknown key or a bad value; the message names the field.
    """
    return StudyRequest(path, overrides=overrides, store=store).study()


def tasks() -> list[TaskConfig]:
    """List the tasks that can be named in a configuration, by name.

    Raises:
        UserError: a folder in `MOEVOLVE_TASKS` doesn't exist, or a task's file is wrong.
    """
    from moevolve.evaluators.preparation.registry import list_tasks, load_task

    return [load_task(name) for name in list_tasks()]


def as_data(record: object) -> Any:
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
