"""The command line in this process, without the seconds that a new process needs for its imports."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


def run_command(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `moevolve` in a folder; the result has text output."""
    from moevolve.search.cli import main

    command = ["moevolve", *map(str, arguments)]
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder),
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as end:
            main()
    return subprocess.CompletedProcess(command, int(end.value.code or 0), out.getvalue(), err.getvalue())


def refusal(*arguments: str | Path) -> str:
    """The error, of one line, that ends a command; `main` prints it and exits with 2 (see `test_bad_input.py`)."""
    from typer.testing import CliRunner

    from moevolve.evaluators.errors import UserError
    from moevolve.search.cli.app import app
    from moevolve.store.errors import StoreError

    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert isinstance(result.exception, UserError | StoreError), result.output
    message = str(result.exception)
    assert "\n" not in message
    return message


@contextlib.contextmanager
def worker_here() -> Iterator[None]:
    """For commands in this process: their searches have one worker, in this process too, instead of any on Ray."""
    from local_workers import local_pool

    from moevolve.search.running import execute, study
    from moevolve.search.shrink import shrink

    with pytest.MonkeyPatch.context() as patch:
        for module in (execute, study, shrink):
            patch.setattr(module, "ray_pool", lambda setup, **_: local_pool(setup))
        yield
