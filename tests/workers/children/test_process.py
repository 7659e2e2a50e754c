"""A child process calls functions, hands their errors on, and ends when it should."""

from __future__ import annotations

import os
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import child_functions as functions
import psutil
import pytest
from waiting import until

from moevolve.evaluators.errors import UserError
from moevolve.workers.children.process import ChildError, ChildProcess

HERE = {"PYTHONPATH": str(Path(functions.__file__).parent), "CHILD_SAYS": "é"}


def has_ended(process: int) -> bool:
    return not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE


def test_dataclasses_go_there_and_back_and_modules_keep_what_they_hold() -> None:
    with ChildProcess(environment=HERE) as child:
        first, second = (child.call(functions.note, functions.Point(number, ("p",), None)) for number in (1, 2))
        assert first == (functions.Point(1, ("p",), "é"),) and second == (*first, functions.Point(2, ("p",), "é"))
        assert child.call(functions.read_and_print) == ""
        process = child.call(functions.process_id)
    assert has_ended(process)


def test_errors_of_ours_stay_what_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    with ChildProcess(environment=HERE) as child:
        process = child.call(functions.process_id)
        with pytest.raises(UserError, match=r"^file: wrong$"):
            child.call(functions.refuse, "file: wrong")
        assert capfd.readouterr().err == ""
        with pytest.raises(ChildError, match=r"^ZeroDivisionError: division by zero$"):
            child.call(functions.divide, 0)
        assert "Traceback" in capfd.readouterr().err
        with pytest.raises(ChildError, match=r"^TypeError: "):
            child.call(functions.unsendable)
        assert child.call(functions.process_id) == process


def test_a_process_that_ends_is_an_error_and_is_replaced(tmp_path: Path) -> None:
    with ChildProcess(environment=HERE, log=tmp_path / "log") as child:
        with pytest.raises(ChildError, match=r"^its process ended with exit code 3: it is over$"):
            child.call(functions.leave, 3)
        process = child.call(functions.process_id)
        os.kill(process, signal.SIGKILL)
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)  # a zombie's threads may not have ended yet
        assert child.call(functions.divide, 2) == 0.5


@pytest.mark.parametrize(("limit_s", "reason"), [(0.5, "^it took more than 0.5 s$"), (None, "^its process was killed")])
def test_a_call_can_be_ended(tmp_path: Path, limit_s: float | None, reason: str) -> None:
    """By its time limit, or by another thread that closes the process."""
    started = tmp_path / "started"
    with ChildProcess(environment=HERE, limit_s=limit_s) as child, ThreadPoolExecutor(1) as thread:
        called = thread.submit(child.call, functions.sleep, started)
        if limit_s is None:
            until(lambda: started.exists() and started.read_text())
            child.close()
        with pytest.raises(ChildError, match=reason):
            called.result()


def test_a_call_that_takes_too_much_memory_is_ended() -> None:
    with ChildProcess(environment=HERE, memory=256 << 20) as child:
        with pytest.raises(ChildError, match=r"^it took more than 256 MiB of memory$"):
            child.call(functions.hoard, 300)
        assert child.call(functions.divide, 2) == 0.5


def test_an_idle_process_ends() -> None:
    with ChildProcess(environment=HERE, idle_s=0.5) as child:
        process = child.call(functions.process_id)
        until(lambda: has_ended(process))
        assert child.call(functions.process_id) != process


PARENT = """
import sys
from pathlib import Path
import child_functions
from moevolve.workers.children.process import ChildProcess
ChildProcess().call(child_functions.sleep, Path(sys.argv[1]))
"""


def test_it_ends_with_its_parent_whatever_it_is_doing(tmp_path: Path) -> None:
    started = tmp_path / "started"
    with subprocess.Popen([sys.executable, "-c", PARENT, str(started)], env=os.environ | HERE) as parent:
        until(lambda: started.exists() and started.read_text(), parent)
        parent.kill()
    until(lambda: has_ended(int(started.read_text())))


def test_another_environment_needs_no_moevolve(tmp_path: Path) -> None:
    file, python = tmp_path / "elsewhere.py", tmp_path / "python"
    file.write_text(
        "import sys\n\n_CALLS = []\n\ndef calls(n: int) -> list[int]:\n"
        "    assert not {'moevolve', 'pydantic'} & sys.modules.keys()\n    _CALLS.append(n)\n    return _CALLS\n"
    )
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$@"\n')
    python.chmod(0o700)
    calls: Callable[[int], list[int]] = runpy.run_path(str(file))["calls"]
    with ChildProcess(str(python)) as child:
        assert [child.call(calls, number) for number in (1, 2)] == [[1], [1, 2]]
