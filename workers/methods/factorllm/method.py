"""FactorLLM as a method."""

from __future__ import annotations

from moevolve.workers.contract.methods import Method
from moevolve.workers.methods.factorllm.apply import FactorLlmApplicator
from moevolve.workers.methods.factorllm.calibrate import calibrate_factorllm
from moevolve.workers.methods.factorllm.calibrate_cmoe import calibrate_cmoe
from moevolve.workers.methods.factorllm.calibrate_moefication import calibrate_moefication
from moevolve.workers.methods.factorllm.edit import CmoeRecipe, FactorLlmEdit, FactorLlmRecipe, MoeficationRecipe
from moevolve.workers.methods.factorllm.export import FactorLlmExporter, factorized_network_use
from moevolve.workers.methods.factorllm.usage import USAGE

FACTORLLM = Method(
    edit=FactorLlmEdit,
    applicator=FactorLlmApplicator,
    exporter=FactorLlmExporter(),
    calibrators={
        FactorLlmRecipe: calibrate_factorllm,
        MoeficationRecipe: calibrate_moefication,
        CmoeRecipe: calibrate_cmoe,
    },
    usage=USAGE,
    module_uses={"FactorizedNetwork": factorized_network_use},
)
