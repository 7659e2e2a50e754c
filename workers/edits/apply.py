"""The one place where an edit meets the model: each kind of edit has an applicator, found by type."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.workers.edits.base import Edit
from moevolve.workers.edits.eep import EepEdit
from moevolve.workers.edits.experts import LayerExperts
from moevolve.workers.edits.router import EditableRouter, RoutingPlan, fold
from moevolve.workers.edits.tensors import host_tensor
from moevolve.workers.layout import MoELayer


class Applicator(Protocol):
    """Makes one kind of edit on a resident model. Constructed once at load time, before any edit."""

    def apply(self, edit: Edit) -> None:
        """Make `edit` in place, over whatever edit of this kind was made before.

        Raises:
            CandidateError: the edit's values are at fault.
            UserError: the edit doesn't fit this model.
        """
        ...

    def revert(self) -> None:
        """Bring back the unedited model, bit for bit."""
        ...


class EepApplicator:
    """Router mapping and expert merging (EEP, arXiv 2407.00945, Eq. 5 and 6) on a resident model.

    A layer whose `W_EM` is one-hot copies no weights: its routing points at the resident originals. Merged layers write
    into buffers allocated once and reused. With host-resident originals every edited layer is filled from them.
    """

    def __init__(self, layers: tuple[MoELayer, ...], device: torch.device, on_host: bool) -> None:
        """Install the router wrappers and take over the experts.

        Args:
            layers: the MoE layers of the model, in order of depth.
            device: where the model runs, when it isn't spread over several devices.
            on_host: whether the original experts stay in host memory.
        """
        self._layers = layers
        self.routers = tuple(EditableRouter(layer) for layer in layers)
        self.experts: tuple[LayerExperts, ...] = tuple(
            LayerExperts(layer, device if on_host else layer.router_weight.device, on_host) for layer in layers
        )
        for layer, router, experts in zip(layers, self.routers, self.experts, strict=True):
            layer.block.gate = router
            if on_host:
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
                    experts.show_selected(edit.expert_merging[layer].argmax(axis=1).tolist())
                else:
                    experts.show_originals()
            else:
                experts.show_merged(merging[layer])
            router.plan = plan

    def revert(self) -> None:
        """See `Applicator.revert`. Host-resident originals come back when the unedited model next runs."""
        for router, experts in zip(self.routers, self.experts, strict=True):
            router.plan = None
            if not experts.on_host:
                experts.show_originals()

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
            plans.append(plan)
        return plans

    def _check(self, edit: EepEdit) -> None:
        count = self._layers[0].count
        if (edit.layers, edit.experts) != (len(self._layers), count):
            raise UserError(
                f"the edit is for {edit.layers} MoE layers of {edit.experts} experts, the model "
                f"has {len(self._layers)} of {count}; use the model it was searched on"
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


APPLICATORS: dict[type, type[EepApplicator]] = {EepEdit: EepApplicator}
"""Which applicator makes which kind of edit."""
