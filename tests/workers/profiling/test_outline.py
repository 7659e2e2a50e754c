"""Outlines of models from their configs against the loaded models: bytes and cached values."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from edit_checks import Residents
from families import DENSE, family_edit, representatives
from torch import Tensor

from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.families.layers import linears_outside
from moevolve.workers.model.describe import describe_model
from moevolve.workers.profiling.outline import ModelOutline, outline_model

FAMILIES = ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss"]
HYBRID = ["qwen3_next", "granitemoehybrid", "jamba", "lfm2_moe", "kimi_linear", "bailing_hybrid"]
"""Families some of whose layers have a recurrent mixer instead of softmax attention."""


@pytest.fixture(scope="module")
def outline(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ModelOutline]:
    """Outlines from folders that contain only config.json."""

    def make(family: str, **settings: Any) -> ModelOutline:
        folder = tmp_path_factory.mktemp(family)
        shutil.copy(checkpoint(family) / "config.json", folder)
        return outline_model(ModelConfig(str(folder), **settings))

    return make


def held(model: Any) -> int:
    """Bytes of a model's parameters and buffers, counting tied tensors once."""
    return sum(each.nbytes for each in {id(t): t for t in (*model.parameters(), *model.buffers())}.values())


@pytest.mark.parametrize("family", representatives((*FAMILIES, "llama", "phi", "opt", "phi3-scaled"), DENSE))
@torch.no_grad()
def test_bytes_and_caches_are_those_of_the_loaded_model(
    outline: Callable[..., ModelOutline], resident: Residents, tokens: Tensor, family: str
) -> None:
    found, loaded = outline(family), resident(family)
    assert found.weight_bytes == held(loaded.model)
    originals = [loaded.original_experts(i) for i in range(len(loaded.layers))]
    assert found.expert_bytes == tuple(tuple(tensor.nbytes for tensor in each.values()) for each in originals)
    assert bool(found.experts_bytes) == (family in FAMILIES)
    linears = linears_outside(loaded.model, loaded.layers)
    assert found.linear_bytes == tuple(tuple(each.weight.nbytes for each in group) for group in linears)
    assert found.pinned_bytes >= found.experts_bytes
    # Sliding windows cache less, and states of recurrent mixers aren't counted.
    if not getattr(loaded.model.config, "sliding_window", None) and family != "qwen3_5_text":
        cache = loaded.model(input_ids=tokens, use_cache=True).past_key_values
        there = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        assert there == found.cache_bytes * tokens.numel()


def test_bytes_follow_the_dtype(
    outline: Callable[..., ModelOutline], model_config: Callable[..., ModelConfig], resident: Residents
) -> None:
    half = outline("deepseek_v3", dtype="bfloat16")
    assert half.weight_bytes == held(resident("deepseek_v3", dtype="bfloat16").model)
    whole = outline("deepseek_v3")
    # Its correction bias and its rotary frequencies stay float32.
    assert whole.weight_bytes / 2 < half.weight_bytes < whole.weight_bytes
    assert (half.experts_bytes * 2, half.cache_bytes * 2) == (whole.experts_bytes, whole.cache_bytes)


def test_originals_on_the_host_leave_the_rest_and_the_buffers(
    outline: Callable[..., ModelOutline], resident: Residents
) -> None:
    found, loaded = outline("mixtral"), resident("mixtral", expert_offload="host")
    assert held(loaded.model) == found.weight_bytes - found.experts_bytes
    edit = family_edit("mixtral", "merge", retained=4)
    with loaded.edited(edit):
        buffers = found.experts_bytes * edit.retained // edit.experts
        assert held(loaded.model) == found.weight_bytes - found.experts_bytes + buffers


def test_only_eager_attention_outside_of_blocks_holds_scores(model_config: Callable[..., ModelConfig]) -> None:
    def scores(family: str) -> int:
        return outline_model(model_config(family, dtype="bfloat16")).scores_bytes

    # An H200 held three tensors of scores in GPT-OSS, for each of 4 heads.
    assert [scores("gpt_oss"), scores("mixtral")] == [4 * 3 * 2, 0]


@pytest.mark.parametrize("family", HYBRID)
@torch.no_grad()
def test_models_with_recurrent_layers_are_outlined(
    outline: Callable[..., ModelOutline], resident: Residents, tokens: Tensor, family: str
) -> None:
    found, model = outline(family), resident(family).model
    assert found.weight_bytes == held(model)
    cache = model(input_ids=tokens, use_cache=True).past_key_values
    cached = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    assert 0 < len(cached) < found.layers, "recurrent layers cache no keys"
    assert sum(each.keys.nbytes + each.values.nbytes for each in cached) == found.cache_bytes * tokens.numel()
    assert found.layer_bytes > 0


def test_facts_are_those_of_the_checkpoint_but_for_its_fingerprint(
    outline: Callable[..., ModelOutline], model_config: Callable[..., ModelConfig]
) -> None:
    for family in ("qwen2_moe", "llama"):
        whole = describe_model(model_config(family))
        assert whole.fingerprint
        assert replace(whole, fingerprint="") == outline(family).facts
