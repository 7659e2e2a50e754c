"""Which applicator makes which kind of edit."""

from __future__ import annotations

from collections.abc import Callable

from moevolve.workers.methods.applicator import Applicator, ModelParts
from moevolve.workers.methods.eep.apply import EepApplicator
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.factorllm.apply import FactorLlmApplicator
from moevolve.workers.methods.factorllm.edit import FactorLlmEdit
from moevolve.workers.methods.nanomoe.apply import NanoMoeApplicator
from moevolve.workers.methods.nanomoe.edit import NanoMoeEdit
from moevolve.workers.methods.tomoe.apply import ToMoeApplicator
from moevolve.workers.methods.tomoe.edit import ToMoeEdit

APPLICATORS: dict[type, Callable[[ModelParts], Applicator]] = {
    EepEdit: EepApplicator,
    NanoMoeEdit: NanoMoeApplicator,
    FactorLlmEdit: FactorLlmApplicator,
    ToMoeEdit: ToMoeApplicator,
}
"""Applicators by the type of edit."""
