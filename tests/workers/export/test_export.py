"""Exports: exact, whole or absent, and loadable where moevolve is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edit_checks import Computed, Found, assert_same_elsewhere, computed
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.kernels.routing_rule import RoutingRule
from moevolve.workers.config import ModelConfig
from moevolve.workers.export import export
from moevolve.workers.export.card import ExportCard, ExportScore
from moevolve.workers.export.export import ExportError, export_model
from moevolve.workers.export.verify import compare
from moevolve.workers.facts import parameters_after
from moevolve.workers.methods.base import IdentityEdit
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.eep.export import EepExporter, checkpoint_form
from moevolve.workers.model.describe import describe_model
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


def export_all(
    family: str, model_config: Configs, make_edit: Edits, tokens: Tensor, folder: Path
) -> dict[Path, Computed]:
    """Export every kind of edit of one family: directories by name, with what the edited resident computes."""
    resident = ResidentModel.load(model_config(family))
    facts = describe_model(model_config(family))
    rescales = facts.renormalise
    cases = {
        "prune-" + ("stock" if rescales else "native"): make_edit(family, "prune"),
        "merged-" + ("stock" if rescales else "native"): make_edit(family, "merged", active=1),
        "both-native": make_edit(family, "both", active=1),
        "mixed-native": make_edit(family, "mixed"),
        "tuned-native": make_edit(family, "both", retained=6),
        "logits-stock": make_edit(family, "both", retained=3, active=3, space="logits"),
        "full-stock": IdentityEdit(),
    }
    expected: dict[Path, Computed] = {}
    for name, edit in cases.items():
        directory = folder / f"{family}-{name}"
        expected[directory] = computed(resident, edit, tokens)
        report = export_model(resident, edit, directory, CARD)
        assert report.form == name.split("-")[1]
        retained = edit.retained if isinstance(edit, EepEdit) else 6
        assert report.parameters == parameters_after(facts, retained, native=report.form == "native")
        assert report.agreement.holds
        assert report.agreement.positions > 50
        assert isinstance(resident.applied, IdentityEdit)
    return expected


def test_exports_load_and_agree_without_moevolve(
    model_config: Configs, make_edit: Edits, tokens: Tensor, outsider: Outsider, tmp_path: Path
) -> None:
    expected: dict[Path, Computed] = {}
    for family in FAMILIES:
        expected |= export_all(family, model_config, make_edit, tokens, tmp_path)
    found = outsider(list(expected), tokens)
    assert_same_elsewhere(expected, found)


def test_a_native_export_never_loads_as_something_else(model_config: Configs, make_edit: Edits, tmp_path: Path) -> None:
    """Without the code in the directory the mapping would be dropped silently, so loading must fail."""
    from transformers import AutoModelForCausalLM

    export_model(model_config("mixtral"), make_edit("mixtral", "both", retained=6), tmp_path / "out", CARD)
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=False)


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"originals": "host"}])
@pytest.mark.parametrize("kind", ["prune", "both"])
def test_exports_from_other_residents(
    settings: dict[str, str], kind: str, model_config: Configs, make_edit: Edits, tmp_path: Path
) -> None:
    from safetensors import safe_open

    report = export_model(model_config("olmoe", **settings), make_edit("olmoe", kind), tmp_path / "out", CARD)
    assert report.agreement.holds
    with safe_open(report.directory / "model.safetensors", "pt") as file:
        dtypes = {name: file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
    for name, dtype in dtypes.items():
        wide = name.endswith("router_mapping") or settings.get("dtype") is None
        assert dtype == (torch.float32 if wide else torch.bfloat16), name


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


@pytest.mark.parametrize("kind", ["prune", "merged"])
def test_the_native_form_can_be_asked_for(model_config: Configs, make_edit: Edits, kind: str, tmp_path: Path) -> None:
    edit = make_edit("mixtral", kind)
    report = export_model(model_config("mixtral"), edit, tmp_path / "out", CARD, "native")
    assert report.form == "native" and report.agreement.holds


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
    honest = EepExporter.build

    def corrupt(*arguments: Any) -> Any:
        model = honest(*arguments)
        weight = model.model.layers[1].mlp.experts.down_proj
        model.model.layers[1].mlp.experts.down_proj = torch.nn.Parameter(weight * 1.5, requires_grad=False)
        return model

    monkeypatch.setattr(EepExporter, "build", corrupt)
    resident = ResidentModel.load(model_config("mixtral"))
    with pytest.raises(ExportError, match="other logits"):
        export_model(resident, make_edit("mixtral", "prune"), tmp_path / "out", CARD)
    assert list(tmp_path.iterdir()) == []
    assert isinstance(resident.applied, IdentityEdit)


def test_forms() -> None:
    eye = np.eye(4, dtype=np.float32)[None, :2]
    prune, mapped, merged = EepEdit(eye, eye, 1), EepEdit(eye * 0.5, eye, 1), EepEdit(eye, eye * 0.5, 1)
    folded = EepEdit(eye * 0.5, eye * 0.5, 1, "logits")
    assert [checkpoint_form(edit, RoutingRule(True)) for edit in (prune, mapped, merged, folded)] == [
        "stock",
        "native",
        "stock",
        "stock",
    ]
    assert [checkpoint_form(edit, RoutingRule(False)) for edit in (prune, mapped, merged, folded)] == [
        "native",
        "native",
        "native",
        "stock",
    ]


def test_not_a_number_is_no_agreement() -> None:
    logits = torch.zeros((10, 3))
    assert compare(logits, logits, torch.float32).holds
    broken = logits.clone()
    broken[:2, 0] = float("nan")
    assert not compare(logits, broken, torch.float32).holds
    assert not compare(logits, broken, torch.bfloat16).holds
