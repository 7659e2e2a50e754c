"""Repair in every MoE family: the reported remaining error is that of the edited model itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from edit_checks import Residents, digest, logits
from families import edit_of_kind
from repair_samples import rows_of, seen_at, sequences_of

from moevolve.workers.contract.card import ExportCard
from moevolve.workers.contract.facts import parameters_after
from moevolve.workers.export.export import export_model
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.eep.export import form_obstacle
from moevolve.workers.methods.eep.neurons import ExpertNeurons
from moevolve.workers.methods.repair.apply import RepairApplicator
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings
from moevolve.workers.model.describe import describe_model
from moevolve.workers.model.resident import ResidentModel

CARD = ExportCard("A model", "someone/base", "f00d")
LENGTHS = (40, 17, 50, 3, 44, 31, 28, 39, 60, 52, 1, 47)
SEQUENCES = sequences_of(LENGTHS)
CHECKED = SEQUENCES[7:8]
"""What a repair keeps out of its fit to check it."""
UNSEEN = torch.tensor(sequences_of([40] * 6, seed=9))
DIFFERENT = (
    "mixtral",
    "deepseek_v2",
    "deepseek_v3-grouped",
    "gpt_oss",
    "granitemoeshared",
    "ernie4_5_moe",
    "lfm2_moe",
    "nemotron_h",
    "minimax_m3_vl_text",
    "llama4_text",
    "step3p5",
)
"""Families whose experts, routers or names of blocks are of different forms; all others are like one of these.
Qwen2-MoE's gated shared expert is tried in eep/test_shared_expert."""


def repaired(model: ResidentModel, kind: str) -> RepairedEdit:
    count = model.layers[0].count
    retained = 4 if model.layers[0].rule.groups.fault(3) else 3
    space = "probs" if model.layers[0].rule.has_scores else "logits"
    base = edit_of_kind(len(model.layers), count, kind, retained, space=space)
    return RepairedEdit(base, RepairSettings((0.1, 1.0, 10.0)), rows_of(SEQUENCES))


@pytest.mark.parametrize("family", DIFFERENT)
def test_what_is_left_is_told_and_less(family: str, resident: Residents, checkpoint: Callable[[str], Path]) -> None:
    from transformers import AutoModelForCausalLM

    model = resident(family)
    edit = repaired(model, "prune")
    before, plain = digest(model), logits(model, None, UNSEEN)
    reference = seen_at(AutoModelForCausalLM.from_pretrained(checkpoint(family)).eval(), CHECKED)
    with model.edited(edit):
        applicator = model._applicators[RepairedEdit]
        assert isinstance(applicator, RepairApplicator)
        now = seen_at(model.model, CHECKED)
        assert None not in applicator.outcomes
        for layer, outcome in zip(model.layers, applicator.outcomes, strict=True):
            assert outcome is not None and outcome.after < outcome.before
            width = ExpertNeurons(layer.experts, layer.expert_tensors()).width
            assert getattr(model.model.config, layer.family.width_field) == width
            left = reference[layer.index]["behind"] - now[layer.index]["behind"]
            assert (left**2).sum() == pytest.approx(outcome.after, rel=2e-3)
    cut, fitted = (logits(model, each, UNSEEN) for each in (edit.base, edit))
    assert float((fitted - plain).square().sum()) < float((cut - plain).square().sum())
    assert digest(model) == before


def plain_form(model: ResidentModel, edit: EepEdit) -> tuple[str, int]:
    """Form of a checkpoint of an edit without its repair and with whole experts, and the number of its parameters."""
    form = "stock" if form_obstacle(edit, model.layers[0].rule) is None else "native"
    return form, parameters_after(describe_model(model.config), edit.retained, native=form == "native")


def base_of(edit: RepairedEdit) -> EepEdit:
    assert isinstance(edit.base, EepEdit)
    return edit.base


def width_of(model: ResidentModel) -> int:
    return ExpertNeurons(model.layers[0].experts, model.layers[0].expert_tensors()).width


def with_width(edit: RepairedEdit, width: int) -> RepairedEdit:
    settings = replace(edit.settings, neurons=True)
    return replace(edit, base=replace(base_of(edit), width=width), settings=settings)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss", "nemotron_h", "qwen3_next", "glm4_moe"])
def test_narrower_experts_are_stock_where_a_config_can_say_so(family: str, resident: Residents, tmp_path: Path) -> None:
    model = resident(family)
    width, layers = width_of(model), len(model.layers)
    edit = with_width(repaired(model, "prune"), width // 2)
    found, (form, parameters) = export_model(model, edit, tmp_path / "narrow", CARD), plain_form(model, base_of(edit))
    # GLM's config says the widths of shared and routed experts in one field, Qwen's and Nemotron's in two.
    assert found.agreement.holds and found.form == ("native" if family == "glm4_moe" else form)
    fewer = layers * base_of(edit).retained * (width - width // 2)
    assert found.parameters == parameters - fewer * describe_model(model.config).neuron_parameters
    card = (tmp_path / "narrow" / "README.md").read_text(encoding="utf-8")
    assert f"experts per MoE layer of {width // 2} instead of {width} neurons\n" in card
