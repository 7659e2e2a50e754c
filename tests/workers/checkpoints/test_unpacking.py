"""Quantised checkpoints as published: they are dequantised as their formats define, and score like plain numbers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from families import edit_of_kind
from packed_checkpoints import (
    LINEAR_FORMATS,
    LLAMA4_SIZES,
    V4_SIZES,
    deepseek_v4_checkpoint,
    fp8_checkpoint,
    linear_checkpoint,
    llama4_checkpoint,
    mistral4_checkpoint,
    mxfp4_checkpoint,
    same_numbers,
)
from safetensors.torch import load_file, save_file

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.formats.registry import packed_format
from moevolve.workers.checkpoints.loading import load_model
from moevolve.workers.contract.card import ExportCard
from moevolve.workers.contract.facts import parameters_after
from moevolve.workers.export.export import export_model
from moevolve.workers.model.describe import describe_model
from moevolve.workers.model.resident import ResidentModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

MakeModel = Callable[..., "PreTrainedModel"]


# DeepSeek-V3's `kv_a_proj_with_mqa` has ceil(rows / block) rows of scales, the last block cut. DeepSeek-V4 has FP8
# blocks and MXFP4 experts with scales named `.scale`, in tensors of the decoder's own names. Mistral 4 has FP8 with a
# scale per matrix, and per expert of fused ones. compressed-tensors stores no fused experts.
PUBLISHED: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "deepseek_v3": (fp8_checkpoint, {}),
    "deepseek_v4": (deepseek_v4_checkpoint, V4_SIZES),
    "mistral4": (mistral4_checkpoint, {}),
    "llama4_text": (llama4_checkpoint, LLAMA4_SIZES),
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_eight_and_four_bits_as_published(
    family: str, tiny_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    write, sizes = PUBLISHED[family]
    config, plain = write(tiny_model(family, **sizes), tiny_tokenizer, tmp_path)
    same_numbers(config, plain)
    (Path(config.path) / "generation_config.json").write_text('{"eos_token_id": [2, 77], "pad_token_id": 0}')
    assert load_model(config)[0].generation_config.eos_token_id == [2, 77]


def test_mxfp4_as_published(tiny_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """GPT-OSS: `_blocks` [n, rows, blocks, 16] and `_scales` [n, rows, blocks] of transposed experts, with biases."""
    model = tiny_model("gpt_oss", intermediate_size=32, hidden_size=96, head_dim=24)
    packed, plain = mxfp4_checkpoint(model, tiny_tokenizer, tmp_path)
    same_numbers(packed, plain)
    resident, edit = ResidentModel.load(packed), edit_of_kind(3, 6, "prune", active=1, space="logits")
    report = export_model(resident, edit, tmp_path / "out", ExportCard("t", "b", "f", "s", "1", "s:1", (), ()))
    facts = describe_model(packed)
    assert facts.notes[-1] == "unpacked from mxfp4 while it loads"
    assert report.agreement.holds and (report.form, report.parameters) == ("stock", parameters_after(facts, 4))
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("kind", LINEAR_FORMATS)
def test_linear_layers_as_other_programs_write_them(
    kind: str, tiny_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model = tiny_model("qwen3_moe", hidden_size=64, moe_intermediate_size=32, num_hidden_layers=1)
    same_numbers(*linear_checkpoint(kind, model, tiny_tokenizer, tmp_path), dtypes=("float32",))


def test_symmetric_zero_points_are_in_the_middle(
    tiny_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """GPTQModel has stored 8 for the middle of 16 codes where its settings say the version that stores 7."""
    model = tiny_model("qwen3_moe", hidden_size=64, moe_intermediate_size=32, num_hidden_layers=1)
    config, _ = linear_checkpoint("gptq", model, tiny_tokenizer, tmp_path)
    file, name = Path(config.path) / "model.safetensors", "model.layers.0.self_attn.q_proj."
    settings = json.loads((file.parent / "config.json").read_text())
    settings["quantization_config"]["sym"] = True
    (file.parent / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"can't be unpacked: .* has sym: true, and its zero points aren't in the"):
        load_model(config)
    tensors = load_file(file)
    words = tensors[name + "qweight"]
    codes = torch.stack([words >> shift & 15 for shift in range(0, 32, 4)], 1).flatten(0, 1)
    expected = ((codes - 8) * tensors[name + "scales"].float()[tensors[name + "g_idx"].long()]).T
    for stored in (0x77777777, -0x77777778):  # eight sevens, and eight eights
        zeros = {key: torch.full_like(each, stored) for key, each in tensors.items() if key.endswith("qzeros")}
        save_file(tensors | zeros, file, {"format": "pt"})
        assert torch.equal(load_model(config)[0].get_parameter(name + "weight"), expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "packed as 'bitsandbytes'.* one packed as fp8, fbgemm_fp8",
        ),
        ({"group_size": 32, "bits": 4}, "in a format that quantization_config doesn't name"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quantised by W4A8_AWQ aren't supported"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "group_size": 128}, "group_size: 128"),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MXFP8",
                "config_groups": {"a": {"weights": {"group_size": 16}}},
            },
            "config_groups.a.weights has group_size: 16",
        ),
        ({"quant_method": "fbgemm_fp8", "weight_scales": "column"}, "has weight_scales: 'column'"),
        ({"quant_method": "awq", "bits": 8}, "awq weights of 8 bits"),
        ({"quant_method": "gptq", "bits": 3}, "gptq weights of 3 bits"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": 3}}, "isn't one of compressed-tensors"),
    ],
)
def test_what_cannot_be_unpacked_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"model some/name: .*{message}"):
        packed_format(settings.get("quant_method"), settings, "some/name")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    with pytest.raises(UserError, match=r"pip install 'moevolve\[quantised\]'"):
        packed_format("gptq", {}, "some/name")
    packed_format("fp8", {"weight_block_size": [128, 128]}, "some/name")


def test_a_damaged_matrix_is_named(
    tiny_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model = tiny_model("qwen3_moe", hidden_size=64, moe_intermediate_size=32)
    config, _ = linear_checkpoint("int4", model, tiny_tokenizer, tmp_path)
    file, name = Path(config.path) / "model.safetensors", "model.layers.1.mlp.experts.3.up_proj."
    tensors = load_file(file)
    words = tensors[name + "weight_packed"]
    save_file(tensors | {name + "weight_packed": torch.cat([words, words], 1)}, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"can't be unpacked: .* its group of config_groups isn't .* or correct quant"):
        load_model(config)
    tensors[name + "weight_scale"] = tensors[name + "weight_scale"][:5].contiguous()
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"up_proj\.weight can't be unpacked"):
        load_model(config)
    del tensors[name + "weight_packed"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"is quantised, and .*up_proj.weight_packed is missing"):
        load_model(config)
