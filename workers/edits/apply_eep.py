"""EEP edits on a resident model: routing over the originals, merged experts into buffers."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.workers.edits.applicator import ModelParts
from moevolve.workers.edits.base import Edit
from moevolve.workers.edits.eep import EepEdit
from moevolve.workers.edits.experts import LayerExperts
from moevolve.workers.edits.router import EditableRouter, RoutingPlan, fold
from moevolve.workers.edits.tensors import host_tensor
from moevolve.workers.layout import MoELayer


class EepApplicator:
    """Router mapping and expert merging (EEP, arXiv 2407.00945, Eq. 5 and 6) on a resident model.

    A layer whose `W_EM` is one-hot copies no weights: its routing points at the resident originals. Merged layers write
    into buffers allocated once and reused. With host-resident originals every edited layer is filled from them.

    An aligned edit has all layers' originals rearranged, those too that it only prunes, and they stay so after `revert`
    until something else is to run: candidates of one search follow each other without anything being moved.
    """

    def __init__(self, parts: ModelParts) -> None:
        """Install the router wrappers and take over the experts.

        Raises:
            UserError: the model has no MoE layers.
        """
        layers, device, on_host = parts.moe_layers, parts.device, parts.on_host
        if not layers:
            raise UserError("EEP edits need MoE layers, and this model is dense")
        self._layers = layers
        self.routers = tuple(EditableRouter(layer) for layer in layers)
        self.experts: tuple[LayerExperts, ...] = tuple(
            LayerExperts(layer, ordinal, device if on_host else layer.router_weight.device, on_host)
            for ordinal, layer in enumerate(layers)
        )
        for layer, router, experts in zip(layers, self.routers, self.experts, strict=True):
            layer.block.gate = router
            router.before_unedited = experts.show_originals

    def apply(self, edit: Edit) -> None:
        """See `Applicator.apply`."""
        assert isinstance(edit, EepEdit)
        self._check(edit)
        plans = self._plans(edit)
        merging = host_tensor(edit.expert_merging)
        for layer, (router, experts, plan) in enumerate(zip(self.routers, self.experts, plans, strict=True)):
            if edit.one_hot_merging[layer]:
                if experts.on_host:
                    experts.show_selected(edit.expert_merging[layer].argmax(axis=1).tolist(), edit.alignment)
                else:
                    experts.show_originals(edit.alignment)
            else:
                experts.show_merged(merging[layer], edit.alignment)
            router.plan = plan

    def revert(self) -> None:
        """See `Applicator.revert`. Originals on the host, or rearranged, come back when something next needs them."""
        for router, experts in zip(self.routers, self.experts, strict=True):
            router.plan = None
            experts.stand_by()

    def restore(self) -> None:
        """Let all originals lie as they were loaded, now."""
        for experts in self.experts:
            experts.arrange(None)

    def _plans(self, edit: EepEdit) -> list[RoutingPlan]:
        """Routing of every layer. One transfer per device and matrix kind, however many layers there are."""
        logits_space = edit.router_space == "logits"
        mappings = _per_layer(host_tensor(edit.router_mapping), self._layers)
        selected = _per_layer(host_tensor(edit.router_mapping.argmax(axis=2)), self._layers)
        slots = _per_layer(host_tensor(edit.expert_merging.argmax(axis=2)), self._layers)
        plans = []
        for i, (layer, experts) in enumerate(zip(self._layers, self.experts, strict=True)):
            slot = slots[i] if edit.one_hot_merging[i] and not experts.on_host else None
            if edit.one_hot_mapping[i]:
                plan = RoutingPlan(edit.active, slot, selected=selected[i], logits_space=logits_space)
            elif logits_space:
                plan = RoutingPlan(edit.active, slot, folded=fold(mappings[i], layer.router_weight), logits_space=True)
            else:
                plan = RoutingPlan(edit.active, slot, mapping=mappings[i])
            if edit.skip_below is not None:
                plan = replace(plan, skip_below=float(edit.skip_below[i]))
            plans.append(plan)
        return plans

    def _check(self, edit: EepEdit) -> None:
        count = self._layers[0].count
        if (edit.layers, edit.experts) != (len(self._layers), count):
            raise UserError(
                f"the edit is for {edit.layers} MoE layers of {edit.experts} experts, the model "
                f"has {len(self._layers)} of {count}; use the model it was searched on"
            )
        alignment = edit.alignment
        if alignment is not None:
            width = int(self.experts[0].originals["down_proj"].shape[2])
            if alignment.shape != (len(self._layers), count, width):
                raise UserError(
                    f"the edit's alignment is for {alignment.shape} layers, experts and neurons, the model has "
                    f"{(len(self._layers), count, width)}; use the model it was measured on"
                )
        if not edit.finite:
            raise CandidateError("a router mapping or expert merging entry is not finite")


def _per_layer(stacked: Tensor, layers: tuple[MoELayer, ...]) -> list[Tensor]:
    """Slices of a host tensor [layers, ...], each on its layer's device."""
    moved: dict[torch.device, tuple[Tensor, ...]] = {}
    for layer in layers:
        device = layer.router_weight.device
        if device not in moved:
            moved[device] = stacked.to(device, non_blocking=True).unbind(0)
    return [moved[layer.router_weight.device][i] for i, layer in enumerate(layers)]
