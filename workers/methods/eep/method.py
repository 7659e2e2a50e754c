"""EEP as a method, and how its routers are read when a model is observed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from moevolve.workers.contract.methods import Method
from moevolve.workers.methods.eep.apply import EepApplicator
from moevolve.workers.methods.eep.calibrate_experts import calibrate_experts
from moevolve.workers.methods.eep.edit import EepEdit, ExpertsMeasurement
from moevolve.workers.methods.eep.export import EepExporter
from moevolve.workers.methods.eep.router import EditableRouter


def _read_routing(
    router: EditableRouter, args: tuple[Tensor, ...], output: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    plan = router.plan
    if plan is not None and plan.positions is not None:
        # Two kept experts may share a position in the expert tensors: route again, to the kept experts themselves.
        output = router.route(replace(plan, positions=None), *args)
    logits, weights, chosen = output
    experts = logits.shape[-1] if plan is None else plan.retained
    # Dynamic skipping leaves a skipped expert in the top-k, with weight 0.
    used = torch.ones_like(chosen, dtype=torch.bool) if plan is None or plan.skip_below is None else weights != 0
    picked = torch.zeros(len(chosen), experts, dtype=torch.bool, device=chosen.device).scatter_(1, chosen, used)
    scaled = torch.zeros(picked.shape, dtype=torch.float64, device=chosen.device)
    # A table of token ids can have an expert twice.
    return picked, scaled.scatter_add_(1, chosen, weights.double())


EEP = Method(
    edit=EepEdit,
    applicator=EepApplicator,
    exporter=EepExporter(),
    calibrators={ExpertsMeasurement: calibrate_experts},
    routing={EditableRouter: _read_routing},
    described=lambda layer, position, edit: replace(
        layer, origins=tuple(np.abs(edit.expert_merging[position]).argmax(axis=1).tolist())
    ),
)
