"""What functions that search show while they run, unless they get an observer or are asked to be silent."""

from __future__ import annotations

import inspect

import pytest

import moevolve
from moevolve._asking import function_of
from moevolve.search.interface.request import Request, record
from moevolve.search.running.observer import SILENT, Observer
from moevolve.store.records import Progress


@record
class RunRequest(Request):
    """Search.

    Raises:
        UserError: never.
    """

    def answer(self, *, observer: Observer = SILENT) -> None:
        observer.on_note("3 rows set aside")
        observer.on_stage("evaluating")
        for done in range(3):
            observer.on_progress(Progress(done, 2, "prune", (0, 0.5), 1.0, 0, 0, done, None, None))
        observer.on_stage("final\x1b[2J scores")


LINES = [
    "3 rows set aside",
    "evaluating",
    *(f"prune {done}/2 best 50.0 (#0), full 100.0" for done in range(3)),
    "final\N{REPLACEMENT CHARACTER}[2J scores",
]


def test_steps_are_lines_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    watched = function_of(RunRequest)
    watched()
    printed = capsys.readouterr()
    assert (printed.err.splitlines(), printed.out) == (LINES, "")
    watched(progress=False)
    watched(observer=moevolve.Observer())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["launch", "resume", "retry", "shrink", "study", "estimate", "export", "profile"])
def test_whatever_searches_shows_it(name: str) -> None:
    function = getattr(moevolve, name)
    assert inspect.signature(function).parameters["progress"].default is True
    assert "\n    progress: Show steps and scores" in function.__doc__ and "\n\nRaises:\n    " in function.__doc__


def test_parameters_are_described_by_their_names_in_python() -> None:
    text = " ".join(str(moevolve.shrink.__doc__).split())
    assert "default: a tenth of `time`" in text
    functions = [getattr(moevolve, name) for name in moevolve.__all__]
    described = {each.__name__: str(each.__doc__) for each in functions if inspect.isfunction(each)}
    described.pop("as_data")  # it compares itself with a command
    assert not [name for name, text in described.items() if "--" in text or "repeatable" in text]
