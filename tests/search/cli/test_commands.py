"""The commands as a whole."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import moevolve
from moevolve.search.cli.app import COMMANDS, app


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
