"""Errors of the store a user can mend: the command line prints them in one line and exits with code 2."""


class StoreError(Exception):
    """The store can't do what was asked. The message is one line: what was wrong, where, and what to do about it."""


class UnreachableError(StoreError):
    """The database can't be had just now: it restarts, or cut the connection. What was under way may have happened."""


class LeaseHeldError(StoreError):
    """Another process runs the search."""


class LeaseLostError(StoreError):
    """Another process has taken the search over; this one must write no more."""


class NameTakenError(StoreError):
    """There is a search of this name already."""


class CancelledError(StoreError):
    """The search was cancelled, and nobody runs it any more."""


class NotFoundError(StoreError):
    """The store has nothing of that name; the message names the nearest."""


class NotRunningError(StoreError):
    """Nobody runs the search, so nobody can be asked for anything."""
