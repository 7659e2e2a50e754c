"""Exports of divided networks: a stock Mixtral if that is exact, else native; both load without moevolve."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_edits import LAYERS, divided
from edit_checks import assert_same_elsewhere, computed
from safetensors import safe_open
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.card import ExportCard
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export.export import export_model
from moevolve.workers.model.describe import describe_model
from moevolve.workers.model.resident import ResidentModel

CARD = ExportCard("A divided model", "someone/base", "f00d")


CASES = {
    "llama-top1-stock": divided(1, bias=0),
    "llama-routers-native": divided(4, routers=3),
    "opt-routers-native": divided(4, routers=2, scale=1.5),
}


def test_exports_load_and_agree_without_moevolve(
    model_config: Callable[..., ModelConfig], tokens: Tensor, outsider: Any, tmp_path: Path
) -> None:
    residents = {family: ResidentModel.load(model_config(family)) for family in ("llama", "opt")}
    expected = {}
    for name, edit in CASES.items():
        family, _, form = name.split("-")
        resident = residents[family]
        expected[tmp_path / name] = computed(resident, edit, tokens)
        report = export_model(resident, edit, tmp_path / name, CARD)
        assert (report.form, report.experts, report.active) == (form, 6, edit.active)
        assert report.agreement.holds and report.agreement.positions > 50
        assert isinstance(resident.applied, IdentityEdit)
        added = LAYERS * (edit.router_weight[0].size + (edit.router_bias[0].size if form == "native" else 0))
        assert report.parameters == describe_model(model_config(family)).parameters + added
    found = outsider(list(expected), tokens)
    assert_same_elsewhere(expected, found)


def test_the_stock_form_is_a_mixtral_of_narrow_experts(model_config: Any, tmp_path: Path) -> None:
    export_model(model_config("llama"), CASES["llama-top1-stock"], tmp_path / "out", CARD)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("mixtral", ["MixtralForCausalLM"])
    assert (config["num_local_experts"], config["num_experts_per_tok"], config["intermediate_size"]) == (6, 1, 8)
    assert describe_model(ModelConfig(str(tmp_path / "out"))).experts == 6
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Llama with every feed-forward network divided into 6 equal experts, 1 active per token" in card
    assert "| division | 1R6E1K |" in card and "A stock Mixtral checkpoint" in card


def test_sixteen_bits_keep_their_routers_whole(model_config: Any, tmp_path: Path) -> None:
    """A Mixtral's scores would be rounded, so the form is native; the message says that float32 allows a stock one."""
    config = model_config("llama", dtype="bfloat16")
    with pytest.raises(UserError, match=r"routes in the model's dtype, bfloat16.*--dtype float32"):
        export_model(config, CASES["llama-top1-stock"], tmp_path / "stock", CARD, "stock")
    report = export_model(config, CASES["llama-top1-stock"], tmp_path / "out", CARD)
    assert report.form == "native" and report.agreement.holds
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            wide = "router_" in name
            assert file.get_tensor(name).dtype == (torch.float32 if wide else torch.bfloat16), name


def test_a_dense_model_that_is_not_edited_is_not_exported(model_config: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="checkpoint already"):
        export_model(model_config("llama"), IdentityEdit(), tmp_path / "out", CARD)
    assert list(tmp_path.iterdir()) == []


def test_forms(model_config: Any) -> None:
    from moevolve.workers.methods.factorllm.export import FactorLlmExporter

    resident = ResidentModel.load(model_config("llama"))
    stock = CASES["llama-top1-stock"]
    assert FactorLlmExporter().obstacle(resident, stock) is None
    tiny = stock.router_bias.copy()
    tiny[2, 0, 5] = 1e-30
    for other in (replace(stock, router_bias=tiny), replace(stock, active=2), replace(stock, output_scale=6.0)):
        assert "no Mixtral's" in str(FactorLlmExporter().obstacle(resident, other))
    resident.model.config.attention_bias = True
    assert "biases" in str(FactorLlmExporter().obstacle(resident, stock))
