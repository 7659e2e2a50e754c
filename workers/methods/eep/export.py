"""Exporting EEP edits as checkpoints with fewer experts."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.kernels.routing import POSITIVE_EPS, SUM_EPS, choose_kept
from moevolve.kernels.routing_rule import RoutingRule
from moevolve.workers.checkpoints.native import native_config, write_native
from moevolve.workers.checkpoints.state import (
    empty_model,
    experts_prefix,
    layer_state,
    ordinal_of,
    unedited_parameters,
)
from moevolve.workers.contract.card import CheckpointForm, ExportSummary
from moevolve.workers.contract.edits import Edit, IdentityEdit
from moevolve.workers.contract.facts import ModelFacts
from moevolve.workers.contract.methods import Blueprint, ExpertSelection, Resident, host_tensor
from moevolve.workers.families.base import CORRECTION_BIAS
from moevolve.workers.families.layers import MoELayer
from moevolve.workers.families.registry import FAMILIES, active_experts, expert_family
from moevolve.workers.methods.eep.apply import eep_fault
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.eep.neurons import ExpertNeurons
from moevolve.workers.methods.eep.router import EditableRouter, mean_active_experts

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True, slots=True)
class _EditedModel:
    """A resident model, and how it differs from a smaller model of its family.

    Attributes:
        resident: The model with the edit applied.
        edit: The edit; of an unedited model the one that keeps all experts.
        width: Neurons per expert.
        thresholds: Thresholds of dynamic skipping, by MoE layer; empty if the edit skips nothing.
    """

    resident: Resident
    edit: EepEdit
    width: int
    thresholds: list[float]

    @classmethod
    def of(cls, resident: Resident, edit: Edit) -> _EditedModel:
        layers = resident.layers
        # A layer that isn't at work may not have the edit's width yet.
        width = getattr(edit, "width", None) or ExpertNeurons(layers[0].experts, layers[0].expert_tensors()).width
        plans = [_router(layer).plan for layer in layers]
        thresholds = [plan.skip_below for plan in plans if plan is not None and plan.skip_below is not None]
        whole = len(layers), layers[0].count, active_experts(resident.model.config)
        return cls(resident, _eep_edit(edit, *whole), width, thresholds)

    @property
    def first(self) -> MoELayer:
        return self.resident.layers[0]

    @property
    def resized(self) -> bool:
        """Whether experts have another number of neurons than the unedited model's."""
        return self.width != getattr(self.resident.model.config, self.first.family.width_field)

    @property
    def maps(self) -> bool:
        """Whether a native checkpoint keeps all router rows and maps their scores."""
        return not self.edit.router_folds(self.first.rule)


def _eep_edit(edit: Edit, layers: int, experts: int, active: int) -> EepEdit:
    """Return an EEP edit as it is, or for the identity the edit that keeps all experts."""
    if isinstance(edit, EepEdit):
        return edit
    assert isinstance(edit, IdentityEdit)
    every = np.tile(np.eye(experts, dtype=np.float32), (layers, 1, 1))
    return EepEdit(every, every, active, "logits")


class EepExporter:
    """Exports models with fewer or merged experts, and unedited MoE models."""

    def obstacle(self, resident: Resident, edit: Edit) -> str | None:
        if not resident.layers:
            raise UserError("only an edited dense model can be exported; the full one is a checkpoint already")
        model = _EditedModel.of(resident, edit)
        if model.resized:
            obstacle = width_obstacle(resident.model)
            if obstacle is not None:
                return f"its experts' width isn't the full model's, and {obstacle}"
        return form_obstacle(model.edit, model.first.rule)

    def summary(self, resident: Resident, edit: Edit, form: CheckpointForm) -> ExportSummary:
        model = _EditedModel.of(resident, edit)
        rows: list[tuple[str, str]] = []
        if model.edit.skip_rows is not None:
            shown = ", ".join(f"{each:.3f}" for each in model.thresholds)
            rows.append(("second expert skipped", f"below {shown} of the first one's routing weight, by MoE layer"))
            routers = [_router(layer) for layer in resident.layers]
            used = mean_active_experts(resident.model, routers, model.edit.skip_rows.sequences)
            tokens = len(model.edit.skip_rows.tokens)
            rows.append(("active experts", f"{used:.2f} on average, on {tokens:,} calibration tokens"))
        before = model.first.count, active_experts(resident.model.config)
        full = int(getattr(resident.model.config, model.first.family.width_field))
        widths = (full, model.width) if model.resized else None
        return _summary(
            model.first.family.title, edit, before, widths, unedited_parameters(resident), _form_note(model, form), rows
        )

    def merges(self, edit: Edit) -> str | None:
        if not isinstance(edit, EepEdit):
            return None
        if not edit.one_hot_merging.all():
            return "it merges experts"
        return None if edit.one_hot_mapping.all() else "its router mapping mixes router rows"

    def selection(self, edit: Edit, facts: ModelFacts) -> ExpertSelection:
        layers = len(facts.moe_layers)
        edit = _eep_edit(edit, layers, facts.experts, facts.active)
        if (edit.layers, edit.experts) != (layers, facts.experts):
            raise UserError(
                f"the individual is for {edit.layers} MoE layers of {edit.experts} experts, the model has "
                f"{layers} of {facts.experts}; use the model it was searched on"
            )
        obstacle = eep_fault(facts.rule, edit) or form_obstacle(edit, facts.rule)
        if obstacle is None and edit.width not in (None, facts.expert_neurons):
            obstacle = "it leaves neurons out"
        if obstacle is not None:
            raise UserError(f"the individual can't be written in its checkpoint's format: {obstacle}")
        kept = [abs(matrix).argmax(axis=2).tolist() for matrix in (edit.router_mapping, edit.expert_merging)]
        routers, experts = (tuple(map(tuple, rows)) for rows in kept)
        return ExpertSelection(routers, experts, edit.active)

    def selection_summary(self, edit: Edit, facts: ModelFacts, form_note: str) -> ExportSummary:
        title, before = FAMILIES[facts.family].title, (facts.experts, facts.active)
        return _summary(title, edit, before, None, facts.parameters, form_note, [])

    def build(self, resident: Resident, edit: Edit, form: CheckpointForm, directory: Path) -> Blueprint:
        edited, source = _EditedModel.of(resident, edit), resident.model
        maps = form == "native" and edited.maps
        routes = maps or (form == "native" and bool(edited.thresholds))
        model_class = type(source) if form == "stock" else _native_class(edited, directory)
        model = empty_model(model_class, _config(edited, form, model_class), source.dtype)

        def layer(index: int) -> Iterator[tuple[str, Tensor]]:
            state, ordinal = layer_state(resident, index), ordinal_of(resident, index)
            if ordinal is None:
                yield from state.items()
                return
            moe = resident.layers[ordinal]
            mapping = {"router_mapping": host_tensor(edited.edit.router_mapping[ordinal])} if maps else {}
            yield from (state | _router_state(moe, state, mapping, routes)).items()
            for name, tensor in _experts(resident, ordinal):
                yield experts_prefix(source) + name, tensor

        return Blueprint(model, layer)


def _router_state(
    layer: MoELayer, state: dict[str, Tensor], mapping: dict[str, Tensor], routes: bool
) -> dict[str, Tensor]:
    """Return the tensors of an exported router, by name within the decoder layer `state`.

    If the router is ours (`routes`), those that it replaces are taken out of `state`. `mapping` has the mapping
    of a router that keeps all rows, and is empty if it keeps those of the new experts.
    """
    family = layer.family
    router = f"{family.prefix}{family.router}."
    bias = (family.prefix if family.correction_in_block else router) + family.correction
    names = {"weight": router + family.weight, "bias": f"{router}bias", CORRECTION_BIAS: bias}
    names |= {"factors": f"{router}{family.factors}", "table": f"{router}{family.table}"}
    kept = _router_tensors(layer)
    if CORRECTION_BIAS in kept:
        kept[CORRECTION_BIAS] = kept[CORRECTION_BIAS].view(*state[bias].shape[:-1], -1).to(state[bias].dtype)
    if not routes:
        return {names[name]: tensor for name, tensor in kept.items()}
    full = {name: state.pop(names[name]) for name in kept}
    changed = {
        router + name: tensor.reshape(-1) if name == CORRECTION_BIAS else tensor
        for name, tensor in (full if mapping else kept).items()
    }
    if family.correction_in_block and CORRECTION_BIAS in kept:
        # The block's has n' entries in every form; a router of our own has one besides.
        changed[bias] = kept[CORRECTION_BIAS]
    return changed | {router + name: tensor for name, tensor in mapping.items()}


def width_obstacle(model: PreTrainedModel) -> str | None:
    """Explain why no stock checkpoint of a family's model has narrower experts; None if one has, all of one width."""
    family, config = expert_family(model.config.model_type), copy.deepcopy(model.config)
    assert family is not None
    setattr(config, family.width_field, 2 * getattr(config, family.width_field))
    shapes = []
    for each in (model.config, config):
        empty = empty_model(type(model), each, model.dtype)
        experts = f".{experts_prefix(empty)}"
        shapes.append({name: value.shape for name, value in empty.state_dict().items() if experts not in name})
    return None if shapes[0] == shapes[1] else "in its family a shared expert's or dense layers' width follows from it"


def form_obstacle(edit: EepEdit, rule: RoutingRule) -> str | None:
    """Explain why no smaller model of a family with this rule computes the same as an edited one; None if one does."""
    if edit.skip_rows is not None:
        return "it leaves out second experts, which no class of transformers does"
    if not edit.router_folds(rule):
        return "its router mapping acts on the family's routing weights, and doesn't fold into a smaller router"
    return None


def _summary(
    title: str,
    edit: Edit,
    before: tuple[int, int],
    widths: tuple[int, int] | None,
    parameters: int,
    form_note: str,
    rows: Sequence[tuple[str, str]],
) -> ExportSummary:
    """Describe a model of a family.

    Args:
        title: Name of the family.
        edit: The edit.
        before: Experts n and active experts k of the unedited model.
        widths: Neurons of an expert before and after; None if they stay.
        parameters: Parameters of the unedited model.
        form_note, rows: See `ExportSummary`.
    """
    retained, active = (edit.retained, edit.active) if isinstance(edit, EepEdit) else before
    experts, what = f"with {retained} experts per MoE layer", list[str]()
    if retained != before[0]:
        experts, what = f"reduced from {before[0]} to {retained} experts per MoE layer", ["experts left out"]
    if isinstance(edit, EepEdit) and not (edit.one_hot_merging.all() and edit.one_hot_mapping.all()):
        what = ["experts merged by Efficient Expert Pruning (arXiv 2407.00945)"]
    if widths is not None:
        experts += f" of {widths[1]} instead of {widths[0]} neurons"
        what.append("neurons left out")
    return ExportSummary(
        experts=retained,
        active=active,
        parameters_before=parameters,
        lead=(f"{title} {experts}\n({active} active per token, {before[1]} before)"),
        method=" and ".join(what) or "none",
        tag="expert-pruning",
        form_note=form_note,
        rows=(("router space", edit.router_space if isinstance(edit, EepEdit) else "-"), *rows),
    )


def _form_note(model: _EditedModel, form: CheckpointForm) -> str:
    if form == "stock":
        return "A stock checkpoint of its family: no custom code."
    does = []
    if model.maps:
        does.append("keeps the whole router and maps its scores onto the experts that are left")
    if model.thresholds:
        does.append("leaves out a token's second expert where its routing weight is small beside the first's")
    does = does or ["gives experts another number of neurons than the rest of the family's config implies"]
    return f"The modelling code beside this card {' and '.join(does)}; it needs\n`transformers` only."


def _native_class(model: _EditedModel, directory: Path) -> type[PreTrainedModel]:
    layer, skips = model.first, bool(model.thresholds)
    return write_native(
        model.resident.model,
        directory,
        "methods/eep/native.py.jinja",
        layer.family.title,
        experts=model.edit.retained,
        maps=model.maps,
        resized=model.resized,
        skips=skips,
        routes=model.maps or skips,
        biased=layer.router_bias is not None,
        router_experts=layer.count,
        router_class=type(layer.router),
        sum_eps=SUM_EPS,
        rule=layer.rule,
        family=layer.family,
        corrects=layer.correction_bias is not None,
        correction=CORRECTION_BIAS,
        positive_eps=POSITIVE_EPS,
    )


def _config(model: _EditedModel, form: CheckpointForm, model_class: type[PreTrainedModel]) -> PretrainedConfig:
    source, edit, first = model.resident.model, model.edit, model.first
    if form == "stock":
        config = copy.deepcopy(source.config)
        setattr(config, first.family.width_field, model.width)
    else:
        config = native_config(source, model_class)
        if model.resized:
            config.expert_width = model.width
        if model.thresholds:
            config.skip_below = model.thresholds
        if model.maps:
            config.router_experts = first.count
            one_hot_layers = zip(model.resident.layers, edit.one_hot_mapping, strict=True)
            config.one_hot_layers = [layer.index for layer, one_hot in one_hot_layers if one_hot]
    first.family.resize(config, first.rule, edit.retained, edit.active)
    return config


def _experts(resident: Resident, ordinal: int) -> Iterator[tuple[str, Tensor]]:
    """Return a MoE layer's n' experts with the edit applied, in the edit's order."""
    layer = resident.layers[ordinal]
    router = _router(layer)
    plan = router.plan
    if plan is None:
        yield from resident.original_experts(ordinal).items()
        return
    if router.before_forward is not None:
        # Experts in shared device memory are loaded when a forward pass reaches their layer, and none runs here.
        router.before_forward(False)
    for name, tensor in layer.expert_tensors().items():
        yield name, tensor.data if plan.positions is None else tensor.data.index_select(0, plan.positions)


def _router_tensors(layer: MoELayer) -> dict[str, Tensor]:
    """Return the tensors of a stock router: `W_RM W_G`, and `W_RM b` for each bias that the family has."""
    plan = _router(layer).plan
    weight, bias = layer.router_weight.data, layer.router_bias
    correction, factors, table = layer.correction_bias, layer.factors, layer.table
    if plan is not None:
        if table is not None:
            assert plan.places is not None
            table = choose_kept(table.long(), plan.places, plan.retained, plan.active).to(table.dtype)
        correction, factors = plan.correction, plan.factors
        if plan.folded is not None:
            weight, bias = plan.folded, plan.folded_bias
        elif plan.selected is not None:
            weight = weight.index_select(0, plan.selected)
            bias = None if bias is None else bias.index_select(0, plan.selected)
    tensors = {"weight": weight, "bias": bias, CORRECTION_BIAS: correction, "factors": factors, "table": table}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _router(layer: MoELayer) -> EditableRouter:
    gate = layer.gate
    assert isinstance(gate, EditableRouter)
    return gate
