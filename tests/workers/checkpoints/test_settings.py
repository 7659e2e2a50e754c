"""Settings in a checkpoint's files are applied, known not to matter, or refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from drawn_checkpoints import FORMATS, outcome, write_plain
from library_settings import LIBRARIES, differences
from safetensors.torch import load_file, save_file

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.formats.registry import packed_format
from moevolve.workers.checkpoints.loading import check_weights, load_config, load_model
from moevolve.workers.checkpoints.text_models import text_config
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.model.describe import describe_model, meta_model

if TYPE_CHECKING:
    pass

Checkpoints = Callable[[str], Path]
CONFIGS = Path(__file__).parents[3] / "configs"

# What a library reads and we always refuse. A new version's settings are looked at before they join a table.
STOPS = {
    "generation_config.json": {
        *("bad_words_ids", "begin_suppress_tokens", "constraints", "encoder_no_repeat_ngram_size", "force_words_ids"),
        *("exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "min_length"),
        *("min_new_tokens", "no_repeat_ngram_size", "sequence_bias", "stop_strings", "suppress_tokens"),
        *("token_healing", "watermarking_config"),
    },
    "tokenizers in GGUF": {"chat_template.{name}", "rwkv.world"},  # named templates are read apart from the table
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_tables_know_what_libraries_read(name: str) -> None:
    found = differences(name)
    if found is None:
        pytest.skip(f"{LIBRARIES[name][0]} isn't installed")
    assert set(found[0]) == STOPS.get(name, set())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawn") / "model"
    write_plain(folder)
    return folder


@pytest.mark.parametrize("case", range(3 * len(FORMATS)))
def test_valid_quantised_checkpoints_are_read_as_their_libraries_do(case: int, plain: Path, tmp_path: Path) -> None:
    assert outcome(plain, tmp_path / "model", case)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "fp8", "fmt": "e3m4"}, "fmt: 'e3m4': numbers in another format than .* with 'e4m3'"),
        ({"quant_method": "fp8", "unheard": 3}, "its quantization_config has unheard: 3, which nothing here reads"),
        ({"quant_method": "mxfp4", "block": 16}, "has block: 16, which nothing here reads"),
        ({"quant_method": "gptq", "format": "gptq", "checkpoint_format": "gptq_v2"}, "which differ"),
        ({"quant_method": "gptq", "dynamic": {"a": {"bits": 3}}}, "gptq weights of 3 bits"),
        ({"quant_method": "gptq", "dynamic": {"a": {"unheard": 3}}}, r"dynamic\['a'\] has unheard: 3"),
        ({"quant_method": "gptq", "dynamic": {"(": {}}}, "isn't a regular expression"),
        ({"quant_method": "awq", "checkpoint_format": "gemv"}, "checkpoint_format: 'gemv': another order of codes"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {"a": {"weights": {"num_bits": 8}}}},
            "config_groups.a.weights has num_bits: 8",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {}, "transform_config": {"a": 1}},
            "transform_config: {'a': 1}: inputs and weights of matrices are rotated",
        ),
    ],
)
def test_settings_of_formats_that_are_not_read_stop(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        packed_format(settings["quant_method"], settings, "some/name")


@pytest.mark.parametrize("name", sorted(each.name for each in (CONFIGS / "models").iterdir()))
def test_published_configs_pass(name: str) -> None:
    meta_model(ModelConfig(str(CONFIGS / "models" / name), device="cpu"))


def with_settings(folder: Path, **settings: Any) -> ModelConfig:
    content = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(content))
    return ModelConfig(str(folder), device="cpu", dtype="float32")


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE: dict[str, tuple[dict[str, Any], str]] = {
    "a scaling": ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 32}}, ""),
    "of another type, at its default": ({"rope_scaling": {"type": "dynamic", "factor": 2.0, "beta_fast": 32}}, ""),
    "nothing but a base": ({"rope_scaling": None, "rope_theta": 5e5}, ""),
    "no type": ({"rope_scaling": {"factor": 8.0, "rope_theta": 1e4}}, r"factor: 8.0, .* rope_type 'default'"),
    "an unknown one": ({"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 4}}, "have alpha: 4, .* 'linear'"),
    "a part of heads": (
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor",
    ),
    "two bases": ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4}}, "rope_theta: 500000.0 beside"),
    "two scalings": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"type": "linear", "factor": 4.0}},
        "rope_scaling and rope_parameters",
    ),
}


@pytest.mark.parametrize("name", ROPE)
def test_rotary_settings_that_the_family_does_not_read_stop(name: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    settings, message = ROPE[name]
    folder = shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "model")
    content = json.loads((folder / "config.json").read_text())
    content.pop("rope_parameters", None)
    (folder / "config.json").write_text(json.dumps(content))
    config = with_settings(folder, **settings)
    if message:
        with pytest.raises(UserError, match=message):
            load_config(config)
    else:
        load_config(config)


def test_what_only_other_programs_read_is_named_and_routing_is_compared(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint("deepseek_v3"), tmp_path / "model")
    notes = describe_model(with_settings(folder, scoring_func="sigmoid", made_by="a tool")).notes
    assert "config.json says more than the family reads: scoring_func, made_by" in notes
    with pytest.raises(UserError, match="scoring_func: 'softmax', which a deepseek_v3 doesn't read"):
        describe_model(with_settings(folder, scoring_func="softmax"))


def test_a_text_model_keeps_the_settings_that_its_family_does_not_declare() -> None:
    from transformers import AutoConfig

    text = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32, "num_experts": 4}
    packed = {"quant_method": "fp8"}
    found = text_config(AutoConfig.for_model("qwen3_vl_moe", text_config=text | {"quantization_config": packed}))
    assert (found.head_dim, found.quantization_config) == (32, packed)


def test_settings_in_other_places_stop(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    folder = shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "model")
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    hub = tmp_path / "hub" / "models--owner--name"
    shutil.copytree(folder, hub / "snapshots" / "1234")
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("1234")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub.parent))
    for path in (str(folder), "owner/name"):
        with pytest.raises(UserError, match=r"hf_quant_config.json says how .* config.json has no quantization_config"):
            load_model(ModelConfig(path, device="cpu"))
    (hub / "snapshots" / "1234" / "hf_quant_config.json").unlink()
    load_model(ModelConfig("owner/name", device="cpu"))
    (folder / "hf_quant_config.json").unlink()
    with pytest.raises(UserError, match=r"has compression_config.*; rename it to quantization_config"):
        load_model(with_settings(folder, compression_config={"quant_method": "compressed-tensors"}))
    whole = {"model_type": "qwen3_vl_moe", "text_config": {"model_type": "qwen3_vl_moe_text", "rope_theta": 1e4}}
    (folder / "config.json").write_text(json.dumps(whole | {"rope_scaling": {"type": "linear", "factor": 2.0}}))
    with pytest.raises(UserError, match=r"rope_scaling: .* beside the settings of its text model, which say None"):
        load_config(ModelConfig(str(folder)))


def test_generation_settings_that_force_tokens_stop(checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "model")
    config, file = ModelConfig(str(folder), device="cpu"), folder / "generation_config.json"
    harmless = {"eos_token_id": [2], "temperature": 0.6, "repetition_penalty": 1.05, "of_a_tool": 3, "num_beams": 1}
    file.write_text(json.dumps(harmless))
    load_model(config)
    for key, value in {"suppress_tokens": [5], "num_beams": 4}.items():
        file.write_text(json.dumps(harmless | {key: value}))
        with pytest.raises(UserError, match=f"generation_config.json has {key}: "):
            load_model(config)


TENSORS: dict[str, tuple[str, torch.Tensor, str]] = {
    **{
        name: (f"model.layers.1.self_attn.{name}", torch.tensor(0.5), "")
        for name in ("k_proj.output_scale", "kv_scale", "prob_output_scale", "attn.v_scale", "q_zero_point")
    },
    "an adapter of the head": ("lm_head.lora_A.weight", torch.ones(2, 32), "tensor lm_head.lora_A.weight is in the"),
    "beside the layers": ("model.engram.weight", torch.ones(2), "tensor model.engram.weight is in the files"),
    "in a layer of a decoder alone": (
        "layers.1.mlp.extra.weight",
        torch.ones(2),
        "tensor layers.1.mlp.extra.weight is",
    ),
    "a scale": (
        "model.layers.1.mlp.gate.weight_scale",
        torch.ones(1),
        "quantization_config doesn't say that it is",
    ),
    "codes": (
        "model.layers.1.self_attn.q_proj.weight",
        torch.ones(32, 32, dtype=torch.int8),
        "q_proj.weight has numbers of torch.int8 without scales",
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_are_not_read(name: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    where, values, message = TENSORS[name]
    folder = shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "model")
    file = folder / "model.safetensors"
    save_file(load_file(file) | {where: values}, file, {"format": "pt"})
    config = ModelConfig(str(folder), device="cpu")
    if message:
        with pytest.raises(UserError, match=message):
            check_weights(config)
    else:
        check_weights(config)
