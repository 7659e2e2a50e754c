"""The lab's checkpoints: published names, shapes, dtypes and sizes, and files with holes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from real_size.checkpoint import stored_bytes, write_checkpoint
from real_size.published import SPECS, few_layers, stored_tensors
from safetensors import safe_open

from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.model.describe import describe_model

pytestmark = pytest.mark.bench

# `total_size` of the published indices, in bytes; two per parameter.
TOTALS = {
    "mixtral-8x7b": 93_405_585_408,
    "qwen3-30b-a3b": 61_064_245_248,
    "olmoe-1b-7b": 13_838_323_712,
    "deepseek-v2-lite": 31_412_968_448,
    "qwen1.5-moe-a2.7b": 28_631_568_384,
    "llama-3-8b": 16_060_522_496,
}
NAMES = {
    "mixtral-8x7b": ("model.layers.1.block_sparse_moe.experts.7.w2.weight", (4096, 14336), "BF16"),
    "mixtral-8x22b": ("model.layers.0.block_sparse_moe.gate.weight", (8, 6144), "BF16"),
    "qwen1.5-moe-a2.7b": ("model.layers.0.mlp.shared_expert.gate_proj.weight", (5632, 2048), "BF16"),
    "qwen2-57b-a14b": ("model.layers.0.mlp.experts.63.up_proj.weight", (2560, 3584), "BF16"),
    "qwen3-30b-a3b": ("model.layers.0.mlp.experts.127.down_proj.weight", (2048, 768), "BF16"),
    "olmoe-1b-7b": ("model.layers.0.self_attn.q_norm.weight", (2048,), "BF16"),
    "deepseek-v2-lite": ("model.layers.1.mlp.shared_experts.up_proj.weight", (2816, 2048), "BF16"),
    "deepseek-v3": ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv", (5, 56), "F32"),
    "deepseek-v4-flash": ("layers.0.ffn.experts.63.w2.scale", (4096, 64), "F8_E8M0"),
    "glm-4.5-air": ("model.layers.1.mlp.gate.e_score_correction_bias", (128,), "F32"),
    "gpt-oss-20b": ("model.layers.0.mlp.experts.gate_up_proj_blocks", (32, 5760, 90, 16), "U8"),
    "llama-3-8b": ("model.layers.0.mlp.gate_proj.weight", (14336, 4096), "BF16"),
    "opt-13b": ("model.decoder.layers.0.fc1.weight", (20480, 5120), "F16"),
}


@pytest.mark.parametrize("name", SPECS)
def test_tensors_have_published_names_shapes_and_dtypes(name: str) -> None:
    tensors = {tensor.name: tensor for tensor in stored_tensors(SPECS[name].config)}
    wanted, shape, dtype = NAMES[name]
    assert (tensors[wanted].shape, tensors[wanted].dtype) == (shape, dtype)
    if name in TOTALS:
        # One more layer is as large as any other: the published file's size is that of all of them.
        spec = SPECS[name]
        sizes = [
            sum(map(stored_bytes, stored_tensors(few_layers(spec.published, layers, spec.dense))))
            for layers in (spec.layers, spec.layers + 1)
        ]
        layers = spec.published["num_hidden_layers"] - spec.layers
        assert sizes[0] + layers * (sizes[1] - sizes[0]) == TOTALS[name]


def test_eight_bit_weights_have_a_scale_for_every_block_that_has_begun() -> None:
    tensors = {tensor.name: tensor for tensor in stored_tensors(SPECS["deepseek-v3"].config)}
    latent = tensors["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"]
    assert (latent.shape, latent.dtype) == ((576, 7168), "F8_E4M3")
    plain = ("model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.gate.weight")
    assert {tensors[name].dtype for name in plain} == {"BF16"}
    assert not any(f"{name}_scale_inv" in tensors for name in plain)


def test_a_whole_checkpoint_of_holes_takes_no_disk_and_is_described(tmp_path: Path) -> None:
    spec = replace(SPECS["mixtral-8x7b"], layers=32)
    folder = write_checkpoint(spec, tmp_path / "whole", holes=lambda name: True)
    files = list(folder.glob("*.safetensors"))
    assert sum(file.stat().st_size for file in files) > TOTALS["mixtral-8x7b"]
    assert sum(file.stat().st_blocks * 512 for file in files) < 16 << 20
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == TOTALS["mixtral-8x7b"]
    with safe_open(folder / index["weight_map"]["lm_head.weight"], "pt") as file:
        assert not file.get_slice("lm_head.weight")[-1].any()
    facts = describe_model(ModelConfig(str(folder)))
    assert (facts.parameters, facts.experts, len(facts.moe_layers)) == (TOTALS["mixtral-8x7b"] // 2, 8, 32)
