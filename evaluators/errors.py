"""Errors that reach users or are recorded with a candidate."""

import os
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

_LONGEST = 300
"""Characters of another library's message that are quoted: more belongs into the log, not into a line."""


class UserError(Exception):
    """Wrong input. The message names the problem, its place (file, line or field) and the remedy.

    The command line prints it in one line and exits with code 2.
    """


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's type if it has no message."""
    return str(error).strip().split("\n", 1)[0] or type(error).__name__


class CandidateError(Exception):
    """A fault of the candidate itself, such as non-finite logits: recorded as its failure and never retried."""


@contextmanager
def opening(what: str, advice: str = "") -> Iterator[None]:
    """Context manager for a block that opens what a user gave with another library's code.

    Whatever that code raises becomes a `UserError` of one line, and the traceback goes to a log file that it names.

    Args:
        what: What is opened and where it is, as the beginning of the message: `model ./m: its tokenizer can't be read`.
        advice: What the user can do about it; empty if that can't be known.
    """
    try:
        yield
    except (UserError, CandidateError, MemoryError):
        raise
    except Exception as error:  # libraries raise errors of all kinds for files that they do not expect
        descriptor, log = tempfile.mkstemp(prefix="moevolve-", suffix=".log")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write("".join(traceback.format_exception(error)))
        hint = f"; {advice}" if advice else ""
        raise UserError(f"{what}: {own_words(error)}{hint} (traceback: {log})") from error


def own_words(error: BaseException) -> str:
    """Return an error's message in one line, behind its type where the message alone says little."""
    message = " ".join(str(error).split())
    if not message or isinstance(error, LookupError | AttributeError | TypeError):
        message = f"{type(error).__name__}: {message}".removesuffix(": ")
    return message if len(message) <= _LONGEST else f"{message[:_LONGEST]} ..."
