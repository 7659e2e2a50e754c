"""Checkpoints in the format of compressed-tensors: what is rounded, by how much, and that others read the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.loading import load_model
from moevolve.workers.contract.card import ExportError
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export import quantise as module
from moevolve.workers.export.quantise import quantise

pytest.importorskip("compressed_tensors")
DEMO = Path(__file__).parents[3] / "configs" / "demo" / "model"
EXPERT = "model.layers.2.block_sparse_moe.experts.3.w2"
Written = Callable[[str], Path]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("quantised")

    def get(kind: Any) -> Path:
        if not (folder / kind).exists():
            found = quantise(DEMO, folder / kind, kind)
            assert found.matrices == 5 * (4 + 8 * 3), "attention and experts of all layers"
            assert found.difference < {"fp8": 0.03, "int4": 0.11}[kind]
        return folder / kind

    return get


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_matrices_of_layers_are_rounded_and_all_else_is_as_it_was(written: Written, kind: str) -> None:
    before, after = (load_file(folder / "model.safetensors") for folder in (DEMO, written(kind)))
    same = {name for name in before if name in after and before[name].dtype == after[name].dtype}
    assert {name.split(".")[-2] for name in same} == {
        *("embed_tokens", "lm_head", "norm", "gate", "input_layernorm", "post_attention_layernorm")
    }
    assert all(torch.equal(before[name], after[name]) for name in same)
    exact = before[f"{EXPERT}.weight"].double().numpy()
    if kind == "fp8":
        scales = np.abs(exact).max(axis=1, keepdims=True) / 448
        assert after[f"{EXPERT}.weight_scale"].double().numpy() == pytest.approx(scales, rel=1e-6)
        found, step = after[f"{EXPERT}.weight"].double().numpy() * scales, 2**-4 * np.abs(exact) + scales * 2**-9
    else:
        scales = after[f"{EXPERT}.weight_scale"].double().numpy()
        largest = np.abs(exact).reshape(*scales.shape, 32).max(axis=2)
        assert scales == pytest.approx(largest / 7, rel=2**-8)
        words = after[f"{EXPERT}.weight_packed"].numpy().view(np.uint32)
        codes = (words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).reshape(exact.shape).astype(int) - 8
        step = np.repeat(scales, 32, axis=1)
        found, step = codes * step, step * 0.51
    assert (np.abs(found - exact) <= step).all(), "the nearest number"


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_transformers_reads_the_same_numbers_as_we_do(written: Written, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(written(kind), dtype=torch.float32).model.layers[2].mlp.experts
    ours, _ = load_model(ModelConfig(str(written(kind)), device="cpu", dtype="float32"))
    experts = ours.model.layers[2].mlp.experts
    assert torch.equal(theirs.down_proj.float(), experts.down_proj)
    assert torch.equal(theirs.gate_up_proj.float(), experts.gate_up_proj)


def test_the_card_and_the_config_say_what_was_done(tmp_path: Path) -> None:
    source = tmp_path / "small"
    source.mkdir()
    for file in DEMO.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    (source / "README.md").write_text("---\ntags: [a]\n---\n\n# small\n")
    quantise(source, tmp_path / "out", "int4")
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\ntags: [a]\n---\n\n# small\n\n## Quantised\n\n140 matrices were rounded to int4")
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["config_groups"]["group_0"]["weights"]["group_size"] == 32
    assert settings["ignore"][:2] == ["lm_head", "model.embed_tokens"] and len(settings["ignore"]) == 2 + 5
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    with pytest.raises(UserError, match="not empty"):
        quantise(source, tmp_path / "out", "fp8")


def test_what_has_no_such_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    name = "model.layers.0.mlp.experts.{}.down_proj.weight"
    save_file({name.format(0): torch.ones(8, 48)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"experts\.0\.down_proj\.weight can't be divided into groups of 32; use fp8"):
        quantise(tmp_path, tmp_path / "out", "int4")
    save_file({"model.layers.0.mlp.experts.down_proj": torch.ones(4, 8, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="have a layer's experts in one tensor"):
        quantise(tmp_path, tmp_path / "out", "fp8")
    assert not (tmp_path / "out").exists()


def test_numbers_that_do_not_come_back_are_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FAR", 1e-6)
    with pytest.raises(ExportError, match="read back, differs by"):
        quantise(DEMO, tmp_path / "out", "fp8")
    assert not (tmp_path / "out").exists()
