"""EEP as a method."""

from __future__ import annotations

from moevolve.workers.contract.methods import Method
from moevolve.workers.methods.eep.apply import EepApplicator
from moevolve.workers.methods.eep.calibrate_experts import calibrate_experts
from moevolve.workers.methods.eep.edit import EepEdit, ExpertsRecipe
from moevolve.workers.methods.eep.export import EepExporter, edited_router_use
from moevolve.workers.methods.eep.usage import USAGE

EEP = Method(
    edit=EepEdit,
    applicator=EepApplicator,
    owns_experts=True,
    exporter=EepExporter(),
    calibrators={ExpertsRecipe: calibrate_experts},
    usage=USAGE,
    module_uses={"EditedRouter": edited_router_use},
)
