"""Exports of families with every kind of router are exact, and stock if the family can express the edit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from edit_checks import CARD, Computed, Found, assert_close, assert_same_elsewhere, computed, logits
from families import VARIANTS, family_edit
from torch import Tensor

from moevolve.workers.contract.edits import Edit, IdentityEdit
from moevolve.workers.contract.facts import parameters_after
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export.export import export_model
from moevolve.workers.families.base import ExpertFamily
from moevolve.workers.families.registry import FAMILIES
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.model.describe import describe_model
from moevolve.workers.model.resident import ResidentModel
from moevolve.workers.profiling.checkpoints import check_folder

Configs = Callable[..., ModelConfig]
Outsider = Callable[[list[Path], Tensor], Found]


KINDS = {
    "mixtral": ("prune", "mixed", "logits"),
    "qwen2_moe": ("mixed", "merged"),
    "deepseek_v2-grouped": ("prune", "logits"),
    "deepseek_v3-grouped": ("prune", "mixed"),
    "deepseek_v3-unscaled": ("prune",),
    "gpt_oss": ("merged", "full"),
}
"""Edits by variant. The others are like those that have groups, without them."""


EXPERT_FIELDS = ("num_experts", "n_routed_experts", "num_local_experts")


def cases(variant: str) -> dict[str, Edit]:
    stock = "stock" if VARIANTS[variant].folds else "native"
    made: dict[str, Edit] = {
        f"prune-{stock}": family_edit(variant, "prune"),
        "mixed-native": family_edit(variant, "mixed", active=1),
        "logits-stock": family_edit(variant, "both", space="logits"),
        f"merged-{stock}": family_edit(variant, "merged", active=1),
        "full-stock": IdentityEdit(),
    }
    return {name: edit for name, edit in made.items() if name.split("-")[0] in KINDS[variant]}


def export_all(variant: str, config: ModelConfig, tokens: Tensor, folder: Path) -> dict[Path, Computed]:
    """Export every kind of edit of one variant; returns directories by name, with the edited model's outputs."""
    resident, facts, sample = ResidentModel.load(config), describe_model(config), VARIANTS[variant]
    expected: dict[Path, Computed] = {}
    for name, edit in cases(variant).items():
        directory = folder / f"{variant}-{name}"
        expected[directory] = computed(resident, edit, tokens)
        report = export_model(resident, edit, directory, CARD)
        assert report.form == name.split("-")[1]
        retained = edit.retained if isinstance(edit, EepEdit) else sample.experts
        assert report.parameters == parameters_after(facts, retained, native=report.form == "native")
        assert report.agreement.holds
        settings = json.loads((directory / "config.json").read_text())
        family = FAMILIES[facts.family]
        assert isinstance(family, ExpertFamily) and settings[family.experts_field] == retained
        assert {settings[name] for name in EXPERT_FIELDS if name in settings} == {retained}
        assert settings["num_experts_per_tok"] == (edit.active if isinstance(edit, EepEdit) else 2)
        assert settings.get("num_nextn_predict_layers", 0) == 0
        # Groups that limit nothing become one, so that 4 experts need not be divisible by three.
        limited = {"deepseek_v3-grouped": (2, 1), "deepseek_v3-unscaled": (1, 1)}.get(variant)
        assert limited is None or (settings["n_group"], settings["topk_group"]) == limited
        assert isinstance(resident.applied, IdentityEdit)
    return expected


def test_exports_load_and_agree_without_moevolve(
    model_config: Configs, tokens: Tensor, outsider: Outsider, tmp_path: Path
) -> None:
    expected: dict[Path, Computed] = {}
    for variant in KINDS:
        expected |= export_all(variant, model_config(variant), tokens, tmp_path)
    found = outsider(list(expected), tokens)
    assert_same_elsewhere(expected, found)


def test_exports_from_bfloat16(model_config: Configs, tmp_path: Path) -> None:
    from safetensors import safe_open
    from transformers import DeepseekV3ForCausalLM

    edit = family_edit("deepseek_v3-grouped", "both")
    report = export_model(model_config("deepseek_v3-grouped", dtype="bfloat16"), edit, tmp_path / "out", CARD)
    assert report.form == "native" and report.agreement.holds
    assert not (report.directory / "__pycache__").exists()
    with safe_open(report.directory / "model.safetensors", "pt") as file:
        dtypes = {name: file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
    for name, dtype in dtypes.items():
        wide = name.endswith((*DeepseekV3ForCausalLM._keep_in_fp32_modules_strict, "router_mapping"))
        assert dtype == (torch.float32 if wide else torch.bfloat16), name


def test_code_of_the_hub_is_not_referred_to(
    checkpoint: Callable[[str], Path], model_config: Configs, tokens: Tensor, tmp_path: Path
) -> None:
    """DeepSeek's published configs and tokenizers name code that exports don't contain."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shutil.copytree(checkpoint("deepseek_v3"), tmp_path / "hub")
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModelForCausalLM": "modeling_deepseek.Model"}
    for name, named in (("config.json", code), ("tokenizer_config.json", {"AutoTokenizer": ["tokens.Slow", None]})):
        file = tmp_path / "hub" / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": named}))
    resident = ResidentModel.load(replace(model_config("deepseek_v3"), path=str(tmp_path / "hub")))
    edit = family_edit("deepseek_v3", "prune")
    report = export_model(resident, edit, tmp_path / "stock", CARD)
    assert report.form == "stock"
    for name in ("config.json", "tokenizer_config.json"):
        assert "auto_map" not in (tmp_path / "stock" / name).read_text()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "stock", trust_remote_code=True).eval()
    with torch.no_grad():
        assert_close(model(tokens).logits, logits(resident, edit, tokens))
    AutoTokenizer.from_pretrained(tmp_path / "stock", trust_remote_code=True)
    assert check_folder(str(tmp_path / "stock"), False) == tmp_path / "stock"
    export_model(resident, family_edit("deepseek_v3", "both"), tmp_path / "native", CARD)
    names = json.loads((tmp_path / "native" / "config.json").read_text())["auto_map"].values()
    assert all(name.startswith("modeling_moevolve.") for name in names)
