"""ToMoE as a method."""

from __future__ import annotations

from moevolve.workers.contract.methods import Method
from moevolve.workers.methods.tomoe.apply import ToMoeApplicator
from moevolve.workers.methods.tomoe.calibrate import calibrate_tomoe
from moevolve.workers.methods.tomoe.edit import ToMoeEdit, ToMoeRecipe
from moevolve.workers.methods.tomoe.export import ToMoeExporter, masked_network_use, masked_values_use
from moevolve.workers.methods.tomoe.usage import USAGE

TOMOE = Method(
    edit=ToMoeEdit,
    applicator=ToMoeApplicator,
    exporter=ToMoeExporter(),
    calibrators={ToMoeRecipe: calibrate_tomoe},
    usage=USAGE,
    module_uses={"MaskedNetwork": masked_network_use, "MaskedValues": masked_values_use},
)
