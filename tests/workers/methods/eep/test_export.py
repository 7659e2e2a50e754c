"""Exports of EEP edits: a stock checkpoint if that is exact, else native; both load without moevolve."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from edit_checks import Computed, Found, assert_same_elsewhere, computed
from families import edit_of_kind, family_edit, sample_rows
from torch import Tensor

from moevolve.kernels.routing_rule import RoutingRule
from moevolve.workers.contract.card import ExportCard
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.engine.measuring import analyse_usage
from moevolve.workers.export.export import export_model
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.eep.export import form_obstacle
from moevolve.workers.model.resident import ResidentModel

Configs = Callable[..., ModelConfig]
Outsider = Callable[[list[Path], Tensor], Found]

CARD = ExportCard(title="A small model", base_model="someone/base", base_fingerprint="f00d")


def test_a_native_export_never_loads_as_something_else(model_config: Configs, tmp_path: Path) -> None:
    """Without the code in the directory the mapping would be dropped silently, so loading must fail."""
    from transformers import AutoModelForCausalLM

    report = export_model(model_config("mixtral"), family_edit("mixtral", "merged"), tmp_path / "out", CARD, "native")
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
