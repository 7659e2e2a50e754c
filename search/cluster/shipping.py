"""What a search needs on a cluster's nodes, in one folder: this package, and the files that its configuration names."""

from __future__ import annotations

import importlib.util
import json
import shutil
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.harness.files import split_name
from moevolve.evaluators.preparation.registry import FOLDERS_VARIABLE, read_task, split_fitness
from moevolve.search.config.run import RunConfig

RUN = "moevolve-files/run.yaml"
"""The configuration, below the job's working directory; a folder of that name is no package."""

_PARTS = ("configs", "evaluators", "kernels", "search", "store", "workers")


@dataclass(frozen=True, slots=True)
class Shipment:
    """Folders to be sent.

    Attributes:
        files: becomes the working directory.
        modules: are imported from.
        env: that the job needs to find its files.
    """

    files: Path
    modules: tuple[Path, ...]
    env: dict[str, str]


def pack(config: RunConfig, folder: Path, shared_paths: bool, limit: int) -> Shipment:
    """Copy what is needed.

    Args:
        config: of the search; its local paths are absolute.
        folder: an empty one.
        shared_paths: every node has the model and the task files where this machine has them: they stay out.
        limit: bytes that all files of a run may have.

    Raises:
        UserError: a task or one of its files can't be had, or there is too much to send; the message names the path.
    """
    files = folder / "files"
    packed = _Packed((files / RUN).parent, limit)
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
    run.touch(mode=0o600)  # the store's URL may have a password in it
    run.write_text(json.dumps(data), encoding="utf-8")
    named = packed.folder / "named"
    env = {FOLDERS_VARIABLE: str(named.relative_to(files))} if named.is_dir() else {}
    return Shipment(files, _package(folder), env)


class _Packed:
    """Files of a run, in a folder that keeps under a limit."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self._limit, self._left = limit, limit
        folder.mkdir(parents=True)

    def add(self, source: Path, place: str, where: str) -> str:
        """Copy a file or a folder; its path as a configuration in `folder` has it."""
        self._left -= _size(source)
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
        """Copy a task that doesn't come with the package, with the files it names; its name there."""
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
            listed[split] = [
                Path(
                    self.add(Path(each), f"{place}/{file.stem}-data/{split}-{n}-{Path(each).name}", f"task {file.stem}")
                )
                .relative_to(place)
                .as_posix()
                for n, each in enumerate([paths] if isinstance(paths, str) else paths)
            ]
        target = self.folder / place / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def _size(path: Path) -> int:
    try:
        found = [path] if path.is_file() else path.rglob("*")
        return sum(each.stat().st_size for each in found)
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error}") from None


def _package(folder: Path) -> tuple[Path, ...]:
    """This package as it is imported here, installed from a wheel or editable, and what tells its version."""
    package = folder / "moevolve"
    package.mkdir()
    spec = importlib.util.find_spec("moevolve")
    assert spec is not None and spec.origin is not None
    for path in Path(spec.origin).parent.iterdir():
        if path.is_file():
            shutil.copyfile(path, package / path.name)
    for part in _PARTS:
        # In a checkout, search/api is what was copied above.
        shutil.copytree(_home(part), package / part, ignore=shutil.ignore_patterns("__pycache__", "api"))
    found = version("moevolve")
    about = folder / f"moevolve-{found}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: moevolve\nVersion: {found}\n", encoding="utf-8")
    return package, about


def _home(part: str) -> Path:
    """Where a part of the package lies."""
    spec = importlib.util.find_spec(f"moevolve.{part}")
    assert spec is not None and spec.submodule_search_locations is not None
    # The import hook of an editable install has entries that are no folders.
    return next(path for each in spec.submodule_search_locations if (path := Path(each)).is_dir()).absolute()
