from __future__ import annotations

import re
from pathlib import Path

import pytest

from moevolve.evaluators.errors import CandidateError, UserError, opening


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


@pytest.mark.parametrize("error", [UserError("mine"), CandidateError("mine"), MemoryError(), KeyboardInterrupt()])
def test_our_own_errors_and_those_that_no_file_causes_pass_through(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, opening("the model"):
        raise error
    assert caught.value is error
