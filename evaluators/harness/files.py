"""The task files of lm-evaluation-harness (lm-eval): finding, reading and identifying them.

Library: lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness), the optional extra `lm-eval`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from moevolve.evaluators.errors import UserError, opening
from moevolve.evaluators.yaml_files import refuse_code

# Prefix of the names of lm-eval's tasks.
PREFIX = "lm_eval:"

# Keys that place a task among others, or name files that are read into it: they change no score.
_STRUCTURE = ("tag", "group", "task_list", "include")


def split_name(name: str) -> tuple[str, str, str]:
    """Split `lm_eval:TASK#METRIC` into `(lm_eval:, TASK, #METRIC)`, and any other name into `("", name, "")`."""
    if not name.startswith(PREFIX):
        return "", name, ""
    task, mark, metric = name.removeprefix(PREFIX).partition("#")
    return PREFIX, task, mark + metric


def harness_version() -> str:
    """Return the installed version of lm-eval, which must be there, and switch off its loading of remote code."""
    try:
        found = version("lm-eval")
        import evaluate
        import lm_eval  # noqa: F401
    except (PackageNotFoundError, ImportError) as error:
        raise UserError(f"lm_eval: tasks need `pip install 'moevolve[lm-eval]'` on every node: {error}") from None
    # lm-eval would load metrics that it doesn't know as code from the hub.
    evaluate.config.HF_EVALUATE_OFFLINE = True
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return found


def find_yaml(name: str) -> Path:
    """Return the YAML file of a task, given its name or path; raise a `UserError` if it doesn't exist."""
    if name.endswith((".yaml", ".yml")):
        path = Path(name).absolute()
        if not path.is_file():
            raise UserError(f"{PREFIX}{name}: no such file")
        return path
    # Most files are named after their task; lm-eval's own index reads all 14,000 files, which takes seconds.
    for path in sorted(_own_folder().rglob(f"{name}.yaml")):
        if read_raw(path).get("task") == name:
            return path.absolute()
    if name not in _index():
        raise UserError(
            f"{PREFIX}{name}: lm-eval has no task of this name (groups of tasks don't count: name their tasks one by "
            "one); your own: give the path of its .yaml"
        )
    return _index()[name]


def read_raw(path: Path, resolve: bool = False) -> dict[str, Any]:
    """Read a task's YAML with its includes; functions are given by name, and imported only to `resolve` them."""
    from lm_eval.tasks._yaml_loader import load_yaml

    with opening(f"{PREFIX}{path}: can't be read"):  # imports of the functions' modules can fail in any way
        return dict(load_yaml(path, resolve_func=resolve))


def read_config(path: Path) -> dict[str, Any]:
    """Read a task's YAML for lm-eval's task class, with its functions imported from Python files in its folder.

    Relative `data_files` that exist in the YAML's folder are made absolute.

    Raises:
        UserError: It can't be read, isn't a single task of a supported kind, or names functions where none are loaded.
    """
    raw = read_raw(path)
    if _names_functions(path.resolve()):
        refuse_code(f"{PREFIX}{path}: !function")
    problem = _problem(raw)
    if problem:
        raise UserError(f"{PREFIX}{path}: {problem}")
    config = {key: value for key, value in read_raw(path, resolve=True).items() if key not in _STRUCTURE}
    settings = dict(config.get("dataset_kwargs") or {})
    settings.pop("trust_remote_code", None)
    if "data_files" in settings:
        settings["data_files"] = _from_folder(settings["data_files"], path.parent)
    return config | {"dataset_kwargs": settings}


def _names_functions(path: Path) -> bool:
    """Return whether a task's file, or one that it includes, names functions that aren't in lm-eval's own folder."""
    if path.is_relative_to(_own_folder().resolve()):
        return False
    try:
        raw = yaml.safe_load(path.read_bytes())
    except yaml.constructor.ConstructorError:  # which knows no tag `!function`
        return True
    included = raw.get("include", [])
    included = included if isinstance(included, list) else [included]
    return any(_names_functions((path.parent / each).resolve()) for each in included)


def task_identity(path: Path) -> str:
    """Return all that defines a task besides its documents and lm-eval's version, as JSON without absolute paths."""
    raw = {key: value for key, value in read_raw(path).items() if key not in (*_STRUCTURE, "dataset_kwargs")}
    return json.dumps(_identity_of(raw, path.parent), sort_keys=True, ensure_ascii=False, default=str)


def portable_path(path: Path) -> str:
    """Return a path that other machines can resolve: relative to lm-eval's own tasks if it is one, else absolute."""
    own = _own_folder()
    return str(path.relative_to(own)) if path.is_relative_to(own) else str(path)


def resolve_path(portable_path: str) -> Path:
    """Invert `portable_path` on this machine, where the file must be."""
    path = _own_folder() / portable_path  # an absolute path is unchanged
    if not path.is_file():
        raise UserError(f"{PREFIX}{portable_path}: this worker has no such file; it must be there on every node")
    return path


def _problem(raw: dict[str, Any]) -> str | None:
    """Say why a task isn't supported; None if it is."""
    if "group" in raw or not isinstance(raw.get("task"), str):
        return "a group of tasks; name its tasks one by one"
    if "class" in raw:
        return "the task is a Python class; only tasks written in YAML can be run"
    if raw.get("unsafe_code"):
        return "the task runs code that the model writes; moevolve doesn't"
    if raw.get("doc_to_image") or raw.get("doc_to_audio"):
        return "the task has images or sound; only text can be run"
    if raw.get("output_type") == "loglikelihood_rolling":
        return "the task measures the likelihood of whole texts; use a task of moevolve's with fitness: perplexity"
    if raw.get("repeats", 1) != 1:
        return "the task samples several answers (`repeats`); answers are greedy here"
    settings = raw.get("generation_kwargs") or {}
    sampled = settings.get("do_sample", float(settings.get("temperature") or 0) > 0)
    if sampled or settings.get("num_beams", 1) != 1:
        return "`generation_kwargs` ask for sampling or beams; answers are greedy here (do_sample: false)"
    return None


def _identity_of(value: object, folder: Path) -> object:
    if isinstance(value, dict):
        return {str(key): _identity_of(item, folder) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_identity_of(item, folder) for item in value]
    if isinstance(value, str) and value.startswith(os.sep):
        # lm-eval reads `!function utils.name` as a path, followed by a point and the function's name.
        module, _, function = value.rpartition(".")
        source = Path(f"{module}.py")
        if source.is_file():
            return {"function": function, "sha256": hashlib.sha256(source.read_bytes()).hexdigest()}
        return value.removeprefix(f"{folder}{os.sep}")
    return value


def _from_folder(files: object, folder: Path) -> object:
    if isinstance(files, dict):
        return {key: _from_folder(value, folder) for key, value in files.items()}
    if isinstance(files, list | tuple):
        return [_from_folder(value, folder) for value in files]
    return str(folder / files) if isinstance(files, str) and (folder / files).exists() else files


@cache
def _own_folder() -> Path:
    import lm_eval.tasks

    return Path(lm_eval.tasks.__file__).absolute().parent


@cache
def _index() -> dict[str, Path]:
    """Name -> file of all single tasks, from lm-eval's own index."""
    from lm_eval.tasks import TaskManager

    entries = TaskManager().task_index
    return {
        name: Path(entry.yaml_path).absolute()
        for name, entry in entries.items()
        if entry.yaml_path is not None and entry.kind.name in ("TASK", "PY_TASK")
    }
