"""EEP edits on a resident model: routing over the originals, merged experts into buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.kernels.routing_rule import NO_SCORES, RoutingRule
from moevolve.workers.contract.edits import Edit
from moevolve.workers.contract.methods import ModelParts, host_tensor
from moevolve.workers.families.layers import MoELayer
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.eep.experts import LayerExperts
from moevolve.workers.methods.eep.outputs import ExpertOutputs
from moevolve.workers.methods.eep.room import ExpertRoom
from moevolve.workers.methods.eep.router import EditableRouter, RoutingPlan, fold
from moevolve.workers.methods.eep.skipping import skipping_thresholds


class EepApplicator:
    """Router mapping and expert merging (EEP, arXiv 2407.00945, Eq. 5 and 6) on a resident model.

    A layer whose `W_EM` is one-hot copies no weights: its routing points at the resident originals. Merged layers write
    into buffers allocated once and reused. With host-resident originals every layer, edited or not, is filled from
    them: as many as fit on the device keep what they run on, the others are filled whenever a pass comes to them.

    An edit that skips experts is followed by a pass over its rows, which measures its thresholds.
    """

    def __init__(self, parts: ModelParts) -> None:
        """Install the router wrappers and take over the experts.

        Raises:
            UserError: the model has no MoE layers.
        """
        layers, device, on_host = parts.moe_layers, parts.device, parts.on_host
        if not layers:
            raise UserError("EEP edits need MoE layers, and this model is dense")
        self._model, self._layers = parts.model, layers
        self._edit: EepEdit | None = None
        room = ExpertRoom(device, len(layers), parts.pass_bytes) if on_host else None
        self.routers = tuple(EditableRouter(layer) for layer in layers)
        self.experts: tuple[LayerExperts, ...] = tuple(
            LayerExperts(layer, ordinal, device if on_host else layer.router_weight.device, room)
            for ordinal, layer in enumerate(layers)
        )
        for layer, router, experts in zip(layers, self.routers, self.experts, strict=True):
            setattr(layer.block, layer.family.router, router)
            router.before = experts.ready

    def apply(self, edit: Edit) -> None:
        """See `Applicator.apply`."""
        assert isinstance(edit, EepEdit)
        self.check(edit)
        plans = self.plans(edit)
        merging = host_tensor(edit.expert_merging)
        for layer, (router, experts, plan) in enumerate(zip(self.routers, self.experts, plans, strict=True)):
            if edit.one_hot_merging[layer]:
                if experts.on_host:
                    experts.show_selected(edit.expert_merging[layer].argmax(axis=1).tolist())
                else:
                    experts.show_originals()
            else:
                experts.show_merged(merging[layer])
            router.plan = plan
        self._edit = edit
        if edit.skip_rows is not None:
            thresholds = skipping_thresholds(self._model, self.routers, edit.skip_rows.sequences)
            for router, plan, threshold in zip(self.routers, plans, thresholds, strict=True):
                router.plan = replace(plan, skip_below=threshold)

    def outputs(self) -> tuple[ExpertOutputs, ...]:
        """See `Repairable`."""
        assert self._edit is not None, "there is no edit on the model"
        parts = zip(self._layers, self.routers, self.experts, strict=True)
        return tuple(ExpertOutputs(*each, self._edit, ordinal) for ordinal, each in enumerate(parts))

    def revert(self) -> None:
        """See `Applicator.revert`. Originals on the host come back when something next needs them."""
        for router, experts in zip(self.routers, self.experts, strict=True):
            router.plan = None
            experts.stand_by()

    def original_experts(self, ordinal: int) -> Mapping[str, Tensor]:
        """See `ExpertsOwner.original_experts`."""
        return self.experts[ordinal].originals

    def plans(self, edit: EepEdit) -> list[RoutingPlan]:
        """Routing of every layer. One transfer per device and matrix kind, however many layers there are."""
        logits_space = edit.router_space == "logits"
        mappings = _per_layer(host_tensor(edit.router_mapping), self._layers)
        selected = _per_layer(host_tensor(edit.router_mapping.argmax(axis=2)), self._layers)
        slots = _per_layer(host_tensor(edit.expert_merging.argmax(axis=2)), self._layers)
        plans = []
        for i, (layer, experts) in enumerate(zip(self._layers, self.experts, strict=True)):
            slot = slots[i] if edit.one_hot_merging[i] and not experts.on_host else None
            if edit.one_hot_mapping[i]:
                plan = _selecting(layer, edit.active, slot, selected[i], logits_space)
            else:
                plan = _mapping(layer, edit.active, slot, mappings[i], logits_space)
            plans.append(plan)
        return plans

    def check(self, edit: EepEdit) -> None:
        """Whether the model can have an edit; raises what `apply` does if it can't."""
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
    """Why a family's routers can't have this edit; None if they can."""
    groups = rule.groups
    fault = groups.fault(edit.retained)
    if fault is not None:
        return f"{edit.retained} experts {fault}"
    if edit.active > groups.reach(edit.retained):
        return (
            f"{edit.active} active experts of {edit.retained} are more than the {groups.reach(edit.retained)} in the "
            f"{groups.chosen} of {groups.count} routing groups that a token may choose from; use fewer"
        )
    if rule.scores == "softmax_of_chosen" and edit.router_space == "probs" and not edit.one_hot_mapping.all():
        return f"router_space {NO_SCORES}"
    return None


def _selecting(layer: MoELayer, active: int, slots: Tensor | None, selected: Tensor, logits_space: bool) -> RoutingPlan:
    """Routing with a one-hot mapping."""
    bias = layer.correction_bias
    correction = None if bias is None else bias.index_select(0, selected)
    return RoutingPlan(active, slots, selected=selected, correction=correction, logits_space=logits_space)


def _mapping(layer: MoELayer, active: int, slots: Tensor | None, mapping: Tensor, logits_space: bool) -> RoutingPlan:
    """Routing with a continuous mapping."""
    correction = None if layer.correction_bias is None else fold(mapping, layer.correction_bias)
    if not logits_space:
        return RoutingPlan(active, slots, mapping=mapping, correction=correction)
    return RoutingPlan(
        active,
        slots,
        folded=fold(mapping, layer.router_weight),
        folded_bias=None if layer.router_bias is None else fold(mapping, layer.router_bias),
        correction=correction,
        logits_space=True,
    )


def _per_layer(stacked: Tensor, layers: tuple[MoELayer, ...]) -> list[Tensor]:
    """Slices of a host tensor [layers, ...], each on its layer's device."""
    moved: dict[torch.device, tuple[Tensor, ...]] = {}
    for layer in layers:
        device = layer.router_weight.device
        if device not in moved:
            moved[device] = stacked.to(device, non_blocking=True).unbind(0)
    return [moved[layer.router_weight.device][i] for i, layer in enumerate(layers)]
