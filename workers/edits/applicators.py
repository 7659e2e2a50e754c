"""Which applicator makes which kind of edit."""

from __future__ import annotations

from collections.abc import Callable

from moevolve.workers.edits.applicator import Applicator, ModelParts
from moevolve.workers.edits.apply_eep import EepApplicator
from moevolve.workers.edits.eep import EepEdit

APPLICATORS: dict[type, Callable[[ModelParts], Applicator]] = {EepEdit: EepApplicator}
"""Applicators by the type of edit."""
