"""Exported checkpoints have the names, shapes and config fields that servers read.

The sources are the loaders of vLLM (`vllm/model_executor/models/FILE.py`), SGLang (`python/sglang/srt/models/FILE.py`)
and llama.cpp (`src/llama-model.cpp`). The rows of GPT-OSS, MiniMax-M2, GLM-4-MoE, OLMoE and Qwen3-MoE were written down
from vLLM's files, those of Mixtral, Qwen2-MoE and DeepSeek from the published checkpoints that these load. No server is
run here.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from edit_checks import CARD, write_source
from families import edit_of_kind
from safetensors.torch import load_file

from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export.export import export_model
from moevolve.workers.model.describe import describe_model

Configs = Callable[..., ModelConfig]

HIDDEN, WIDTH = 32, 24
PROJECTIONS = {"gate_proj": (WIDTH, HIDDEN), "up_proj": (WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
NUMBERED = {"w1": (WIDTH, HIDDEN), "w3": (WIDTH, HIDDEN), "w2": (HIDDEN, WIDTH)}


@dataclass(frozen=True)
class Loader:
    """What the loaders of a family read.

    Attributes:
        files: Files of vLLM and SGLang that say so, without their suffix.
        experts: Config field with the number of experts.
        block: Name of the MoE block within a layer.
        parts: Shapes by name of an expert's weights, or of fused tensors without their first dimension.
        width: Config field with the number of neurons per expert.
        router: Name of the router within the block.
        bias: Tensor with a number per expert within the block, if there is one.
        fused: True if the parts are fused.
        reads: Further config fields, with the values that published checkpoints have.
        zero: Config fields that count layers for MTP, with the published number.
    """

    files: str
    experts: str
    block: str = "mlp"
    parts: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: PROJECTIONS)
    width: str = "moe_intermediate_size"
    router: str = "gate"
    bias: str | None = None
    fused: bool = False
    reads: Mapping[str, Any] = field(default_factory=dict)
    zero: Mapping[str, int] = field(default_factory=dict)


# Without `topk_method: noaux_tc` vLLM gives a DeepSeek no correction bias, and without `use_routing_bias` a MiniMax.
DEEPSEEK = Loader(
    "deepseek_v2",
    "n_routed_experts",
    bias="gate.e_score_correction_bias",
    reads={"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
    zero={"num_nextn_predict_layers": 1},
)
LOADERS = {
    "mixtral": Loader("mixtral", "num_local_experts", "block_sparse_moe", NUMBERED, "intermediate_size"),
    "qwen2_moe": Loader("qwen2_moe", "num_experts", reads={"decoder_sparse_step": 1, "mlp_only_layers": [1]}),
    "qwen3_moe": Loader("qwen3_moe", "num_experts", reads={"decoder_sparse_step": 1, "norm_topk_prob": True}),
    "olmoe": Loader("olmoe", "num_experts", width="intermediate_size"),
    "deepseek_v2-grouped": Loader(
        "deepseek_v2", "n_routed_experts", reads={"topk_method": "group_limited_greedy", "moe_layer_freq": 1}
    ),
    "deepseek_v3-grouped": DEEPSEEK,
    "glm4_moe": replace(DEEPSEEK, files="glm4_moe", reads={"first_k_dense_replace": 1}),
    "minimax_m2": Loader(
        "minimax_m2",
        "num_local_experts",
        "block_sparse_moe",
        NUMBERED,
        "intermediate_size",
        bias="e_score_correction_bias",
        reads={"use_routing_bias": True, "scoring_func": "sigmoid", "rotary_dim": 4},
        zero={"num_mtp_modules": 3},
    ),
    "gpt_oss": Loader(
        "gpt_oss",
        "num_local_experts",
        parts={
            "gate_up_proj": (HIDDEN, 2 * WIDTH),
            "gate_up_proj_bias": (2 * WIDTH,),
            "down_proj": (WIDTH, HIDDEN),
            "down_proj_bias": (HIDDEN,),
        },
        width="intermediate_size",
        router="router",
        bias="router.bias",
        fused=True,
        reads={"experts_per_token": 1},  # published configs have k under both names
    ),
}


def check_settings(settings: Mapping[str, Any], loader: Loader, count: int, active: int) -> None:
    assert (settings[loader.experts], settings["num_experts_per_tok"]) == (count, active)
    assert settings[loader.width] == WIDTH
    assert {name: settings.get(name) for name in loader.reads} == dict(loader.reads)
    assert {name: settings.get(name) for name in loader.zero} == dict.fromkeys(loader.zero, 0)
    # Experts are viewed as [groups, experts / groups], and a token chooses within `topk_group` of the groups.
    groups = settings.get("n_group") or 1
    assert count % groups == 0 and (settings.get("topk_group") or 1) * count // groups >= active
    everywhere = {"num_experts", "n_routed_experts", "num_local_experts"} & settings.keys()
    assert {settings[name] for name in everywhere} == {count}, "a server could read any of these"


def check_tensors(shapes: Mapping[str, tuple[int, ...]], loader: Loader, layers: tuple[int, ...], count: int) -> None:
    found = {re.sub(r"\.experts\..*", "", name) for name in shapes if ".experts." in name}
    assert found == {f"model.layers.{layer}.{loader.block}" for layer in layers}
    for block in found:
        assert shapes[f"{block}.{loader.router}.weight"] == (count, HIDDEN)
        if loader.bias is not None:
            assert shapes[f"{block}.{loader.bias}"] == (count,)
        experts = {name: shape for name, shape in shapes.items() if name.startswith(f"{block}.experts.")}
        prefix = f"{block}.experts."
        if loader.fused:
            assert experts == {f"{prefix}{part}": (count, *shape) for part, shape in loader.parts.items()}
        else:
            assert experts == {
                f"{prefix}{expert}.{part}.weight": shape
                for expert in range(count)
                for part, shape in loader.parts.items()
            }


@pytest.mark.parametrize("family", LOADERS)
def test_names_and_shapes_are_those_that_loaders_read(family: str, model_config: Configs, tmp_path: Path) -> None:
    loader, made = LOADERS[family], model_config(family)
    config = replace(made, path=str(shutil.copytree(made.path, tmp_path / "made")))
    file = Path(config.path) / "config.json"
    published = {name: 2 if name == "experts_per_token" else value for name, value in loader.reads.items()}
    settings = json.loads(file.read_text()) | published | loader.zero
    settings.setdefault(loader.experts, settings.get("num_local_experts"))  # which is how transformers names Qwen3's
    file.write_text(json.dumps(settings))
    facts = describe_model(config)
    edit = edit_of_kind(len(facts.moe_layers), facts.experts, "prune", 4, 1, "logits")
    write_source(config, edit, tmp_path / "source")
    forms = ["source"]
    if family in ("mixtral", "deepseek_v3-grouped", "minimax_m2", "gpt_oss"):
        forms.append(export_model(config, edit, tmp_path / "stock", CARD).form)
    for form in forms:
        settings = json.loads((tmp_path / form / "config.json").read_text())
        check_settings(settings, loader, 4, 1)
        tensors = load_file(tmp_path / form / "model.safetensors")
        check_tensors({name: tuple(each.shape) for name, each in tensors.items()}, loader, facts.moe_layers, 4)
