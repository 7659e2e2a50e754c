"""Files that a search needs on a cluster: this package, its configuration, and the model and task files it names."""

from __future__ import annotations

import importlib.util
import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.harness.files import split_name
from moevolve.evaluators.preparation.registry import FOLDERS_VARIABLE, read_task, split_fitness
from moevolve.search.config.run import RunConfig

RUN = "moevolve-files/run.yaml"
"""Path of the configuration in the job's working directory. With its dash, the folder can't be taken for a package."""

_PARTS = ("configs", "evaluators", "kernels", "search", "store", "workers")


def pack(config: RunConfig, folder: Path, shared_paths: bool, limit: int) -> dict[str, Any]:
    """Copy the files that a search needs, and return Ray's runtime environment with them.

    Args:
        config: Configuration of the search, with absolute local paths.
        folder: Empty folder to copy to.
        shared_paths: Leave out model and task files, because every node has them under the same paths.
        limit: Maximum size of the run's files in bytes.

    Raises:
        UserError: a task or one of its files can't be read, or the files are too large; the message names the path.
    """
    files = folder / "files"
    packed = _RunFiles((files / RUN).parent, limit)
    data = config.model_dump(mode="json")
    data["workers"]["address"] = "auto"
    if not shared_paths:
        model = Path(config.model.path).expanduser()
        if model.is_dir():
            data["model"]["path"] = packed.add(model, f"models/{model.name}", "model.path")
        for place, task in enumerate(data["tasks"]):
            task["name"] = packed.task(task["name"], f"tasks/{place}")
        held_out = data["final"]["held_out"]
        data["final"]["held_out"] = [packed.task(name, f"held-out/{n}") for n, name in enumerate(held_out)]
    run = files / RUN
    run.touch(mode=0o600)  # the store's URL may contain a password
    run.write_text(json.dumps(data), encoding="utf-8")
    named = packed.folder / "named"
    variables = {FOLDERS_VARIABLE: str(named.relative_to(files))} if named.is_dir() else {}
    return {"working_dir": str(files), "py_modules": _copy_package(folder), "env_vars": variables}


class _RunFiles:
    """Copies of a run's files in a folder of limited size."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self._limit, self._left = limit, limit
        folder.mkdir(parents=True)

    def add(self, source: Path, place: str, where: str) -> str:
        """Copy a file or folder to `place`; returns its path relative to `folder`, for a configuration there."""
        try:
            found = [source] if source.is_file() else source.rglob("*")
            self._left -= sum(each.stat().st_size for each in found)
        except OSError as error:
            raise UserError(f"{source}: can't be read: {error}") from None
        if self._left < 0:
            raise UserError(
                f"{where}: {source} is too large to be sent to the cluster with the run (all of its files may have "
                f"{self._limit >> 20} MiB); put it where every node has it under one path, and give that path, or "
                "--shared-paths if that is this one"
            )
        target = self.folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copyfile(source, target)
        return f"./{place}"

    def task(self, name: str, place: str) -> str:
        """Copy a task, and the files it names, unless it comes with the package; returns its name in the copy."""
        base, fitness = split_fitness(name)
        prefix, path, _ = split_name(base)
        if prefix:
            if Path(path).is_absolute():
                raise UserError(
                    f"task {name}: files of lm-evaluation-harness can't be sent to the cluster, since they may be "
                    "programs; put it where every node has it, and say --shared-paths"
                )
            return name
        file, content = read_task(base)
        if file.is_relative_to(_home("configs")):
            return name
        if base.endswith(".yaml"):
            self._write(content, place, file)
            return f"./{place}/{file.name}{fitness}"
        self._write(content, f"named/{Path(base).parent}", file)
        return name

    def _write(self, content: dict[str, Any], place: str, file: Path) -> None:
        listed = content.get("source", {}).get("files") or {}
        for split, paths in listed.items():
            for number, path in enumerate(paths):
                copy = f"{file.stem}-data/{split}-{number}-{Path(path).name}"
                self.add(Path(path), f"{place}/{copy}", f"task {file.stem}")
                paths[number] = copy
        target = self.folder / place / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def _copy_package(folder: Path) -> list[str]:
    """Copy this package, installed from a wheel or editable, with metadata that states its version."""
    package = folder / "moevolve"
    package.mkdir()
    spec = importlib.util.find_spec("moevolve")
    assert spec is not None and spec.origin is not None
    for path in Path(spec.origin).parent.iterdir():
        if path.is_file():
            shutil.copyfile(path, package / path.name)
    for part in _PARTS:
        # In a checkout, search/api was copied above: it is the package `moevolve` itself.
        shutil.copytree(_home(part), package / part, ignore=shutil.ignore_patterns("__pycache__", "api"))
    found = version("moevolve")
    about = folder / f"moevolve-{found}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: moevolve\nVersion: {found}\n", encoding="utf-8")
    return [str(package), str(about)]


def _home(part: str) -> Path:
    spec = importlib.util.find_spec(f"moevolve.{part}")
    assert spec is not None and spec.submodule_search_locations is not None
    # The import hook of an editable install adds entries that aren't folders.
    return next(path for each in spec.submodule_search_locations if (path := Path(each)).is_dir()).absolute()
