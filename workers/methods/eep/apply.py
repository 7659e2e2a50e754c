"""Applying EEP edits to a resident model: pruned experts are routed around, merged ones are written into buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.kernels.routing_rule import NO_SCORES, NO_SKIPPING, RoutingRule
from moevolve.workers.contract.capacity import experts_room
from moevolve.workers.contract.edits import Edit
from moevolve.workers.contract.methods import ExpertsOwner, ModelParts, host_tensor
from moevolve.workers.families.layers import MoELayer, linears_outside
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.eep.expert_memory import ExpertMemory
from moevolve.workers.methods.eep.experts import LayerExperts, SharedExpert
from moevolve.workers.methods.eep.layer_linears import LayerLinears
from moevolve.workers.methods.eep.outputs import ExpertOutputs
from moevolve.workers.methods.eep.router import EditableRouter, RoutingPlan, fold, skipping_thresholds
from moevolve.workers.methods.shared.outputs import Repairable


class EepApplicator(ExpertsOwner, Repairable):
    """Router mapping and expert merging (EEP, arXiv 2407.00945, Eq. 5 and 6) on a resident model.

    A layer with one-hot `W_EM` copies no weights: its routing points at the resident originals. Merged layers write
    into buffers that are allocated once and reused. If the originals are on the host, every layer's experts are copied
    from there, edited or not: as many layers as fit on the device keep theirs, the others copy them in every forward
    pass.

    If an edit skips experts, `apply` runs a pass over the edit's calibration rows to measure the thresholds.
    """

    def __init__(self, parts: ModelParts) -> None:
        layers, device, on_host = parts.moe_layers, parts.device, parts.on_host
        if not layers:
            raise UserError("EEP edits need MoE layers, and this model is dense")
        self._model, self._layers, self._stored = parts.model, layers, parts.stored
        self._edit: EepEdit | None = None

        def room() -> int:
            # All else of the model is to stay on the device, too.
            return experts_room(device, parts.pass_bytes, self._linears.waiting)

        self._memory = memory = ExpertMemory(device, len(layers), room) if on_host else None
        self.routers = tuple(EditableRouter(layer) for layer in layers)
        self.experts: tuple[LayerExperts, ...] = tuple(
            LayerExperts(layer, ordinal, device if on_host else layer.router_weight.device, memory, parts.stored)
            for ordinal, layer in enumerate(layers)
        )
        hosted = linears_outside(parts.model, layers) if on_host and device.type != "cpu" else ()
        # Reading experts from files takes far longer than copying these from any memory.
        self._linears = LayerLinears(parts.model, hosted, device, pins=parts.stored is None)
        self.shared = tuple(
            None if layer.shared_expert is None else SharedExpert(layer, partial(self._linears.load, layer.index))
            for layer in layers
        )
        for layer, router, experts in zip(layers, self.routers, self.experts, strict=True):
            setattr(layer.block, layer.family.router, router)
            router.before_forward = experts.load_for_pass

    def apply(self, edit: Edit) -> None:
        assert isinstance(edit, EepEdit)
        self._check(edit)
        plans = self._plans(edit)
        for ordinal, plan in enumerate(plans):
            self._use(edit, ordinal, plan)
        if edit.skip_rows is not None:
            thresholds = skipping_thresholds(self._model, self.routers, edit.skip_rows.sequences)
            for router, plan, threshold in zip(self.routers, plans, thresholds, strict=True):
                router.plan = replace(plan, skip_below=threshold)

    def by_layer(self, edit: Edit, layers: Sequence[int]) -> Iterator[int]:
        assert isinstance(edit, EepEdit)
        numbers = {layer.index: ordinal for ordinal, layer in enumerate(self._layers)}
        self.apply(edit)
        plans = [router.plan for router in self.routers]
        for index in layers:
            ordinal = numbers.get(index)
            if ordinal is None:
                yield index
                continue
            self._use(edit, ordinal, plans[ordinal])  # another edit may have had the layer in between
            try:
                yield index
            finally:
                self.experts[ordinal].release()
                self._restore_shared(ordinal)

    def _use(self, edit: EepEdit, ordinal: int, plan: RoutingPlan | None) -> None:
        """Apply an edit to one MoE layer, whatever was applied to it before."""
        experts = self.experts[ordinal]
        self._restore_shared(ordinal)
        if not edit.one_hot_merging[ordinal]:
            experts.use_merged(host_tensor(edit.expert_merging)[ordinal])
        elif experts.on_host:
            experts.use_selected(edit.expert_merging[ordinal].argmax(axis=1).tolist())
        else:
            experts.use_originals()
        self.routers[ordinal].plan = plan
        self._edit = edit

    def _restore_shared(self, ordinal: int) -> None:
        shared = self.shared[ordinal]
        if shared is not None:
            shared.weights.restore()

    @contextmanager
    def one_layer(self) -> Iterator[None]:
        if self._memory is None:
            yield
            return
        try:
            with self._memory.one_layer():
                for ordinal in range(len(self._layers)):  # the first may have weights of an edit that takes turns
                    self._restore_shared(ordinal)
                self._linears.one_layer = True
                self._linears.drop()
                yield
        finally:
            if not self._memory.by_layer:
                self._linears.one_layer = False
                if self._stored is not None:
                    self._stored.forget()

    def outputs(self) -> tuple[ExpertOutputs, ...]:
        assert self._edit is not None, "no edit is applied to the model"
        parts = zip(self._layers, self.routers, self.experts, self.shared, strict=True)
        return tuple(ExpertOutputs(*each, self._edit, ordinal) for ordinal, each in enumerate(parts))

    def revert(self) -> None:
        """Originals on the host are copied back when a forward pass next needs them."""
        for ordinal, (router, experts) in enumerate(zip(self.routers, self.experts, strict=True)):
            router.plan = None
            experts.reset()
            self._restore_shared(ordinal)

    def original_experts(self, ordinal: int) -> Mapping[str, Tensor]:
        return self.experts[ordinal].originals

    def _plans(self, edit: EepEdit) -> list[RoutingPlan]:
        """Routing of every layer."""
        logits_space, active = edit.router_space == "logits", edit.active
        mappings = host_tensor(edit.router_mapping)
        selected = host_tensor(edit.router_mapping.argmax(axis=2))
        positions = host_tensor(edit.expert_merging.argmax(axis=2))
        plans = []
        for i, (layer, experts) in enumerate(zip(self._layers, self.experts, strict=True)):
            device = layer.router_weight.device
            if edit.one_hot_mapping[i]:
                kept, parts = selected[i].to(device), (layer.correction_bias, layer.factors)
                correction, factors = (None if each is None else each.index_select(0, kept) for each in parts)
                plan = RoutingPlan(
                    active, selected=kept, correction=correction, factors=factors, logits_space=logits_space
                )
            else:
                plan = _mapped_plan(layer, active, mappings[i].to(device), logits_space)
            if layer.table is not None:
                plan = replace(plan, places=places_of(mappings[i]).to(device))
            if edit.one_hot_merging[i] and not experts.on_host:
                plan = replace(plan, positions=positions[i].to(device))
            plans.append(plan)
        return plans

    def _check(self, edit: EepEdit) -> None:
        count = self._layers[0].count
        if (edit.layers, edit.experts) != (len(self._layers), count):
            raise UserError(
                f"the edit is for {edit.layers} MoE layers of {edit.experts} experts, the model "
                f"has {len(self._layers)} of {count}; use the model it was searched on"
            )
        fault = eep_fault(self._layers[0].rule, edit)
        if fault is not None:
            raise UserError(f"{self._layers[0].family.model_type} models can't have this edit: {fault}")
        if not edit.finite:
            raise CandidateError("a router mapping or expert merging entry is not finite")


def eep_fault(rule: RoutingRule, edit: EepEdit) -> str | None:
    """Explain why a family's routers can't have this edit; None if they can."""
    fault = rule.groups.fault(edit.retained)
    if fault is not None:
        return f"{edit.retained} experts {fault}"
    fault = rule.active_fault(edit.retained, edit.active)
    if fault is not None:
        return f"{edit.active} active experts {fault}"
    if not rule.has_scores and edit.router_space == "probs" and not edit.one_hot_mapping.all():
        return f"router_space {NO_SCORES}"
    if not rule.can_skip and edit.skip_rows is not None:
        return f"dynamic skipping: {NO_SKIPPING}"
    return None


def places_of(mapping: Tensor) -> Tensor:
    """Return the number of the new expert that each original one's tokens go to, or -1, int64 [n].

    It is the one with the largest coefficient in the router mapping, float32 [n', n], if that is positive: the one
    whose router row is most like the original's.
    """
    largest, places = mapping.max(dim=0)
    return torch.where(largest > 0, places, -1)


def _mapped_plan(layer: MoELayer, active: int, mapping: Tensor, logits_space: bool) -> RoutingPlan:
    correction = None if layer.correction_bias is None else fold(mapping, layer.correction_bias)
    if not logits_space:
        return RoutingPlan(active, mapping=mapping, correction=correction)
    return RoutingPlan(
        active,
        folded=fold(mapping, layer.router_weight),
        folded_bias=None if layer.router_bias is None else fold(mapping, layer.router_bias),
        correction=correction,
        factors=None if layer.factors is None else fold(mapping, layer.factors),
        logits_space=True,
    )
