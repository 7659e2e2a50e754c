"""Exports of EEP edits: a stock checkpoint if that is exact, else native; both load without moevolve."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edit_checks import Computed, Found, assert_same_elsewhere, computed
from family_samples import edit_of_kind, sample_rows
from repair_samples import rows_of, sequences_of
from torch import Tensor

from moevolve.kernels.routing_rule import RoutingRule
from moevolve.workers.checkpoints.native import import_native
from moevolve.workers.contract.card import ExportCard
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.engine.measuring import analyse_usage
from moevolve.workers.export.export import export_model
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.eep.export import form_obstacle
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings
from moevolve.workers.model.resident import ResidentModel
from moevolve.workers.profiling.costs import model_costs

Configs = Callable[..., ModelConfig]
Edits = Callable[..., EepEdit]
Outsider = Callable[[list[Path], Tensor], Found]

CARD = ExportCard(title="A small model", base_model="someone/base", base_fingerprint="f00d")


def test_a_native_export_never_loads_as_something_else(model_config: Configs, make_edit: Edits, tmp_path: Path) -> None:
    """Without the code in the directory the mapping would be dropped silently, so loading must fail."""
    from transformers import AutoModelForCausalLM

    report = export_model(model_config("mixtral"), make_edit("mixtral", "merged"), tmp_path / "out", CARD, "native")
    assert report.form == "native" and report.agreement.holds, "it can be asked for"
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=False)


def test_forms() -> None:
    eye = np.eye(4, dtype=np.float32)[None, :2]
    prune, mapped, merged = EepEdit(eye, eye, 1), EepEdit(eye * 0.5, eye, 1), EepEdit(eye, eye * 0.5, 1)
    folded = EepEdit(eye * 0.5, eye * 0.5, 1, "logits")
    edits = (prune, mapped, merged, folded)
    assert [form_obstacle(edit, RoutingRule(True)) is None for edit in edits] == [True, False, True, True]
    assert [form_obstacle(edit, RoutingRule(False)) is None for edit in edits] == [False, False, False, True]
    twice = np.repeat(eye, 2, axis=0)
    uneven = form_obstacle(EepEdit(twice, twice, (1, 2)), RoutingRule(True))
    assert uneven is not None and "different numbers of experts per token" in uneven
    skips = form_obstacle(replace(prune, active=2, skip_rows=sample_rows()), RoutingRule(True))
    assert skips is not None and "leaves out second experts" in skips


WAYS = {
    "mixtral": ("prune", "probs"),
    "qwen2_moe": ("both", "probs"),
    "deepseek_v3-grouped": ("dyn", "logits"),
    "gpt_oss": ("prune", "logits"),
}
"""Kinds of edits and their router spaces by family; `dyn` keeps all experts."""


def test_what_skips_experts_is_exported_as_it_is(
    model_config: Configs, tokens: Tensor, outsider: Outsider, tmp_path: Path
) -> None:
    """Every family's routing, rows picked and mapped, in a process without moevolve; thresholds are in the config."""
    expected: dict[Path, Computed] = {}
    for family, (name, space) in WAYS.items():
        resident = ResidentModel.load(model_config(family))
        layers, count = len(resident.layers), resident.layers[0].count
        kind, retained = ("prune", count) if name == "dyn" else (name, 4)
        plain = edit_of_kind(layers, count, kind, retained, 2, space)
        edit, directory = replace(plain, skip_rows=sample_rows()), tmp_path / f"{family}-{name}-{space}-native"
        assert edit.skip_rows is not None
        expected[directory] = computed(resident, edit, tokens)
        report = export_model(resident, edit, directory, CARD)
        assert report.form == "native" and report.agreement.holds
        assert float((expected[directory][0] - computed(resident, plain, tokens)[0]).abs().max()) > 1e-3
        thresholds = json.loads((directory / "config.json").read_text())["skip_below"]
        assert len(thresholds) == layers and all(0 < each < 1 for each in thresholds)
        card = (directory / "README.md").read_text()
        usage = analyse_usage(resident, edit, edit.skip_rows.sequences)
        assert "second expert skipped" in card and f"active experts | {usage.active:.2f} on average" in card
    assert_same_elsewhere(expected, outsider(list(expected), tokens))


UNEVEN = {"mixtral": "prune", "qwen2_moe": "both", "gemma4_text": "merged"}
"""Kinds of edits by family. The second one's mapping doesn't fold, and the last one's routers read the config."""


def test_layers_with_active_experts_of_their_own_are_exported_and_counted(
    model_config: Configs, tokens: Tensor, outsider: Outsider, tmp_path: Path
) -> None:
    """Also with widths of their own, where a repair fills the experts."""
    expected: dict[Path, Computed] = {}
    for family, kind in UNEVEN.items():
        resident = ResidentModel.load(model_config(family))
        layers, count = len(resident.layers), resident.layers[0].count
        unedited = sum(each.numel() for each in resident.model.parameters())
        numbers = (2, 1, 3)[:layers]
        space = "probs" if family in ("mixtral", "qwen2_moe") else "logits"
        edit: Any = replace(edit_of_kind(layers, count, kind, count, 2, space), active=numbers)
        if family == "mixtral":
            width = resident.model.config.intermediate_size
            rows, settings = (
                rows_of(sequences_of([30] * 10)),
                RepairSettings((0.1,), neurons=True),
            )
            edit = RepairedEdit(replace(edit, widths=(width - 8, width, width - 4)), settings, rows)
        directory = tmp_path / f"{family}-native"
        expected[directory] = computed(resident, edit, tokens)
        report = export_model(resident, edit, directory, CARD)
        assert (report.form, report.active) == ("native", max(numbers)) and report.agreement.holds
        assert json.loads((directory / "config.json").read_text())["active_experts"] == list(numbers)
        card = (directory / "README.md").read_text()
        assert f"active experts | {', '.join(map(str, numbers))}, by MoE layer" in card and "1 to" in card
        assert f"({unedited:,} before)" in card
        loaded: Any = import_native(directory).from_pretrained(directory)
        blocks = [module for module in loaded.modules() if hasattr(module, "experts")]
        sizes = [sum(each.numel() for each in block.experts.parameters()) for block in blocks]
        idle = sum(size * (count - active) // count for size, active in zip(sizes, numbers, strict=True))
        if family != "gemma4_text":  # its layers' attention differs, which isn't counted
            costs = model_costs(loaded, 1)
            assert costs.parameters - costs.active_parameters == idle
        assert len(set(sizes)) == (layers if family == "mixtral" else 1)
    assert_same_elsewhere(expected, outsider(list(expected), tokens))
