"""Who watches a search. Apart from what runs one, so that a command can watch from its first moment on without Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moevolve.search.config.run import RunConfig
    from moevolve.store.records import Progress

SEARCH: ContextVar[str | None] = ContextVar("search", default=None)
"""Name of the search that the present thread runs, for logs."""


@contextmanager
def logged_as(search: str) -> Iterator[None]:
    """Let what is logged here say which search it is about."""
    before = SEARCH.set(search)
    try:
        yield
    finally:
        SEARCH.reset(before)


@dataclass(frozen=True, slots=True)
class Observer:
    """What a search tells whoever watches it.

    Attributes:
        on_begin: the configuration of a search that is in the store and runs from now on.
        on_note: a line worth keeping (what a retry takes back, rows set aside).
        on_stage: a line about what happens now (loading, re-ranking ...).
        on_progress: where the population stands.
    """

    on_begin: Callable[[RunConfig], None] = lambda _: None
    on_note: Callable[[str], None] = lambda _: None
    on_stage: Callable[[str], None] = lambda _: None
    on_progress: Callable[[Progress], None] = lambda _: None
