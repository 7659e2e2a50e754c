"""Layout and facts of families of every kind of router, and what can't be loaded of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from family_samples import SAMPLES, representatives
from safetensors.torch import load_file
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.loading import load_model
from moevolve.workers.checkpoints.text_models import SAME_ON_TEXT
from moevolve.workers.contract.facts import active_parameters, parameters_after
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.families.layers import find_moe_layers
from moevolve.workers.families.registry import FAMILIES, NOT_DESCRIBED
from moevolve.workers.model.describe import describe_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

Configs = Callable[..., ModelConfig]
MakeModel = Callable[..., "PreTrainedModel"]


@pytest.mark.parametrize(
    "variant", representatives(("mixtral", "qwen2_moe", "deepseek_v3-grouped", "gpt_oss"), SAMPLES)
)
def test_layout_and_facts(variant: str, model_config: Configs) -> None:
    sample, facts = SAMPLES[variant], describe_model(model_config(variant))
    model, _ = load_model(model_config(variant))
    layers = find_moe_layers(model, variant)
    assert facts.family == sample.model_type
    assert facts.moe_layers == tuple(layer.index for layer in layers) == sample.moe_layers
    assert (facts.experts, facts.active, facts.dtype_bytes) == (sample.experts, 2, 4)
    assert (facts.renormalise, facts.rule.one_hot_folds) == (sample.rescales, sample.folds)
    assert all(layer.rule == facts.rule for layer in layers)
    assert (facts.expert_parameters, facts.router_parameters_per_expert) == (
        sample.expert_parameters,
        sample.router_parameters,
    )
    stored, depth = sum(p.numel() for p in model.parameters()), len(layers)
    assert facts.parameters == parameters_after(facts, sample.experts) == stored
    dropped = sample.experts - 4
    each = sample.expert_parameters + sample.router_parameters
    assert parameters_after(facts, 4) == stored - dropped * depth * each
    assert active_parameters(facts, 4, 2) == parameters_after(facts, 4) - depth * 2 * sample.expert_parameters


def test_every_mixture_of_transformers_is_supported_or_named() -> None:
    """Multimodal models whose text model is of a family count as supported, and those that see images aren't language
    models."""
    import transformers

    sources = (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")
    mixtures = {
        path.parent.name for path in sources if re.search(r"^class \w*(Experts|MoE)\(", path.read_text(), re.MULTILINE)
    }
    known = {*NOT_DESCRIBED, *(transformers.CONFIG_MAPPING[name].__module__.split(".")[-2] for name in FAMILIES)}
    known |= {name.removesuffix("_text") for name in SAME_ON_TEXT}
    assert len(mixtures) > 40 and mixtures - known <= {"vitpose_backbone"}


def _change(directory: Path, **settings: Any) -> ModelConfig:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return ModelConfig(str(directory), device="cpu")


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, directory: Path) -> dict[str, Tensor]:
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def test_a_way_of_choosing_that_transformers_lacks_is_refused(
    tiny_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    _save(tiny_model("deepseek_v2"), tiny_tokenizer, tmp_path)
    with pytest.raises(UserError, match="deepseek_v2 model with topk_method 'noaux_tc'"):
        describe_model(_change(tmp_path, topk_method="noaux_tc"))
    with pytest.raises(UserError, match="num_experts_per_tok"):
        describe_model(_change(tmp_path, topk_method="greedy", num_experts_per_tok=None))
