"""The run file of a request: its settings, chosen or measured, and the task files that they name."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

import yaml

from moevolve.evaluators.preparation.registry import read_function
from moevolve.evaluators.text_files import writing_into
from moevolve.search.config.files import load_run_config, override_lines
from moevolve.search.config.run import RunConfig
from moevolve.search.pools.ray_actor import ModelProbe
from moevolve.search.running.observer import Observer
from moevolve.search.running.study import SharedWorkers
from moevolve.search.shrink.choosing import base_settings, folder_of, on_gpus, parsed, settings_of, with_evaluations
from moevolve.search.shrink.domains import DEV_ROWS, read_domains, render_chats, write_tasks
from moevolve.search.shrink.keeping import smallest
from moevolve.search.shrink.options import ShrinkOptions
from moevolve.search.shrink.rows import Chat, read_columns
from moevolve.search.shrink.timing import plan_time

_RUN_FILE = "run.yaml"
_SIZES_FILE = "sizes.yaml"
"""Settings of the searches of --keep-score, which are kept as those of a run file are."""
_MARKED = (
    *("model", "active", "kind", "experts", "neurons", "size", "keep_score", "data", "tasks", "columns", "metric"),
    *("evaluations", "time", "repair", "custom_code", "seed"),
)
"""Parameters of a request that its run file depends on, besides the overrides."""
_KEPT_ROWS = 576
"""Most rows of `dev` for --keep-score. Of 192 rows all can be right, and it isn't known yet that 99 % are."""
_CHOICE = "# "
"""Start of the comments, after the first line, that say what is kept, and what was chosen for a time or a score."""


def files_of(request: ShrinkOptions) -> Path:
    """The folder of the run file and the task files, beside that of the checkpoint."""
    folder = folder_of(request)
    folder = folder if folder.name else folder.resolve()
    return folder.with_name(f"{folder.name}.shrink")


def run_file(
    request: ShrinkOptions,
    probe: ModelProbe,
    workers: SharedWorkers,
    observer: Observer,
    begun: float,
    check: Callable[[RunConfig], object],
) -> Path:
    """Write the task files and the run file of a request.

    A run file that was made for the same request is kept: memory that is free now must not change a search that has
    begun. `check` is called before candidates are measured for a time, and may refuse the search. The time counts from
    `begun`, in seconds of `time.monotonic`.

    Raises:
        UserError: A file of requests, a task or the model can't be read, or the budget can't be met on this machine.
    """

    def render(chats: tuple[Chat, ...]) -> tuple[tuple[str, str | None], ...] | None:
        # There is no task before the chats are rendered.
        config = parsed(on_gpus(base_settings(request, ["chats"]), request, probe))
        return probe.call(render_chats, config, chats)

    observer.on_stage("reading the data")
    rows = DEV_ROWS if request.keep_score is None else _KEPT_ROWS
    columns = None if request.columns is None else read_columns(request.columns)
    metric = None if request.metric is None else read_function(request.metric, Path(), "--metric")
    domains = read_domains([Path(path) for path in request.data], render, columns, metric, rows)
    folder = files_of(request)
    path = folder / _RUN_FILE
    with writing_into(folder):
        tasks = write_tasks(domains, folder / "tasks")
        if has_run_file(request):
            return path
    names = [*map(str, request.tasks), *(str(task.resolve()) for task in tasks)]
    begun_file = folder / _SIZES_FILE
    if request.keep_score is not None and _is_of(request, begun_file):
        data = yaml.safe_load(begun_file.read_text(encoding="utf-8"))
    else:
        data, choices = settings_of(request, names, probe, observer.on_stage)
        for text in choices:
            observer.on_note(text)
    if request.keep_score is not None:
        with writing_into(folder):
            begun_file.write_text(_mark(request) + yaml.safe_dump(data, allow_unicode=True), encoding="utf-8")
        check(parsed(data))
        data, text = smallest(request, data, probe, workers.lend, observer)
        choices = [text]
    if request.time is not None:
        check(parsed(data))
        evaluations, text = plan_time(request, parsed(data), begun, probe, workers.lend, observer)
        data, choices = with_evaluations(data, evaluations), [*choices, text]
    head = _mark(request) + "".join(f"{_CHOICE}{text}\n" for text in choices)
    with writing_into(folder):
        path.write_text(head + yaml.safe_dump(data, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return path


def choices_of(path: Path) -> tuple[str, ...]:
    """The sentences of a run file about what was chosen; see `_CHOICE`."""
    _, *lines = path.read_text(encoding="utf-8").splitlines()
    return tuple(line.removeprefix(_CHOICE) for line in takewhile(lambda line: line.startswith(_CHOICE), lines))


def has_run_file(request: ShrinkOptions) -> bool:
    """Whether the run file of this request exists."""
    return _is_of(request, files_of(request) / _RUN_FILE)


def _is_of(request: ShrinkOptions, path: Path) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8").startswith(_mark(request))


def read_run(request: ShrinkOptions, path: Path) -> RunConfig:
    """Read a request's run file, for the store that it names."""
    store = request.store if isinstance(request.store, str) or request.store is None else request.store.url
    return load_run_config(path, () if store is None else override_lines({"store": store}))


def _mark(request: ShrinkOptions) -> str:
    """First line of a run file, which identifies the request that it was made for."""
    content = {name: getattr(request, name) for name in _MARKED} | {"set": override_lines(request.overrides)}
    return f"# moevolve shrink {json.dumps(content, default=str)}\n"
