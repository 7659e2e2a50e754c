"""A checkpoint is what its files say, or it is refused in one line, in every mode of loading."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands_here import run_command
from fuzzed_folders import CHANGES, outcome, write_model
from safetensors.torch import load_file, save_file
from tiny_models import word_tokenizer
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import Example, Matching, PreparedSplit
from moevolve.workers.checkpoints.loading import check_weights, load_model, load_tokenizer
from moevolve.workers.contract.settings import EngineConfig, ModelConfig
from moevolve.workers.engine.engine import GenerationEngine
from moevolve.workers.model.describe import describe_model
from moevolve.workers.model.resident import ResidentModel

Checkpoints = Callable[[str], Path]
Tensors = dict[str, Tensor]
LAYER = "model.layers.1."


def edited(folder: Path, change: Callable[[Tensors], object], **settings: Any) -> ModelConfig:
    """Change the tensors of a checkpoint of one file, and settings of its config."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: each.clone() for name, each in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    content = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(content))
    return ModelConfig(str(folder), device="cpu")


def prefixed(tensors: Tensors) -> None:
    for name in list(tensors):
        tensors[f"module.{name}"] = tensors.pop(name)


def renamed(tensors: Tensors) -> None:
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name.replace("down_proj", "w2")] = tensors.pop(name)


FAULTS: dict[str, tuple[str, Callable[[Tensors], object], dict[str, Any]]] = {
    "a router is missing": (
        rf"tensor {LAYER}mlp.gate.weight isn't in the files.* fetch or convert it again",
        lambda tensors: tensors.pop(f"{LAYER}mlp.gate.weight"),
        {},
    ),
    "a prefix": (r"names begin with 'module\.'.* save them again without it", prefixed, {}),
    "names of another program": (
        r"experts.0.down_proj.weight isn't in the files, and they have \S+experts.0.w2.weight, which a qwen3_moe",
        renamed,
        {},
    ),
    "an expert is missing": (
        rf"tensor {LAYER}mlp.experts.3.up_proj.weight is missing from the files, and config.json says 6 experts",
        lambda tensors: tensors.pop(f"{LAYER}mlp.experts.3.up_proj.weight"),
        {},
    ),
    "more experts than the config says": (
        r"experts.4.down_proj.weight is in the files, and config.json says 4 experts",
        lambda tensors: None,
        {"num_local_experts": 4},
    ),
    "fewer layers than the files": (
        r"tensor model.layers.2.\S+ is in the files, and a qwen3_moe model with this config.json has no such parameter",
        lambda tensors: None,
        {"num_hidden_layers": 2},
    ),
    "more layers than all tensors": (
        "its config says 100,000 layers, and its files have 84 tensors",
        lambda tensors: None,
        {"num_hidden_layers": 100_000},
    ),
    "a bias that the config doesn't say": (
        rf"tensor {LAYER}self_attn.q_proj.bias is in the files",
        lambda tensors: tensors.update({f"{LAYER}self_attn.q_proj.bias": torch.ones(32)}),
        {},
    ),
    "a name that isn't read twice": (
        r"tensors layers.1.mlp.gate.weight and model.layers.1.mlp.gate.weight are both",
        lambda tensors: tensors.update({"layers.1.mlp.gate.weight": tensors[f"{LAYER}mlp.gate.weight"] + 1}),
        {},
    ),
    "a width": (
        r"tensor model.layers.0.mlp.experts.0.down_proj.weight has shape \[32, 24\], and by config.json all experts",
        lambda tensors: None,
        {"moe_intermediate_size": 20},
    ),
    "a head beside the embedding": (
        r"lm_head.weight is model.embed_tokens.weight \(tie_word_embeddings\), and the files have two different ones",
        lambda tensors: None,
        {"tie_word_embeddings": True},
    ),
    "no head": (
        "tensor lm_head.weight isn't in the files.* set tie_word_embeddings: true",
        lambda tensors: tensors.pop("lm_head.weight"),
        {},
    ),
}


def test_a_wrong_number_of_experts_costs_no_memory(checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "model")
    check_weights(ModelConfig(str(folder), device="cpu"))
    config = edited(folder, lambda tensors: None, num_local_experts=10**6)
    tracemalloc.start()
    with pytest.raises(UserError, match=r"experts.6.\S+ is missing from the files, and config.json says 1000000"):
        check_weights(config)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6, "of numbers up to a million, 60 MB"


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named_in_every_mode(fault: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    message, change, settings = FAULTS[fault]
    config = edited(shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "model"), change, **settings)
    attempts = (
        check_weights,
        describe_model,
        load_model,
        lambda it: ResidentModel.load(replace(it, expert_offload="disk")),
    )
    for attempt in attempts:
        with pytest.raises(UserError, match=message):
            attempt(config)


def test_what_a_model_does_not_have_may_be_there(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Layers for multi-token prediction, other modules, scales of caches, buffers of old versions, and a tied head."""
    extras = {
        "model.layers.3.eh_proj.weight": torch.ones(32, 64),
        "model.layers.3.input_layernorm.weight": torch.ones(32),
        "mtp.norm.weight": torch.ones(32),
        "vision_tower.patch.weight": torch.ones(2),
        f"{LAYER}self_attn.rotary_emb.inv_freq": torch.ones(4),
        f"{LAYER}self_attn.k_proj.k_scale": torch.ones(1),
    }

    def change(tensors: Tensors) -> None:
        tensors |= extras
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    folder = shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "model")
    model, _ = load_model(edited(folder, change, tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_adapters_are_not_loaded_with_their_base(checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "model")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(UserError, match=r"adapter_config.json: .*`merge_and_unload`"):
        load_model(ModelConfig(str(folder)))


def test_settings_of_the_config_that_cannot_be(checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "model")
    config = edited(folder, lambda tensors: None, num_experts_per_tok=9)
    with pytest.raises(UserError, match="num_experts_per_tok is 9, but a layer has 6 experts"):
        describe_model(config)
    config = edited(folder, lambda tensors: None, num_experts_per_tok=2, torch_dtype="auto", dtype="auto")
    with pytest.raises(UserError, match=r"its config can't be read: .*'auto'"):
        describe_model(config)
    # The search's own setting counts.
    config = edited(folder, lambda tensors: None, dtype="float32", _attn_implementation="flash_attention_2")
    assert describe_model(config).experts == 6
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 1.5]}')
    with pytest.raises(UserError, match=r"generation_config.json: eos_token_id is \[2, 1.5\], where the id of a token"):
        load_model(config)


def test_tokenizers_that_do_not_belong_to_the_model(checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "model")
    word_tokenizer([f"w{i}" for i in range(4, 97)]).save_pretrained(folder)
    config, tokenizer = ModelConfig(str(folder)), json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 97, "content": "<|turn|>"})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    load_tokenizer(config)  # no text has it
    engine = GenerationEngine(*load_model(config), EngineConfig())
    rows = (Example("w5", ("w6",)), Example("w5 <|turn|>", ("w6",)))
    split = PreparedSplit("task", "search", "agreement", "mean", Matching(), 1, " ", rows, "answer")
    with pytest.raises(UserError, match=r"task task, split search: a text has the token '<\|turn\|>' of id 97"):
        engine.tokens_of(split)
    (folder / "chat_template.jinja").write_text("<|turn|>{{ messages[0].content }}")
    with pytest.raises(UserError, match=r"token '<\|turn\|>' of id 97, and the model has embeddings for ids below 97"):
        load_tokenizer(config)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"version": "3"}))
    with pytest.raises(UserError, match=r"its tokenizer can't be read: .*\(traceback: "):
        load_tokenizer(config)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"its tokenizer can't be read: .*\(traceback: "):
        load_tokenizer(config)


def test_the_command_line_ends_with_one_line(checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "model")
    edited(folder, prefixed)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "w{i}", "answer": "w5"}}\n' for i in range(70)))
    end = run_command(
        tmp_path, "shrink", "model", "--data", "rows.jsonl", "--experts", "50%", "-o", "small", "--dry-run"
    )
    assert end.returncode == 2 and end.stdout == ""
    *steps, error = end.stderr.splitlines()
    assert all(step.startswith("shrink: ") for step in steps) and "names begin with 'module.'" in error


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzzed") / "model"
    write_model(folder)
    return folder


@pytest.mark.parametrize("case", range(2 * len(CHANGES)))
def test_damaged_folders_are_refused_or_computed_as_their_files_say(
    case: int, small_model: Path, tmp_path: Path
) -> None:
    assert outcome(small_model, tmp_path / "model", case)
