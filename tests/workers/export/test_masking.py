"""Masked experts: a mask in a router's bias computes what pruning does, and padded experts are never chosen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from edit_checks import CARD, Residents, assert_close, logits, write_source
from family_samples import edit_of_kind
from safetensors.torch import load_file, save_file
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export.mask import export_mask
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.model.describe import describe_model

Configs = Callable[..., ModelConfig]

BIASED = ("deepseek_v3-grouped", "minimax_m2", "gpt_oss")


def pruned(config: ModelConfig, each: int, active: int = 2) -> EepEdit:
    """Keep `each` experts, drawn anew for every layer, of every routing group."""
    facts, rng = describe_model(config), np.random.default_rng(5)
    groups, size = facts.rule.groups.count, facts.experts // facts.rule.groups.count
    rows = [
        [group * size + expert for group in range(groups) for expert in rng.permutation(size)[:each]]
        for _ in facts.moe_layers
    ]
    matrices = np.eye(facts.experts, dtype=np.float32)[np.array(rows)]
    return EepEdit(matrices, matrices, active, "logits")


def each_of(family: str) -> int:
    return 3 if family == "deepseek_v3-grouped" else 4


def applied(config: ModelConfig, mask: Path, folder: Path) -> Path:
    """Apply a mask as its README says, without moevolve."""
    shutil.copytree(config.path, folder)
    tensors = load_file(folder / "model.safetensors") | load_file(mask / "mask.safetensors")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings["num_experts_per_tok"] = json.loads((mask / "mask.json").read_text())["num_experts_per_tok"]
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("family", BIASED)
def test_a_mask_computes_what_the_pruned_model_does(
    family: str, model_config: Configs, resident: Residents, tokens: Tensor, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    config = model_config(family)
    edit = pruned(config, each_of(family), active=1)
    report = export_mask(config, edit, tmp_path / "mask", CARD)
    settings = json.loads((tmp_path / "mask" / "mask.json").read_text())
    layers = describe_model(config).moe_layers
    assert (settings["fingerprint"], settings["num_experts_per_tok"]) == ("f00d", 1)
    assert settings["masked_experts"] == {
        str(layer): np.flatnonzero(matrix.sum(axis=0) == 0).tolist()
        for layer, matrix in zip(layers, edit.router_mapping, strict=True)
    }
    tensors, source = (
        load_file(file) for file in (tmp_path / "mask" / "mask.safetensors", f"{config.path}/model.safetensors")
    )
    assert sorted(tensors) == settings["tensors"] and len(tensors) == len(layers) == report.copied
    for name, tensor in tensors.items():
        changed = tensor != source[name]
        assert (tensor[changed] == -1e4).all() and changed.sum() == len(tensor) - edit.retained
    assert (tmp_path / "mask" / "mask.safetensors").stat().st_size < 2000
    expected = logits(resident(family), edit, tokens)
    plain = AutoModelForCausalLM.from_pretrained(applied(config, tmp_path / "mask", tmp_path / "applied")).eval()
    with torch.no_grad():
        assert_close(plain(tokens).logits, expected)
    assert not torch.allclose(logits(resident(family), None, tokens), expected, atol=1e-3)


@pytest.mark.parametrize("family", BIASED)
def test_padded_experts_are_never_chosen(
    family: str, model_config: Configs, resident: Residents, tokens: Tensor, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    config = model_config(family)
    edit = pruned(config, each_of(family) - (1 if family == "deepseek_v3-grouped" else 0))
    write_source(config, edit, tmp_path / "padded", multiple=8)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "padded").eval()
    with torch.no_grad():
        assert_close(plain(tokens).logits, logits(resident(family), edit, tokens))
    assert len(plain.model.layers[-1].mlp.experts.down_proj) == 8
    # What pads comes after a group's own, and its weights are finite numbers like others'.
    bias = next(
        each
        for name, each in load_file(tmp_path / "padded" / "model.safetensors").items()
        if name.endswith(("e_score_correction_bias", "router.bias"))
    )
    per_group = (2, 2, 4) if family == "deepseek_v3-grouped" else (1, 4, 8)
    places = torch.arange(8) % per_group[2] >= per_group[1]
    assert torch.equal(bias == -1e4, places)
    # A multiple that divides the number already adds nothing.
    write_source(config, edit, tmp_path / "even", multiple=2)
    write_source(config, edit, tmp_path / "plain")
    assert (tmp_path / "even/model.safetensors").read_bytes() == (tmp_path / "plain/model.safetensors").read_bytes()


def test_what_no_bias_can_mask_is_refused(model_config: Configs, tmp_path: Path) -> None:
    softmax = model_config("qwen3_moe")
    edit = pruned(softmax, 4)
    with pytest.raises(UserError, match="routers have no bias"):
        export_mask(softmax, edit, tmp_path / "out", CARD)
    with pytest.raises(UserError, match="neither padded nor masked exactly"):
        write_source(softmax, edit, tmp_path / "out", multiple=8)
    grouped = model_config("deepseek_v3-grouped")
    kept = np.eye(8, dtype=np.float32)[np.array([[0, 4, 1, 5]] * 2)]
    for wrong, message in (
        (EepEdit(kept, kept, 2), "routing groups mix experts"),
        (edit_of_kind(2, 8, "crossed"), "router rows of others"),
    ):
        with pytest.raises(UserError, match=message):
            export_mask(grouped, wrong, tmp_path / "out", CARD)
    assert list(tmp_path.iterdir()) == []
