"""How a model's routers of experts are read when it is watched, edited or not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moevolve.workers.contract.methods import UsageReaders
from moevolve.workers.contract.usage import RoutedLayer
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.eep.router import EditableRouter, RoutingPlan


def _choices(router: EditableRouter, args: tuple[Any, ...], output: Any) -> tuple[Tensor, Tensor]:
    """See `RoutingReader`."""
    plan = router.plan
    if plan is not None and plan.slots is not None:
        # Slots are places in the tensors, and two new experts may share one: ask for the experts themselves.
        output = router.follow(replace(plan, slots=None), *args)
    logits, weights, chosen = output
    experts = logits.shape[-1] if plan is None else _experts_of(plan)
    # Dynamic skipping leaves a skipped expert in its place, with weight 0.
    used = torch.ones_like(chosen, dtype=torch.bool) if plan is None or plan.skip_below is None else weights != 0
    picked = torch.zeros(len(chosen), experts, dtype=torch.bool, device=chosen.device).scatter_(1, chosen, used)
    scaled = torch.zeros(picked.shape, dtype=torch.float64, device=chosen.device)
    return picked, scaled.scatter_(1, chosen, weights.double())


def _experts_of(plan: RoutingPlan) -> int:
    tensor = next(each for each in (plan.selected, plan.mapping, plan.folded) if each is not None)
    return int(tensor.shape[0])


def _with_origins(layer: RoutedLayer, position: int, edit: EepEdit) -> RoutedLayer:
    return replace(layer, origins=tuple(np.abs(edit.expert_merging[position]).argmax(axis=1).tolist()))


USAGE = UsageReaders({EditableRouter: _choices}, _with_origins)
