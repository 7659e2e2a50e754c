from __future__ import annotations

import re
import socket
import tempfile
from pathlib import Path

import pytest

from moevolve.evaluators.errors import DRIVER_HOST, CandidateError, UserError, opening


def test_errors_of_other_libraries_are_one_line_that_names_the_traceback() -> None:
    with pytest.raises(UserError) as caught, opening("model ./m: its tokenizer can't be read", "fetch it again"):
        raise RuntimeError("first\n  second " + "x" * 1000)
    message = str(caught.value)
    log = re.search(r"\(traceback: (.+)\)$", message)
    assert message.startswith("model ./m: its tokenizer can't be read: first second xxx") and log is not None
    assert "\n" not in message and "; fetch it again (" in message and len(message) < 500
    assert "RuntimeError: first" in Path(log[1]).read_text(encoding="utf-8")


def test_errors_that_say_little_are_named_by_their_type() -> None:
    with pytest.raises(UserError, match="the model: KeyError: 'width'"), opening("the model"):
        raise KeyError("width")
    with pytest.raises(UserError, match="the model: OSError"), opening("the model"):
        raise OSError


def test_a_traceback_on_another_host_is_named_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for driver, place in ((socket.gethostname(), ""), ("elsewhere", f" on {socket.gethostname()}")):
        monkeypatch.setenv(DRIVER_HOST, driver)
        with pytest.raises(UserError, match=rf"\.log{place}\)$"), opening("the model"):
            raise ValueError


def test_an_error_is_told_where_no_log_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"^the model: No space left on device$"), opening("the model"):
        raise RuntimeError("No space left on device")


class OutOfMemoryError(RuntimeError):
    """Like torch's."""


@pytest.mark.parametrize(
    "error",
    [
        *(UserError("mine"), CandidateError("mine"), MemoryError(), KeyboardInterrupt()),
        *(
            OutOfMemoryError("no room"),
            RuntimeError("CUDA error: an illegal access"),
            RuntimeError("DefaultCPUAllocator"),
        ),
    ],
)
def test_our_own_errors_and_those_that_no_file_causes_pass_through(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, opening("the model"):
        raise error
    assert caught.value is error
