"""Which applicator makes which kind of edit."""

from __future__ import annotations

from collections.abc import Callable

from moevolve.workers.edits.applicator import Applicator, ModelParts
from moevolve.workers.edits.apply_eep import EepApplicator
from moevolve.workers.edits.apply_factorllm import FactorLlmApplicator
from moevolve.workers.edits.apply_nanomoe import NanoMoeApplicator
from moevolve.workers.edits.apply_tomoe import ToMoeApplicator
from moevolve.workers.edits.eep import EepEdit
from moevolve.workers.edits.factorllm import FactorLlmEdit
from moevolve.workers.edits.nanomoe import NanoMoeEdit
from moevolve.workers.edits.tomoe import ToMoeEdit

APPLICATORS: dict[type, Callable[[ModelParts], Applicator]] = {
    EepEdit: EepApplicator,
    NanoMoeEdit: NanoMoeApplicator,
    FactorLlmEdit: FactorLlmApplicator,
    ToMoeEdit: ToMoeApplicator,
}
"""Applicators by the type of edit."""
