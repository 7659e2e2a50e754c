"""Repair as a method."""

from __future__ import annotations

from moevolve.workers.contract.fitting import RowsRecipe
from moevolve.workers.contract.methods import Method
from moevolve.workers.methods.repair.apply import RepairApplicator
from moevolve.workers.methods.repair.edit import RepairedEdit
from moevolve.workers.methods.repair.rows import calibrate_rows

REPAIR = Method(edit=RepairedEdit, applicator=RepairApplicator, calibrators={RowsRecipe: calibrate_rows})
