"""Repair as a method."""

from __future__ import annotations

from moevolve.workers.contract.methods import Method
from moevolve.workers.methods.repair.apply import RepairApplicator
from moevolve.workers.methods.repair.edit import RepairedEdit

REPAIR = Method(edit=RepairedEdit, applicator=RepairApplicator)
