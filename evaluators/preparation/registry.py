"""Finding tasks by name: as a YAML path, in the user's own folders, or among the package's tasks.

`NAME@FITNESS` is a task under another fitness; `lm_eval:NAME` is a task of lm-evaluation-harness.
"""

from __future__ import annotations

import json
import os
from importlib.resources import files
from pathlib import Path

from moevolve.evaluators.errors import UserError, suggestion
from moevolve.evaluators.fitness.kinds import task_fitnesses
from moevolve.evaluators.harness.files import PREFIX
from moevolve.evaluators.matching.registry import make_matcher
from moevolve.evaluators.tasks.config import TaskConfig
from moevolve.evaluators.text_files import read_lines
from moevolve.evaluators.types import Matching
from moevolve.evaluators.yaml_files import read_yaml, refuse_code

# Environment variable with additional task folders, separated as in PATH.
FOLDERS_VARIABLE = "MOEVOLVE_TASKS"

_SUFFIX = ".yaml"


def list_tasks() -> dict[str, Path]:
    """Return all tasks as name -> YAML file, sorted by name; those of a sub-folder are named `SUBFOLDER/NAME`.

    Those in the folders of `MOEVOLVE_TASKS`, which must exist, come before the package's of the same name.
    """
    own = [Path(folder) for folder in os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep) if folder]
    for folder in own:
        if not folder.is_dir():
            raise UserError(f"task folder {folder}: no such folder")
    found: dict[str, Path] = {}
    for folder in (*own, Path(str(files("moevolve.configs"))) / "tasks"):
        for path in sorted((*folder.glob(f"*{_SUFFIX}"), *folder.glob(f"*/*{_SUFFIX}"))):
            found.setdefault(path.relative_to(folder).with_suffix("").as_posix(), path)
    return dict(sorted(found.items()))


def load_task(name: str | Path) -> TaskConfig:
    """Load a task.

    Args:
        name: Name of a task, or a path ending in `.yaml`, optionally followed by `@FITNESS`. `NAME@FITNESS` is a task
            of that name, so its scores are separate from those of `NAME`. The prefix `lm_eval:` stands for a task of
            lm-evaluation-harness; see `moevolve.evaluators.harness.tasks.harness_task`.

    Raises:
        UserError: There is no such task (with similar names), its file is wrong, or the fitness is unknown or doesn't
            suit it.
    """
    base, fitness = split_fitness(str(name))
    if base.startswith(PREFIX):
        from moevolve.evaluators.harness.tasks import harness_task

        task = harness_task(base)
    else:
        path = _find(base)
        task = TaskConfig.from_mapping(
            _read(path, ()) | {"name": path.stem if base.endswith(_SUFFIX) else base}, str(path)
        )
    if not fitness:
        return task
    kind, known = fitness[1:], task_fitnesses()
    if kind not in known:
        raise UserError(f"task {name}: unknown fitness `{kind}`; known: {', '.join(known)}")
    return task.with_fitness(kind)


def split_fitness(name: str) -> tuple[str, str]:
    """Split `NAME@FITNESS` into `(NAME, @FITNESS)`, and `NAME` into `(NAME, "")`; an @ within a path is part of it."""
    base, at, fitness = name.rpartition("@")
    return (base, at + fitness) if at and not name.endswith(_SUFFIX) else (name, "")


def _find(name: str | Path) -> Path:
    if str(name).endswith(_SUFFIX):
        return Path(name)
    tasks = list_tasks()
    if str(name) not in tasks:
        hint = suggestion(str(name), tasks)
        raise UserError(f"unknown task `{name}`; {hint} (your own: the path of its .yaml, or set {FOLDERS_VARIABLE})")
    return tasks[str(name)]


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, object]:
    """Return the YAML document with absolute data paths and row numbers, merged over the task that it `extends`."""
    path = path.absolute()
    if path in seen:
        raise UserError(f"{path}: `extends` goes round in a circle")
    raw = read_yaml(path)
    name = raw.pop("name", path.stem)
    if name != path.stem:
        raise UserError(f"{path}: field name: is `{name}`, but a task is called like its file: `{path.stem}`")
    if "@" in name:
        raise UserError(f"{path}: an @ in a task's name sets another fitness; rename the file")
    _make_absolute(raw, path.parent)
    _read_indices(raw, path)
    matching = raw.get("matching")
    if isinstance(matching, dict) and "function" in matching:
        refuse_code(f"{path}: field matching.function")
        if "source" not in matching:  # files that a shrink has written have it
            raw["matching"] = matching | read_function(str(matching["function"]), path.parent)
    base = raw.pop("extends", None)
    if base is None:
        return raw
    if not isinstance(base, str):
        raise UserError(f"{path}: field extends: expected a task's name or the path of its .yaml")
    parent = path.parent / base if base.endswith(_SUFFIX) else _find(base)
    return _read(parent, (*seen, path)) | raw


def read_function(given: str, folder: Path, option: str = "matching.function") -> dict[str, str]:
    """Read a function of the user's own, given as `FILE.py:NAME`, as settings of a task's `matching`.

    Args:
        given: File, which may be relative to `folder`, and name.
        folder: Folder of relative files.
        option: What the user gave it to, for messages.

    Raises:
        UserError: There is no such file or function, or the file isn't Python.
    """
    file, _, name = given.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise UserError(f"{option} {given}: give FILE.py:NAME, a function of an answer and the expected one")
    matching = Matching("function", (), name, "\n".join(read_lines(folder / file)))
    try:
        make_matcher(matching)
    except UserError as error:
        raise UserError(f"{option} {given}: {error}") from None
    return {"kind": matching.kind, "function": name, "source": matching.source}


def _make_absolute(raw: dict[str, object], folder: Path) -> None:
    source = raw.get("source")
    listed = source.get("files") if isinstance(source, dict) else None
    if not isinstance(listed, dict):
        return  # validation says what is wrong, here and below
    for split, paths in listed.items():
        named = [paths] if isinstance(paths, str) else paths
        if isinstance(named, list):
            listed[split] = [str(folder / str(path)) for path in named]


def _read_indices(raw: dict[str, object], path: Path) -> None:
    """Replace files of row numbers by the row numbers."""
    splits = raw.get("splits")
    chosen = {f"splits.{name}": each for name, each in splits.items()} if isinstance(splits, dict) else {}
    for field, selection in {**chosen, "shots": raw.get("shots")}.items():
        if isinstance(selection, dict) and isinstance(selection.get("indices"), str):
            file = path.parent / selection["indices"]
            try:
                selection["indices"] = json.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise UserError(f"{path}: field {field}.indices: {file} can't be read: {error}") from None
