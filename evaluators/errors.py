"""Errors a user can mend: the command line prints them in one line and exits with code 2."""


class UserError(Exception):
    """Bad input. The message names what was wrong, where (file, line or field), and what to do about it."""


def first_line(error: BaseException) -> str:
    """The first line of what another library's error says, for messages of one line; its type if it says nothing."""
    return str(error).strip().split("\n", 1)[0] or type(error).__name__


class CandidateError(Exception):
    """A candidate's own fault (non-finite logits, say): recorded as its failure, never retried."""
