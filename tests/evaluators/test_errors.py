from __future__ import annotations

import errno
import os
import re
import socket
import tempfile
from pathlib import Path

import pytest

from moevolve.evaluators.errors import DRIVER_HOST, CandidateError, UserError, opening, path_fault, refused_paths


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


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("x" * 300, "xxx: File name too long; give it a shorter name"),
        ("file/below", "file/below: Not a directory; a part of it is a file; give the path of a folder"),
        ("loop/below", "loop/below: Too many levels of symbolic links; a link in it leads back to itself"),
        ("none", "none: No such file or directory; give one that exists"),
        ("folder", "folder: Is a directory; give the path of a file"),
        ("a\0b", "a path has a zero byte, which no file's name can have; leave it out"),
    ],
)
def test_paths_that_the_system_refuses_are_named_with_what_to_do(
    path: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("folder").mkdir()
    Path("loop").symlink_to("loop")
    with pytest.raises(UserError) as caught, refused_paths():
        Path(path).read_text(encoding="utf-8")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_what_the_system_says_of_no_path_is_no_fault_of_one() -> None:
    assert path_fault(PermissionError(errno.EACCES, os.strerror(errno.EACCES), "locked")) == (
        "locked: Permission denied; get the permission, or give another path"
    )
    assert path_fault(OSError(errno.EACCES, "no"), "mine") == "mine: no; get the permission, or give another path"
    assert "has no home" in str(path_fault(RuntimeError("Could not determine home directory.")))
    for error in (OSError("no room"), BrokenPipeError(errno.EPIPE, "broken"), ValueError("wrong"), RuntimeError("no")):
        with pytest.raises(type(error)), refused_paths():
            raise error
