"""Callbacks of a running search. This module imports no Ray, so that a command can watch from its start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moevolve.search.config.run import RunConfig
    from moevolve.store.records import Progress


@dataclass(frozen=True, slots=True, repr=False)  # a default in signatures, which should be short
class Observer:
    """Callbacks that a running search calls.

    Attributes:
        on_begin: Takes the configuration of the recorded search before it runs.
        on_note: Takes a line of lasting interest (failures that a retry resets, rows set aside).
        on_stage: Takes a line about the present stage (calibrating, re-ranking ...).
        on_progress: Takes the state of the population after every change.
    """

    on_begin: Callable[[RunConfig], None] = lambda _: None
    on_note: Callable[[str], None] = lambda _: None
    on_stage: Callable[[str], None] = lambda _: None
    on_progress: Callable[[Progress], None] = lambda _: None


# For whoever has no use for any of them.
SILENT = Observer()
