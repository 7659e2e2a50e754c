"""Exports, whatever the edit: whole or absent, verified, and with a card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from edit_checks import Found
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.config import ModelConfig
from moevolve.workers.export import export
from moevolve.workers.export.card import ExportCard, ExportScore
from moevolve.workers.export.export import ExportError, export_model
from moevolve.workers.export.verify import compare
from moevolve.workers.methods.base import IdentityEdit
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.eep.export import EepExporter
from moevolve.workers.methods.registry import METHODS
from moevolve.workers.model.resident import ResidentModel

Configs = Callable[..., ModelConfig]
Edits = Callable[..., EepEdit]
Outsider = Callable[[list[Path], Tensor], Found]

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
CARD = ExportCard(
    title="A small model",
    base_model="someone/base|model",
    base_fingerprint="f00d",
    search_name="trial",
    search_id="42",
    individual="trial#17",
    lineage=("trial#9 (swap)", "trial#3 (random)"),
    scores=(ExportScore("rte", "dev", 0.75, 200, 0.69, 0.81), ExportScore("rte", "search", 0.8, 300)),
)


def test_large_exports_are_sharded(
    model_config: Configs, make_edit: Edits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "MAX_SHARD_SIZE", "60KB")
    report = export_model(model_config("mixtral"), make_edit("mixtral", "prune"), tmp_path / "out", CARD)
    assert len(list(report.directory.glob("model-*.safetensors"))) > 1
    assert (report.directory / "model.safetensors.index.json").is_file()


def test_the_card_tells_where_the_model_comes_from(model_config: Configs, make_edit: Edits, tmp_path: Path) -> None:
    edit = make_edit("mixtral", "prune")
    report = export_model(model_config("mixtral"), edit, tmp_path / "out", CARD)
    card = (report.directory / "README.md").read_text()
    for text in (
        "# A small model",
        "someone/base\\|model",
        "f00d",
        "trial#17",
        "from 6 to 4 experts",
        edit.phenotype_hash,
    ):
        assert text in card
    assert "| rte | dev | 0.7500 | 0.6900 to 0.8100 | 200 |\n| rte | search | 0.8000 | - | 300 |\n" in card
    assert "1. trial#9 (swap)\n2. trial#3 (random)\n" in card
    assert f"{report.parameters:,}" in card


def test_a_taken_target_is_refused_and_untouched(model_config: Configs, make_edit: Edits, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "note").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        export_model(model_config("mixtral"), make_edit("mixtral", "prune"), tmp_path / "taken", CARD)
    with pytest.raises(UserError, match="is a file"):
        export_model(model_config("mixtral"), make_edit("mixtral", "prune"), tmp_path / "taken" / "note", CARD)
    assert (tmp_path / "taken" / "note").read_text() == "mine"


def test_an_empty_target_is_taken(model_config: Configs, make_edit: Edits, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    report = export_model(model_config("mixtral"), make_edit("mixtral", "prune"), tmp_path / "empty", CARD)
    assert report.directory == tmp_path / "empty"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty"]
    assert len({file.stat().st_mode for file in report.directory.iterdir()}) == 1


def test_an_unwritable_place_is_named(model_config: Configs, make_edit: Edits, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="can't be made"):
        export_model(model_config("mixtral"), make_edit("mixtral", "prune"), tmp_path / "file" / "out", CARD)


def test_a_full_disk_is_told_beforehand(
    model_config: Configs, make_edit: Edits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(UserError, match="no room"):
        export_model(model_config("mixtral"), make_edit("mixtral", "prune"), tmp_path / "out", CARD)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_checkpoint_is_an_error_and_leaves_nothing(
    model_config: Configs, make_edit: Edits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Corrupting(EepExporter):
        def build(self, *arguments: Any) -> Any:
            model: Any = super().build(*arguments)
            weight = model.model.layers[1].mlp.experts.down_proj
            model.model.layers[1].mlp.experts.down_proj = torch.nn.Parameter(weight * 1.5, requires_grad=False)
            return model

    monkeypatch.setitem(METHODS, EepEdit, replace(METHODS[EepEdit], exporter=Corrupting()))
    resident = ResidentModel.load(model_config("mixtral"))
    with pytest.raises(ExportError, match="other logits"):
        export_model(resident, make_edit("mixtral", "prune"), tmp_path / "out", CARD)
    assert list(tmp_path.iterdir()) == []
    assert isinstance(resident.applied, IdentityEdit)


def test_not_a_number_is_no_agreement() -> None:
    logits = torch.zeros((10, 3))
    assert compare(logits, logits, torch.float32).holds
    broken = logits.clone()
    broken[:2, 0] = float("nan")
    assert not compare(logits, broken, torch.float32).holds
    assert not compare(logits, broken, torch.bfloat16).holds
