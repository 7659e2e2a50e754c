"""Checkpoints of repaired edits: those of their base edits, with the fitted weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from edit_checks import Computed, Found, assert_same_elsewhere, computed
from families import edit_of_kind
from repair_samples import rows_of, sequences_of
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from moevolve.workers.contract.card import ExportCard
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export.export import export_model
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings
from moevolve.workers.model.resident import ResidentModel

Configs = Callable[..., ModelConfig]
SEQUENCES = sequences_of([40] * 12)
CARD = ExportCard(title="A small model", base_model="someone/base", base_fingerprint="f00d")


def repaired(kind: str) -> RepairedEdit:
    return RepairedEdit(edit_of_kind(3, 6, kind), RepairSettings((0.1, 1.0)), rows_of(SEQUENCES))


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}])
def test_exports_load_and_agree_without_moevolve(
    settings: dict[str, str],
    model_config: Configs,
    tokens: Tensor,
    outsider: Callable[[list[Path], Tensor], Found],
    tmp_path: Path,
) -> None:
    model = ResidentModel.load(model_config("mixtral", **settings))
    expected: dict[Path, Computed] = {}
    stock = [] if settings else [("merged", "stock")]
    for kind, form in (*stock, ("both", "native")):
        directory = tmp_path / f"{kind}-{form}"
        expected[directory] = computed(model, repaired(kind), tokens)
        report = export_model(model, repaired(kind), directory, CARD)
        assert report.form == form and report.agreement.holds and report.experts == 4
    if settings:
        return
    wide = replace(repaired("prune"), settings=RepairSettings((0.1, 1.0), neurons=True))
    width = model.layers[0].expert_tensors()["down_proj"].shape[2]
    wide = replace(wide, base=replace(wide.base, width=width + 8))
    expected[tmp_path / "wide-native"] = computed(model, wide, tokens)
    assert export_model(model, wide, tmp_path / "wide-native", CARD, "native").form == "native"
    assert_same_elsewhere(expected, outsider(list(expected), tokens))


def test_the_card_says_how_it_was_repaired(model_config: Configs, tmp_path: Path) -> None:
    edit = repaired("prune")
    export_model(model_config("mixtral"), edit, tmp_path / "out", CARD)
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "reduced from 6 to 4 experts per MoE layer\n" in card and edit.phenotype_hash in card
    assert "Kind of edit:\nexperts left out." in card
    assert "| repair | ridge regression of output projections toward the unedited model's residual stream" in card
    assert "| repaired outputs | 3 of 3 |" in card
    assert "| fitted on | 440 tokens of calibration prompts, checked on 40 of others |" in card
    assert "| ridge lambdas | " in card and "| squared error on checked tokens | " in card


def test_neurons_of_other_experts_are_exported_with_where_they_are_from(model_config: Configs, tmp_path: Path) -> None:
    config = model_config("mixtral")
    settings = RepairSettings((1e9,), neurons=True)  # so strong that the fit changes next to nothing
    edit = RepairedEdit(edit_of_kind(3, 6, "prune"), settings, rows_of(SEQUENCES))
    report = export_model(config, edit, tmp_path / "out", CARD)
    assert report.form == "stock" and report.agreement.holds
    width = AutoConfig.from_pretrained(config.path).intermediate_size
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "out").model.layers
    whole = AutoModelForCausalLM.from_pretrained(config.path).model.layers
    for small, large in zip(kept, whole, strict=True):
        gates = large.mlp.experts.gate_up_proj[:, :width].flatten(0, 1)
        ids = torch.stack(
            [
                (row == gates).all(dim=1).nonzero()[0, 0]
                for row in small.mlp.experts.gate_up_proj[:, :width].flatten(0, 1)
            ]
        ).view(4, width)
        experts, places = ids // width, ids % width
        assert ids.unique().numel() == ids.numel(), "no neuron stands twice"
        down = large.mlp.experts.down_proj.transpose(1, 2)[experts, places]
        torch.testing.assert_close(small.mlp.experts.down_proj.transpose(1, 2), down, atol=1e-4, rtol=1e-4)
