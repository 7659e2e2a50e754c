"""The commands as a whole: each asks the package's Python surface alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import moevolve
from moevolve.search.cli.app import COMMANDS, app

FOLDER = Path(__file__).parents[3] / "search" / "cli"
DEEPER = {"compare", "config", "estimate", "figures", "loop", "pools", "report", "running", "service", "strategies"}
"""Folders of `search` that a command reaches through `moevolve` only."""


def imported(path: Path) -> Iterator[str]:
    """Dotted names of what a file imports when it is imported: what is there for type checkers only is left out."""
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


def test_commands_import_the_package_and_nothing_deeper() -> None:
    for file in set(COMMANDS.values()):
        names = list(imported(FOLDER / f"{file}.py"))
        assert {"moevolve", "moevolve.db"} & set(names), file
        deep = [name for name in names if name.startswith("moevolve.search.") and name.split(".")[2] in DEEPER]
        assert not deep, file


def test_a_command_is_a_function_of_the_package_too() -> None:
    for command in COMMANDS:
        verb = {"plan": "estimate"}.get(command, command)
        home, _, function = f"moevolve.{verb}".rpartition(".")
        assert function in (moevolve.__all__ if home == "moevolve" else vars(moevolve.db)), command


def test_shells_complete_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    script = CliRunner().invoke(app, ["--show-completion", "bash"], prog_name="moevolve")
    assert script.exit_code == 0 and "_MOEVOLVE_COMPLETE=complete_bash" in script.output
    monkeypatch.setenv("_MOEVOLVE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "moevolve re")
    monkeypatch.setenv("COMP_CWORD", "1")
    completed = CliRunner().invoke(app, prog_name="moevolve")
    assert set(completed.output.split()) == {"recipe", "resume", "retry", "report"}
