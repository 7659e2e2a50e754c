"""Errors a user can mend: the command line prints them in one line and exits with code 2."""


class UserError(Exception):
    """Bad input. The message names what was wrong, where (file, line or field), and what to do about it."""


class CandidateError(Exception):
    """A candidate's own fault (non-finite logits, say): recorded as its failure, never retried."""
