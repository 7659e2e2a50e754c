"""The registry of methods, one line each, and lookups in it."""

from __future__ import annotations

from torch import nn

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.edits import Edit, IdentityEdit, Measurement, underlying
from moevolve.workers.contract.methods import Calibrator, ExpertsOwner, Exporter, Method, RoutingReader
from moevolve.workers.methods.eep.method import EEP
from moevolve.workers.methods.factorllm.method import FACTORLLM
from moevolve.workers.methods.nanomoe.method import NANOMOE
from moevolve.workers.methods.repair.apply import REPAIR
from moevolve.workers.methods.tomoe.method import TOMOE

# Methods by type of edit.
METHODS: dict[type, Method] = {method.edit: method for method in (EEP, NANOMOE, FACTORLLM, TOMOE, REPAIR)}


def method_of(kind: type) -> Method:
    """Return the method for a type of edit."""
    if kind not in METHODS:
        raise UserError(f"edits of kind {kind.__name__} are unknown; there are {_names(list(METHODS))}")
    return METHODS[kind]


def experts_owner() -> Method:
    """Return the method whose applicator takes over the experts of MoE models."""
    return next(method for method in METHODS.values() if issubclass(method.applicator, ExpertsOwner))


def calibrator_of(measurement: Measurement) -> Calibrator:
    """Return the calibrator for a type of measurement."""
    for method in METHODS.values():
        if type(measurement) in method.calibrators:
            return method.calibrators[type(measurement)]
    raise UserError(f"calibrations of kind {type(measurement).__name__} are unknown")


def exporter_of(edit: Edit) -> Exporter:
    """Return the exporter for an edit, or for the edit that it follows up. Pass it `underlying(edit)`."""
    base = underlying(edit)
    method = experts_owner() if isinstance(base, IdentityEdit) else METHODS.get(type(base))
    if method is None or method.exporter is None:
        exported = [kind for kind, each in METHODS.items() if each.exporter is not None]
        known = _names([*exported, IdentityEdit])
        raise UserError(f"edits of kind {type(base).__name__} can't be exported; export one of {known}")
    return method.exporter


def routing_reader(module: nn.Module) -> RoutingReader | None:
    """Return the reader of a router module's choices; None for modules that aren't routers."""
    found = (method.routing.get(type(module)) for method in METHODS.values())
    return next((reader for reader in found if reader is not None), None)


def _names(kinds: list[type]) -> str:
    return ", ".join(sorted(kind.__name__ for kind in kinds))
