"""Errors of the store that a user can resolve: the command line prints them in one line and exits with code 2."""


class StoreError(Exception):
    """The store can't carry out a request. Its one-line message says what was wrong, where, and what to do about it."""


class UnreachableError(StoreError):
    """The database restarts or cut the connection. A transaction that was under way may have been committed."""


class LeaseHeldError(StoreError):
    """Another process runs the search."""


class LeaseLostError(StoreError):
    """Another process has taken over the search; this one must stop writing."""


class NameTakenError(StoreError):
    """A search of this name exists already."""


class CancelledError(StoreError):
    """The search was cancelled and has no driver."""


class NotFoundError(StoreError):
    """The store has nothing of that name; the message suggests the most similar names."""


class NotRunningError(StoreError):
    """The search has no driver that could carry out a request."""
