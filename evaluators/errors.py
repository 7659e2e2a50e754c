"""Errors that reach users or are recorded with a candidate."""

import errno
import os
import socket
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Literal

# Characters of another library's message that are quoted: more belongs into the log, not into a line.
_LONGEST = 300

# What to do about a path that the system refuses, by the number of its error.
_REMEDIES = {
    errno.ENOENT: "give one that exists",
    errno.EEXIST: "give another one, or remove it first",
    errno.ENOTDIR: "a part of it is a file; give the path of a folder",
    errno.EISDIR: "give the path of a file",
    errno.ENAMETOOLONG: "give it a shorter name",
    errno.ELOOP: "a link in it leads back to itself; remove the link, or give another path",
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "get the permission, or give another path"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space, or give another path"),
}

# Environment variable of workers: name of the host whose user reads their messages.
DRIVER_HOST = "MOEVOLVE_DRIVER_HOST"

# Texts in the messages of device errors, and of the host's lack of memory, for which torch has no exception class.
_DEVICES = ("CUDA", "CUBLAS", "CUDNN", "CUSPARSE", "CUSOLVER", "NCCL", "HIP error", "device-side assert")
_HOST_MEMORY = "DefaultCPUAllocator"


class UserError(Exception):
    """Wrong input. The message names the problem, its place (file, line or field) and the remedy.

    The command line prints it in one line and exits with code 2.
    """


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's type if it has no message."""
    return str(error).strip().split("\n", 1)[0] or type(error).__name__


# Cause of a failed evaluation. `candidate`: the edit itself, on any worker (an exception, numbers that aren't finite).
# `worker`: the workers that evaluated it died or were retired again and again. `timeout`: it exceeded the time limit.
FailureKind = Literal["candidate", "worker", "timeout"]


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return the end of an error message: the known words most similar to `word`, else some known words."""
    names = sorted(set(known))
    if not names:
        return "none exists yet"
    close = get_close_matches(word, names, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}?"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"there are {', '.join(names[:5])}{more}"


class CandidateError(Exception):
    """A fault of the candidate itself, such as non-finite logits: recorded as its failure and never retried."""


@contextmanager
def opening(what: str, advice: str = "") -> Iterator[None]:
    """Context manager for a block that opens what a user gave with another library's code.

    Whatever that code raises becomes a `UserError` of one line, and the traceback goes to a log file that it names.
    Faults of the machine (`is_machine_fault`) stay what they are: what was opened may be opened elsewhere.

    Args:
        what: What is opened and where it is, as the beginning of the message: `model ./m: its tokenizer can't be read`.
        advice: What the user can do about it; empty if that can't be known.
    """
    try:
        yield
    except (UserError, CandidateError):
        raise
    except Exception as error:  # libraries raise errors of all kinds for files that they do not expect
        if is_machine_fault(error):
            raise
        hint = f"; {advice}" if advice else ""
        raise UserError(f"{what}: {own_words(error)}{hint}{_log_of(error)}") from error


def path_fault(error: Exception, path: object = None) -> str | None:
    """Say in one line which path the system refused, why, and what to do; None for other errors.

    `path` is named if the error doesn't name any.
    """
    message = str(error)
    if isinstance(error, OSError) and error.errno in _REMEDIES:
        named = path if error.filename is None or isinstance(error.filename, int) else error.filename
        return None if named is None else f"{named}: {error.strerror}; {_REMEDIES[error.errno]}"
    # Python has no classes of errors for these.
    named = "a path" if path is None else repr(str(path))
    if type(error) is ValueError and "null byte" in message:
        return f"{named} has a zero byte, which no file's name can have; leave it out"
    if type(error) is RuntimeError and message.startswith("Symlink loop"):
        return f"{message}; {_REMEDIES[errno.ELOOP]}"
    if type(error) is RuntimeError and message.startswith("Could not determine home"):
        return f"{named} begins with ~, and this user has no home; write the path out"
    return None


@contextmanager
def refused_paths() -> Iterator[None]:
    """Context manager that turns the system's refusal of a path into a `UserError` of one line; see `path_fault`."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        fault = path_fault(error)
        if fault is None:
            raise
        raise UserError(fault) from error


def _log_of(error: BaseException) -> str:
    """Write an error's traceback into a file, and return the file's name in brackets; empty if it can't be written."""
    text, host = "".join(traceback.format_exception(error)), socket.gethostname()
    try:
        descriptor, log = tempfile.mkstemp(prefix="moevolve-", suffix=".log")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text)
    except OSError:  # the disk may be full, which may be what the error says
        return ""
    return f" (traceback: {log}{'' if os.environ.get(DRIVER_HOST, host) == host else f' on {host}'})"


def is_machine_fault(error: BaseException) -> bool:
    """Return whether the machine caused an exception, not the input: too little memory, or a device's error.

    After a device error such as an illegal access, every further call in the same CUDA context fails.
    """
    kinds = {kind.__name__ for kind in type(error).__mro__}  # torch isn't imported for its errors
    if kinds & {"MemoryError", "OutOfMemoryError", "AcceleratorError"}:
        return True
    return isinstance(error, RuntimeError) and any(name in str(error) for name in (*_DEVICES, _HOST_MEMORY))


def own_words(error: BaseException) -> str:
    """Return an error's message in one line, behind its type where the message alone says little."""
    message = " ".join(str(error).split())
    if not message or isinstance(error, LookupError | AttributeError | TypeError):
        message = f"{type(error).__name__}: {message}".removesuffix(": ")
    return one_line(message, _LONGEST)


def one_line(text: str, longest: int) -> str:
    """Return a text in one line of at most about so many characters, with `...` where it is cut."""
    text = " ".join(text.split())
    return text if len(text) <= longest else f"{text[:longest].rstrip()} ..."
