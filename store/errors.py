"""Errors of the store that a user can resolve: the command line prints them in one line and exits with code 2."""

from collections.abc import Iterator
from contextlib import contextmanager

from moevolve.evaluators.errors import UserError


class StoreError(Exception):
    """The store can't carry out a request. Its one-line message says what was wrong, where, and what to do about it."""


class UnreachableError(StoreError):
    """The database restarts or cut the connection. A transaction that was under way may have been committed."""


class DamagedError(StoreError):
    """A stored value can't be read. The message names what it belongs to, and has nothing that isn't for clients."""


@contextmanager
def parsing(what: str) -> Iterator[None]:
    """Context manager for a block that does nothing but parse a stored value; `what` begins the error's message.

    Raises:
        DamagedError: The value has another form.
    """
    try:
        yield
    except (UserError, StoreError):
        raise
    except Exception as error:  # parsers fail in any way
        raise damaged(what) from error


def damaged(what: str) -> DamagedError:
    """Return the error for a stored value of another form."""
    reason = "it is damaged, or another version of moevolve wrote it"
    return DamagedError(f"{what} can't be read: {reason}; `moevolve db check` names what is damaged")


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


class MissingStoreError(StoreError):
    """There is no store yet, but one can be made."""


class NotRunningError(StoreError):
    """The search has no driver that could carry out a request."""
