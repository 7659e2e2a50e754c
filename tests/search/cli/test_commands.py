"""The commands as files: each is called what a user types, and asks the package's Python surface alone."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import moevolve
from moevolve.search.cli.app import COMMANDS

FOLDER = Path(__file__).parents[3] / "search" / "cli"
ROOMS = {"compare", "config", "estimate", "figures", "loop", "pools", "report", "service", "strategies"}
"""Folders of `search` that a command reaches through `moevolve` only."""


def imported(path: Path) -> Iterator[str]:
    """Dotted names of what a file imports when it runs: what is there for type checkers only is left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_command_is_a_file_and_every_file_a_command() -> None:
    groups = {name.partition(".")[0] for name in COMMANDS if "." in name}
    found = [*FOLDER.glob("*.py"), *(path for group in groups for path in (FOLDER / group).glob("*.py"))]
    files = {".".join(path.relative_to(FOLDER).with_suffix("").parts) for path in found if path.stem[0] != "_"}
    assert files - {"app"} == set(COMMANDS)
    assert len(set(COMMANDS)) == len(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_imports_the_package_and_nothing_deeper(command: str) -> None:
    names = list(imported(FOLDER / f"{command.replace('.', '/')}.py"))
    assert {"moevolve", "moevolve.db"} & set(names)
    deeper = [name for name in names if name.startswith("moevolve.search.") and name.split(".")[2] in ROOMS]
    assert not deeper
    commands = {f"moevolve.search.cli.{other}" for other in COMMANDS}
    assert not [name for name in names if name.rpartition(".")[0] in commands], "commands share files with a _"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_a_function_of_the_package_too(command: str) -> None:
    verb = {"plan": "estimate"}.get(command, command)
    home, _, function = f"moevolve.{verb}".rpartition(".")
    assert function in (moevolve.__all__ if home == "moevolve" else vars(moevolve.db))
    module = importlib.import_module(f"moevolve.search.cli.{command}")
    assert f"moevolve.{verb}" in Path(str(module.__file__)).read_text()
