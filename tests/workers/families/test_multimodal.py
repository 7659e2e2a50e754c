"""Multimodal checkpoints: their text models are pruned where they are, and everything else is kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from edit_checks import CARD, assert_close, logits, write_source
from families import COMMON, DENSE_WRAPPERS, WRAPPERS, edit_of_kind, randomise, representatives, sample_rows
from safetensors.torch import load_file, save_file
from tiny_models import word_tokenizer
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export.export import export_model
from moevolve.workers.export.folder import loader_of
from moevolve.workers.families.registry import only_inside
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings
from moevolve.workers.model.resident import ResidentModel


def wrapped(model_type: str) -> Any:
    """A tiny random model of a multimodal class."""
    from transformers import AutoConfig, AutoModelForImageTextToText, Qwen3OmniMoeForConditionalGeneration

    row = (WRAPPERS | DENSE_WRAPPERS)[model_type]
    text = {"text_config": COMMON | row["text"], "vision_config": row["vision"]}
    parts: dict[str, Any] = text | {"tie_word_embeddings": False} | row.get("more", {})
    kind: Any = AutoModelForImageTextToText
    if model_type == "muse_spark":
        sizes = {"hidden_sizes": (8,) * 4, "depths": (1,) * 4, "patch_sizes": (2,) * 4, "out_hidden_size": 32}
        parts |= {"audio_config": sizes, "out_hidden_size": 64, "projector_hidden_size": 16}
    if model_type == "qwen3_omni_moe":
        sound = {"d_model": 16, "encoder_layers": 1, "encoder_ffn_dim": 16, "encoder_attention_heads": 2}
        thinker = text | {"audio_config": sound | {"output_dim": 32}}
        parts, kind = {"thinker_config": thinker, "enable_audio_output": False}, Qwen3OmniMoeForConditionalGeneration
    with torch.random.fork_rng():
        torch.manual_seed(7)
        config = AutoConfig.for_model(model_type, **parts)
        model = kind.from_config(config) if kind is AutoModelForImageTextToText else kind(config)
        for name, tensor in model.state_dict().items():
            randomise(name, tensor)
    return model.eval()


@pytest.mark.parametrize("model_type", representatives(("gemma3",), DENSE_WRAPPERS))
def test_the_text_model_of_a_dense_one_is_its_familys(model_type: str, tokens: Tensor, tmp_path: Path) -> None:
    whole = wrapped(model_type)
    whole.save_pretrained(tmp_path)
    word_tokenizer(["one", "two", "a"]).save_pretrained(tmp_path)  # Qwen's class takes the letter
    resident = ResidentModel.load(ModelConfig(str(tmp_path), device="cpu"))
    assert resident.dense_layers
    with torch.no_grad():
        assert_close(logits(resident, IdentityEdit(), tokens), whole(tokens).logits)


@pytest.mark.parametrize(
    "model_type", representatives((name for name, row in WRAPPERS.items() if "shows" in row), WRAPPERS)
)
def test_of_a_multimodal_checkpoint_the_text_model_is_pruned(model_type: str, tokens: Tensor, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    whole = wrapped(model_type)
    whole.save_pretrained(tmp_path / "whole")
    if model_type == "kimi_k25":  # `transformers` loads the published names, and writes others
        file = tmp_path / "whole" / "model.safetensors"
        published = {name.replace("model.blocks.", "model.layers."): each for name, each in load_file(file).items()}
        save_file(published, file, metadata={"format": "pt"})
    word_tokenizer(["one", "two", "a"]).save_pretrained(tmp_path / "whole")  # Qwen's class takes the letter
    source = ModelConfig(str(tmp_path / "whole"), device="cpu")
    resident = ResidentModel.load(source)
    edit = edit_of_kind(len(resident.layers), 6, "prune")

    def seen(model: Any) -> Tensor:
        # The whole Llama-4 of transformers 5.24 looks for results of images where there are none.
        part = {"qwen3_omni_moe": "thinker", "llama4": "language_model"}.get(model_type, "")
        with torch.no_grad():
            found: Tensor = getattr(model, part, model)(tokens).logits
        return found

    assert_close(logits(resident, IdentityEdit(), tokens), seen(whole))
    pruned_logits = logits(resident, edit, tokens)
    alone = resident.model.config.model_type
    if only_inside(alone):  # `transformers` has no class for the text model alone
        with pytest.raises(UserError, match=f"no class for {alone} models alone; export the individual as source"):
            export_model(resident, edit, tmp_path / "stock", CARD)
    published = WRAPPERS[model_type].get("published")
    if published is not None:  # a tensor in files whose names `transformers` knows for the multimodal class only
        assert published in load_file(tmp_path / "whole" / "model.safetensors")
        # Its merged experts are found under these names, too, which are gone again for text models alone.
        merged = edit_of_kind(len(resident.layers), 6, "mixed", space="logits")
        write_source(source, merged, tmp_path / "merged", requantise=True)
        expected = logits(resident, merged, tokens)
        assert_close(seen(type(whole).from_pretrained(tmp_path / "merged").eval()), expected)
    if model_type == "minimax_m3_vl":
        export_model(resident, edit, tmp_path / "stock", CARD)
        assert_close(seen(AutoModelForCausalLM.from_pretrained(tmp_path / "stock").eval()), pruned_logits)
    if model_type == "qwen3_vl_moe" or published is not None:  # the first stores transposed experts
        assert_close(logits(ResidentModel.load(replace(source, expert_offload="disk")), edit, tokens), pruned_logits)
    write_source(source, edit, tmp_path / "pruned")
    settings = json.loads((tmp_path / "pruned" / "config.json").read_text())
    assert settings["model_type"] == model_type
    text = settings.get("thinker_config", settings)["text_config"]
    # `transformers` writes Qwen's number of experts under another name than published configs have.
    assert text.get(WRAPPERS[model_type]["field"], text.get("num_local_experts")) == 4
    assert not text.get("mtp_num_hidden_layers")
    assert loader_of(tmp_path / "pruned") == type(whole).__name__
    pruned = type(whole).from_pretrained(tmp_path / "pruned").eval()
    assert_close(seen(pruned), pruned_logits)
    before = {name: each for name, each in whole.state_dict().items() if "vis" in name}
    after = pruned.state_dict()
    assert before and all(torch.equal(each, after[name]) for name, each in before.items())
    if model_type == "qwen3_omni_moe":
        assert export_model(resident, edit, tmp_path / "stock", CARD).form == "stock"
        assert_close(seen(AutoModelForCausalLM.from_pretrained(tmp_path / "stock").eval()), pruned_logits)


def test_step_as_published_alone_and_in_fp8(tmp_path: Path, tokens: Tensor) -> None:
    """Step-3.5's files have the names of Step-3.7's text model, with an expert's scales [n, blocks, blocks]."""
    whole = wrapped("step3p7")
    whole.save_pretrained(tmp_path / "whole")
    state = load_file(tmp_path / "whole" / "model.safetensors")
    state = {name: each for name, each in state.items() if name.startswith(("model.", "lm_head."))}
    plain, packed, numbers = dict(state), dict(state), torch.Generator().manual_seed(5)
    for name, tensor in state.items():
        if ".moe." in name and tensor.ndim == 3:
            scales = torch.rand((6, tensor.shape[1] // 8, tensor.shape[2] // 8), generator=numbers) + 0.5
            packed |= {name: tensor.to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}
            spread = scales.repeat_interleave(8, dim=1).repeat_interleave(8, dim=2)
            plain[name] = packed[name].float() * spread
    # Behind the last layer is one for multi-token prediction, and lists of the config count it.
    for tensors in (plain, packed):
        more = {name.replace("s.2.", "s.3."): each.clone() for name, each in tensors.items() if "layers.2." in name}
        tensors.update(more)
    text = whole.config.text_config.to_dict()
    text |= {"moe_num_experts": text["n_routed_experts"], "num_nextn_predict_layers": 1}
    for name in ("layer_types", "mlp_layer_types", "swiglu_limits"):
        text[name] = [*text[name], text[name][-1]]
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]}}
    for folder, tensors, more in ((tmp_path / "plain", plain, {}), (tmp_path / "packed", packed, fp8)):
        word_tokenizer(["one", "two"]).save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(text | more))
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    sources = [ModelConfig(str(tmp_path / name), device="cpu", dtype="float32") for name in ("plain", "packed")]
    edit = edit_of_kind(2, 6, "prune")
    expected, found = (logits(ResidentModel.load(source), edit, tokens) for source in sources)
    assert_close(found, expected)
    assert_close(logits(ResidentModel.load(replace(sources[1], expert_offload="disk")), edit, tokens), expected)
    write_source(sources[1], edit, tmp_path / "pruned")
    settings = json.loads((tmp_path / "pruned" / "config.json").read_text())
    assert settings["n_routed_experts"] == settings["moe_num_experts"] == 4
    assert settings["num_nextn_predict_layers"] == 0 and len(settings["swiglu_limits"]) == 3
    written, kept = load_file(tmp_path / "pruned" / "model.safetensors"), edit.expert_merging.argmax(axis=2)
    for part in ("gate_proj.weight", "up_proj.weight_scale_inv", "router_bias"):
        name = f"model.layers.2.moe.{part}"
        assert torch.equal(written[name].float(), packed[name].float()[kept[1]])
    pruned = ResidentModel.load(replace(sources[1], path=str(tmp_path / "pruned")))
    assert_close(logits(pruned, IdentityEdit(), tokens), found)
    repaired = RepairedEdit(edit, RepairSettings((0.1,)), sample_rows())
    write_source(sources[1], repaired, tmp_path / "repaired", requantise=True)
    after = ResidentModel.load(replace(sources[1], path=str(tmp_path / "repaired")))
    assert_close(
        logits(after, IdentityEdit(), tokens), logits(ResidentModel.load(sources[1]), repaired, tokens), tolerance=0.1
    )
