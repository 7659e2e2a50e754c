"""What config.json says of a model's experts is what transformers makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from families import COMMON, DENSE, VARIANTS
from transformers import AutoConfig

from moevolve.kernels.routing_rule import RoutingGroups
from moevolve.workers.checkpoints.stated import StatedModel, stated_model
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.methods.eep.export import width_obstacle
from moevolve.workers.model.describe import describe_config, meta_model

# By how they name the number of experts, limit the choice of experts, and give shared ones a width.
TOLD = ("deepseek_v3-grouped", "gpt_oss", "nemotron_h", "qwen2_moe", "qwen3_moe")


def write_config(folder: Path, variant: str) -> ModelConfig:
    own = DENSE[variant] if variant in DENSE else VARIANTS[variant].settings
    AutoConfig.for_model(variant.split("-", maxsplit=1)[0], dtype="float32", **{**COMMON, **own}).save_pretrained(
        folder
    )
    return ModelConfig(str(folder), device="cpu")


@pytest.mark.parametrize("variant", TOLD)
def test_experts_groups_and_width_are_those_of_the_model(variant: str, tmp_path: Path) -> None:
    config = write_config(tmp_path, variant)
    model = meta_model(config)
    facts, stated = describe_config(model, config), stated_model(config)
    assert stated is not None
    assert (stated.experts, stated.active, stated.groups) == (facts.experts, facts.active, facts.rule.groups)
    assert stated.shares_width == facts.width_linked == (width_obstacle(model) is not None)


def test_a_dense_model_has_no_experts(tmp_path: Path) -> None:
    assert stated_model(write_config(tmp_path, "llama")) == StatedModel("llama")


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"model_type": "unheard_of"}, None),
        ({"num_local_experts": "many"}, None),
        ({"model_type": "wrapper", "text_config": {"model_type": "unheard_of"}}, None),
        ({"quantization_config": None}, StatedModel("mixtral", 6, 2)),
        ({"quantization_config": {}}, StatedModel("mixtral", 6, 2, RoutingGroups(), quantised=True, own_form=True)),
    ],
)
def test_what_the_file_does_not_say_is_left_to_transformers(
    changes: dict[str, Any], found: StatedModel | None, tmp_path: Path
) -> None:
    config = write_config(tmp_path, "mixtral")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    assert stated_model(config) == found
    file.write_text("[]")
    assert stated_model(config) is None
