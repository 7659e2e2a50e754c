"""Layout and facts of DeepSeek-V2 and -V3, GLM-4-MoE and GPT-OSS, and loading of their quantised checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from family_samples import SAMPLES, make_family_edit
from safetensors.torch import load_file, save_file
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.loading import load_model
from moevolve.workers.checkpoints.text_models import SAME_ON_TEXT
from moevolve.workers.contract.card import ExportCard, ExportReport
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.facts import active_parameters, parameters_after
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export.export import export_model
from moevolve.workers.families.layers import find_moe_layers
from moevolve.workers.families.registry import FAMILIES, NOT_DESCRIBED
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.model.describe import describe_model
from moevolve.workers.model.resident import ResidentModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

Configs = Callable[..., ModelConfig]
MakeModel = Callable[..., "PreTrainedModel"]

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@pytest.mark.parametrize("variant", list(SAMPLES))
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
    known = {*FAMILIES, *NOT_DESCRIBED, *(name.removesuffix("_text") for name in (*FAMILIES, *SAME_ON_TEXT))}
    assert len(mixtures) > 40 and mixtures - known <= {"vitpose_backbone"}


def test_routing_rules_and_notes(model_config: Configs) -> None:
    v3, v2 = describe_model(model_config("deepseek_v3-grouped")), describe_model(model_config("deepseek_v2-grouped"))
    assert (v3.rule.groups.count, v3.rule.groups.chosen, v3.rule.groups.best, v3.rule.scale) == (2, 1, 2, 2.5)
    assert (v2.rule.groups.count, v2.rule.groups.chosen, v2.rule.groups.best, v2.rule.scale) == (4, 2, 1, 1.5)
    assert describe_model(model_config("deepseek_v3-unscaled")).rule.groups.count == 1
    assert describe_model(model_config("deepseek_v2")).rule.groups.count == 1
    assert v3.notes == (
        "experts are scored by sigmoids and chosen with a correction bias",
        "a token chooses from 1 of 2 groups of experts: every group keeps as many",
        "1 of 3 layers are dense",
        "a shared expert beside the routed ones stays, and repairs fit its output projection",
    )
    assert describe_model(model_config("gpt_oss")).notes == ("the top-k is taken of the logits, before the softmax",)


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


def _exported_alike(resident: ResidentModel, edit: EepEdit, directory: Path) -> ExportReport:
    """Export, and compare the logits of plain `transformers` with the edited model's."""
    from transformers import AutoModelForCausalLM

    report = export_model(resident, edit, directory, ExportCard("t", "b", "f", "s", "1", "s:1", (), ()))
    assert "quantization_config" not in json.loads((directory / "config.json").read_text())
    ids = torch.arange(4, 24)[None]
    loaded = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    assert loaded.dtype == resident.model.dtype
    with torch.no_grad(), resident.edited(edit):
        expected = resident.model(ids).logits
        torch.testing.assert_close(
            loaded(ids).logits, expected, rtol=0, atol=1e-5 if expected.dtype.itemsize > 2 else 0.05
        )
    return report


def _pack_mxfp4(weight: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Random blocks [n, out, in / 32, 16] and scales [n, out, in / 32] for a weight [n, in, out], and their values."""
    count, inputs, outputs = weight.shape
    codes = torch.randint(0, 16, (count, outputs, inputs // 32, 32), generator=generator)
    scales = torch.randint(123, 127, (count, outputs, inputs // 32), generator=generator)
    values = torch.tensor(FP4)[codes] * torch.exp2(scales[..., None].float() - 127)
    blocks = (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8)
    return blocks, scales.to(torch.uint8), values.reshape(count, outputs, inputs).transpose(1, 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_mxfp4_checkpoints_are_unpacked_searched_and_exported(
    dtype: str, tiny_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    state = _save(tiny_model("gpt_oss", intermediate_size=32), tiny_tokenizer, tmp_path / "packed")
    generator, expected = torch.Generator().manual_seed(5), {}
    for name in [name for name in state if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales, expected[name] = _pack_mxfp4(state.pop(name), generator)
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(state, tmp_path / "packed" / "model.safetensors", metadata={"format": "pt"})
    packed = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    config = _change(tmp_path / "packed", quantization_config=packed, experts_per_token=2)
    facts = describe_model(config)
    assert facts.notes[-1] == "unpacked from mxfp4 while it loads"
    resident = ResidentModel.load(ModelConfig(config.path, device="cpu", dtype=dtype))  # type: ignore[arg-type]
    assert len(expected) == 6
    for name, values in expected.items():
        assert torch.equal(resident.model.state_dict()[name].float(), values)
    assert sum(parameter.numel() for parameter in resident.model.parameters()) == facts.parameters
    edit = make_family_edit("gpt_oss", "prune", active=1)
    report = _exported_alike(resident, edit, tmp_path / "out")
    assert (report.form, report.parameters) == ("stock", parameters_after(facts, 4))
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in settings
    assert settings["num_experts_per_tok"] == settings["experts_per_token"] == 1
    assert isinstance(resident.applied, IdentityEdit)


def test_fp8_checkpoints_are_unpacked(
    tiny_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """As DeepSeek-V3 is published: float8 weights of linear layers and experts, and a scale per block."""
    model = tiny_model("deepseek_v3", q_lora_rank=8)
    state = _save(model, tiny_tokenizer, tmp_path)
    expected = {}
    for name in [name for name in state if name.endswith(("proj.weight", "_mqa.weight"))]:
        narrow = state[name].to(torch.float8_e4m3fn)
        scales = torch.rand((narrow.shape[0] // 4, narrow.shape[1] // 4), generator=torch.Generator().manual_seed(1))
        state |= {name: narrow, f"{name}_scale_inv": scales}
        expected[name] = narrow.float() * scales.repeat_interleave(4, 0).repeat_interleave(4, 1)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    packed = {"quant_method": "fp8", "weight_block_size": [4, 4], "activation_scheme": "dynamic", "fmt": "e4m3"}
    config = replace(_change(tmp_path, quantization_config=packed), dtype="float32")
    resident = ResidentModel.load(config)
    found = resident.model.state_dict()
    attention = "model.layers.1.self_attn.o_proj.weight"
    torch.testing.assert_close(found[attention], expected[attention])
    down = torch.stack([expected[f"model.layers.2.mlp.experts.{i}.down_proj.weight"] for i in range(6)])
    torch.testing.assert_close(found["model.layers.2.mlp.experts.down_proj"], down)
    edit = make_family_edit("deepseek_v3", "prune")
    assert _exported_alike(resident, edit, tmp_path / "out").form == "stock"
    assert not list((tmp_path / "out").glob("*.py"))
    assert not hasattr(resident.model.config, "quantization_config")


def test_other_packed_weights_are_refused(
    tiny_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    _save(tiny_model("gpt_oss"), tiny_tokenizer, tmp_path)
    config = _change(tmp_path, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    refusal = r"packed as 'bitsandbytes'.* bfloat16 checkpoint, or one packed as fp8, mxfp4, "
    for attempt in (describe_model, ResidentModel.load):
        with pytest.raises(UserError, match=refusal):
            attempt(config)


def test_experts_that_came_packed_are_named(tiny_model: MakeModel) -> None:
    model = tiny_model("gpt_oss")
    model.model.layers[1].mlp.experts = torch.nn.Module()
    with pytest.raises(UserError, match="model m: the experts of layer 1 are packed"):
        find_moe_layers(model, "m")


def test_attention_without_sdpa_runs_eager(model_config: Configs) -> None:
    assert load_model(model_config("gpt_oss"))[0].config._attn_implementation == "eager"
    assert load_model(model_config("deepseek_v3"))[0].config._attn_implementation == "sdpa"
