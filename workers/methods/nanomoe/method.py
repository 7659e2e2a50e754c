"""NanoMoE as a method."""

from __future__ import annotations

from moevolve.workers.contract.methods import Method
from moevolve.workers.methods.nanomoe.apply import NanoMoeApplicator
from moevolve.workers.methods.nanomoe.edit import NanoMoeEdit
from moevolve.workers.methods.nanomoe.export import NanoMoeExporter, block_mixed_linear_use
from moevolve.workers.methods.nanomoe.usage import USAGE

NANOMOE = Method(
    edit=NanoMoeEdit,
    applicator=NanoMoeApplicator,
    exporter=NanoMoeExporter(),
    usage=USAGE,
    module_uses={"BlockMixedLinear": block_mixed_linear_use},
)
