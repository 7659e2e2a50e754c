"""Errors that reach users or are recorded with a candidate."""


class UserError(Exception):
    """Wrong input. The message names the problem, its place (file, line or field) and the remedy.

    The command line prints it in one line and exits with code 2.
    """


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's type if it has no message."""
    return str(error).strip().split("\n", 1)[0] or type(error).__name__


class CandidateError(Exception):
    """A fault of the candidate itself, such as non-finite logits: recorded as its failure and never retried."""
