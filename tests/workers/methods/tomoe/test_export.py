"""Exports of masked models: a stock Mixtral if that is exact, else native; both load without moevolve."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_edits import HEAD_DIM, HIDDEN, WIDTH, head_masks, masked
from edit_checks import assert_same_elsewhere, computed
from safetensors import safe_open
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.card import ExportCard
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export.export import export_model
from moevolve.workers.methods.tomoe.edit import HeadMasks, ToMoeEdit
from moevolve.workers.methods.tomoe.export import ToMoeExporter
from moevolve.workers.model.describe import describe_model
from moevolve.workers.model.resident import ResidentModel

EXPERTS = 4
CARD = ExportCard("A masked model", "someone/base", "f00d")


def still_heads(*layers: int) -> HeadMasks:
    """In some layers the scores of values don't depend on the token."""
    heads = head_masks(active=(5, 3, 1))
    heads.value_router[list(layers)] = 0
    return heads


CASES = {
    "llama-whole-stock": masked((12, 48, 12), head_masks((4, 4, 4), (8, 8, 8))),
    "llama-some-native": masked((48, 7, 48), head_masks((4, 2, 4), (8, 8, 2))),
    "qwen2-still-native": masked(heads=still_heads(1)),
    "opt-some-native": masked((48, 1, 20)),
}


def parameters(before: int, edit: ToMoeEdit, family: str, form: str) -> int:
    """Parameters that the described model must have: each kept neuron and dimension once, or a Mixtral's experts."""
    neuron = 2 * HIDDEN + 1 if family == "opt" else 3 * HIDDEN
    for width, kept in zip(edit.widths, edit.kept, strict=True):
        stored = EXPERTS * ((edit.widths.max() + 7) // 8 * 8) if form == "stock" else kept.any(axis=0).sum()
        before += (stored - WIDTH) * neuron
        before += EXPERTS * HIDDEN * (form == "stock" or width < WIDTH)
    if edit.heads is not None and form == "native":
        before -= (~edit.heads.pairs).sum() * 2 * (4 + 2) * (HIDDEN + (family == "qwen2"))
        before += ((edit.heads.active < HEAD_DIM) & ~edit.heads.static).sum() * (2 * HIDDEN + HEAD_DIM * 3)
        dropped = ((HEAD_DIM - edit.heads.active) * edit.heads.static).sum()
        before -= dropped * (2 * (HIDDEN + (family == "qwen2")) + 4 * HIDDEN)
    return int(before)


def test_exports_load_and_agree_without_moevolve(
    model_config: Callable[..., ModelConfig], tokens: Tensor, outsider: Any, tmp_path: Path
) -> None:
    residents = {family: ResidentModel.load(model_config(family)) for family in ("llama", "opt", "qwen2")}
    expected = {}
    for name, edit in CASES.items():
        family, _, form = name.split("-")
        resident = residents[family]
        expected[tmp_path / name] = computed(resident, edit, tokens)
        report = export_model(resident, edit, tmp_path / name, CARD)
        assert (report.form, report.experts, report.active) == (form, EXPERTS, 1), name
        assert report.agreement.holds and report.agreement.positions > 50
        assert isinstance(resident.applied, IdentityEdit)
        before = describe_model(model_config(family)).parameters
        assert report.parameters == parameters(before, edit, family, form), name
    found = outsider(list(expected), tokens)
    assert_same_elsewhere(expected, found)


def test_the_stock_form_is_a_mixtral_whose_narrow_layers_are_filled_up(model_config: Any, tmp_path: Path) -> None:
    model = model_config("llama")
    stock = export_model(model, masked(), tmp_path / "out", CARD)
    assert stock.form == "stock" and stock.agreement.holds
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("mixtral", ["MixtralForCausalLM"])
    assert (config["num_local_experts"], config["num_experts_per_tok"], config["intermediate_size"]) == (4, 1, 40)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Llama whose feed-forward networks run the neurons of one of 4 overlapping experts per token" in card
    assert "| neurons per expert | 7 to 33 of 48 |" in card and "A stock Mixtral checkpoint" in card
    # The native form, which can be asked for, stores shared neurons once, while a Mixtral's experts repeat them.
    native = export_model(model, masked(), tmp_path / "native", CARD, "native")
    assert native.form == "native" and native.agreement.holds and native.parameters < stock.parameters
    assert native.parameters == parameters(describe_model(model).parameters, masked(), "llama", "native")
    with pytest.raises(UserError, match="--form stock: dimensions of its heads are masked"):
        export_model(model, masked(heads=head_masks()), tmp_path / "other", CARD, "stock")
    assert not (tmp_path / "other").exists()


def test_sixteen_bits_keep_their_routers_whole(model_config: Any, tmp_path: Path) -> None:
    resident = ResidentModel.load(model_config("llama", dtype="bfloat16"))
    report = export_model(resident, masked(heads=head_masks()), tmp_path / "out", CARD)
    assert report.form == "native" and report.agreement.holds
    assert "| value dimensions per token | 1 to 8 of 8 |" in (tmp_path / "out" / "README.md").read_text()
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            whole = name.endswith(("neurons", "dimensions"))
            wide = "router" in name or "value_" in name
            dtype = torch.int64 if whole else torch.float32 if wide else torch.bfloat16
            assert file.get_tensor(name).dtype == dtype, name


def test_forms(model_config: Any) -> None:
    exporter, resident = ToMoeExporter(), ResidentModel.load(model_config("llama"))
    assert exporter.obstacle(resident, masked()) is None
    half = ResidentModel.load(model_config("llama", dtype="bfloat16"))
    assert "routes in the model's dtype, bfloat16" in str(exporter.obstacle(half, masked()))
    router = masked().router.copy()
    router[1, 2] = router[1, 3]
    assert "experts tie" in str(exporter.obstacle(resident, replace(masked(), router=router)))
    kept = masked().kept.copy()
    kept[1, 2] = kept[1, 3]
    assert exporter.obstacle(resident, replace(masked(), router=router, kept=kept)) is None
