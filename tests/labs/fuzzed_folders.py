"""Checkpoints that are damaged in one place, as outsiders' files are, and a reading of them from the equations.

A case is a small Qwen3-MoE of which a seeded change drops, renames, doubles, truncates, retypes, swaps or perturbs a
file, a tensor, or a field of a JSON file. It is either refused in one line, or computes what `plain_logits` does.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.loading import load_model
from moevolve.workers.contract.settings import EngineConfig, ModelConfig
from moevolve.workers.engine.tokenizing import end_tokens
from moevolve.workers.model.describe import describe_model
from moevolve.workers.model.resident import ResidentModel

WORDS = [f"w{i}" for i in range(4, 40)]
TOKENS = torch.tensor([[5, 9, 30, 7, 12]])
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.float8_e4m3fn)
VALUES: tuple[Any, ...] = (None, -1, 0, 1, 2, 3, 7, 0.5, 1e9, "2", "auto", True, False, [], {}, [1], {"a": 1})


def write_model(folder: Path) -> None:
    """Write a model of two layers with six experts, into two files with an index."""
    settings = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "intermediate_size": 20}
    more = {"num_hidden_layers": 2, "head_dim": 8, "norm_topk_prob": True, "tie_word_embeddings": False}
    save_tiny_model(folder, "qwen3_moe", WORDS, 3, **settings, **more)
    tensors = load_file(folder / SINGLE)
    names = sorted(tensors)
    (folder / SINGLE).unlink()
    _save(folder, {f"model-{i + 1:05}-of-00002.safetensors": names[i::2] for i in range(2)}, tensors)


def _save(folder: Path, files: dict[str, list[str]], tensors: dict[str, Tensor]) -> None:
    for file, names in files.items():
        save_file({name: tensors[name].contiguous() for name in names}, folder / file, {"format": "pt"})
    places = {name: file for file, names in files.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


def _pick(rng: Generator, items: Any) -> Any:
    items = list(items)
    return items[int(rng.integers(len(items)))]


def _edit_json(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def _edit_tensor(folder: Path, rng: Generator, change: Callable[[dict[str, Tensor], str], object]) -> None:
    """Change the tensors of one file, and the index with them, as a program that saves a checkpoint does."""
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    file = _pick(rng, sorted(set(index.values())))
    tensors = load_file(folder / file)
    change(tensors, _pick(rng, sorted(tensors)))
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / file, {"format": "pt"})
    places = {name: where for name, where in index.items() if where != file} | dict.fromkeys(tensors, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


def drop_tensor(folder: Path, rng: Generator) -> None:
    _edit_tensor(folder, rng, lambda tensors, name: tensors.pop(name))


def rename_tensor(folder: Path, rng: Generator) -> None:
    form = _pick(rng, ("module.{}", "_orig_mod.{}", "{}_", "base_model.model.{}", "{}.weight", "transformer.{}"))
    _edit_tensor(folder, rng, lambda tensors, name: tensors.update({form.format(name): tensors.pop(name)}))


def rename_all(folder: Path, rng: Generator) -> None:
    prefix = _pick(rng, ("module.", "_orig_mod.", "language_model.", "model.", "base_model.model.", ""))
    files: dict[str, list[str]] = {}
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        named = {prefix + (name if prefix else name.removeprefix("model.")): t for name, t in load_file(file).items()}
        tensors |= named
        files[file.name] = sorted(named)
    _save(folder, files, tensors)


def double_tensor(folder: Path, rng: Generator) -> None:
    """The same parameter twice under names that are both read, or once more under one that isn't."""
    form = _pick(rng, ("model.{}", "{}.copy", "extra.{}", "{}"))

    def change(tensors: dict[str, Tensor], name: str) -> None:
        copied = form.format(name.removeprefix("model."))
        tensors[copied] = tensors[name] + 1

    _edit_tensor(folder, rng, change)


def stale_tensor(folder: Path, rng: Generator) -> None:
    """A tensor in two files, which the index gives to one."""
    first, second = sorted(folder.glob("*.safetensors"))
    tensors = load_file(first)
    name = _pick(rng, sorted(load_file(second)))
    save_file(tensors | {name: load_file(second)[name] + 1}, first, {"format": "pt"})


def single_beside(folder: Path, rng: Generator) -> None:
    tensors = {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}
    save_file({name: each + 1 for name, each in tensors.items()}, folder / SINGLE, {"format": "pt"})
    if rng.random() < 0.3:
        (folder / INDEX).unlink()


def retype_tensor(folder: Path, rng: Generator) -> None:
    dtype = _pick(rng, DTYPES)
    _edit_tensor(folder, rng, lambda tensors, name: tensors.update({name: tensors[name].to(dtype)}))


def reshape_tensor(folder: Path, rng: Generator) -> None:
    change = _pick(
        rng,
        (lambda t: t.movedim(0, -1), lambda t: t[:-1], lambda t: t[..., :-1], lambda t: t[None], lambda t: t.ravel()),
    )
    _edit_tensor(folder, rng, lambda tensors, name: tensors.update({name: change(tensors[name]).clone()}))


def spoil_numbers(folder: Path, rng: Generator) -> None:
    def change(tensors: dict[str, Tensor], name: str) -> None:
        tensors[name].view(-1)[int(rng.integers(tensors[name].numel()))] = _pick(rng, (math.nan, math.inf, -math.inf))

    _edit_tensor(folder, rng, change)


def swap_tensors(folder: Path, rng: Generator) -> None:
    def change(tensors: dict[str, Tensor], name: str) -> None:
        other = _pick(rng, sorted(tensors))
        tensors[name], tensors[other] = tensors[other].clone(), tensors[name].clone()

    _edit_tensor(folder, rng, change)


def tie_head(folder: Path, rng: Generator) -> None:
    _edit_json(folder / "config.json", lambda config: config.update(tie_word_embeddings=True))
    if rng.random() < 0.5:
        index = json.loads((folder / INDEX).read_text())["weight_map"]
        _edit_head(folder, index["lm_head.weight"], index["model.embed_tokens.weight"])


def _edit_head(folder: Path, head: str, embedding: str) -> None:
    tensors = load_file(folder / head)
    tensors["lm_head.weight"] = load_file(folder / embedding)["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / head, {"format": "pt"})


def change_file(folder: Path, rng: Generator) -> None:
    """Remove, truncate, empty or perturb any file, or swap the two files with weights."""
    file = _pick(rng, sorted(folder.iterdir()))
    content = file.read_bytes()
    match int(rng.integers(5)):
        case 0:
            file.unlink()
        case 1:
            file.write_bytes(content[: int(rng.integers(len(content)))])
        case 2:
            file.write_bytes(b"")
        case 3:
            place = int(rng.integers(min(len(content), 2000)))
            file.write_bytes(content[:place] + bytes([int(rng.integers(256))]) + content[place + 1 :])
        case _:
            first, second = sorted(folder.glob("*.safetensors"))
            first.rename(folder / "swapped")
            second.rename(first)
            (folder / "swapped").rename(second)


def add_file(folder: Path, rng: Generator) -> None:
    name = _pick(rng, ("adapter_config.json", "model.safetensors.bak", "README.md", "adapter_model.safetensors", INDEX))
    (folder / name).write_text(_pick(rng, ("{}", "", '{"peft_type": "LORA"}', '{"weight_map": {}}')))


def change_field(file: str) -> Callable[[Path, Generator], None]:
    """A change of one field of a JSON file."""

    def change(folder: Path, rng: Generator) -> None:
        def edit(content: dict[str, Any]) -> None:
            inner = content
            key = _pick(rng, sorted(inner))
            while isinstance(inner[key], dict) and inner[key] and rng.random() < 0.7:
                inner = inner[key]
                key = _pick(rng, sorted(inner))
            if rng.random() < 0.2:
                del inner[key]
            elif isinstance(inner[key], int | float) and not isinstance(inner[key], bool) and rng.random() < 0.5:
                inner[key] = inner[key] * _pick(rng, (2, 0.5)) if rng.random() < 0.5 else inner[key] + 1
            else:
                inner[key] = _pick(rng, VALUES)

        _edit_json(folder / file, edit)

    return change


CHANGES: tuple[Callable[[Path, Generator], None], ...] = (
    drop_tensor,
    rename_tensor,
    rename_all,
    double_tensor,
    stale_tensor,
    single_beside,
    retype_tensor,
    reshape_tensor,
    spoil_numbers,
    swap_tensors,
    tie_head,
    change_file,
    add_file,
    *(change_field(name) for name in ("config.json", "config.json", "tokenizer.json", "tokenizer_config.json")),
    change_field("generation_config.json"),
)


def outcome(source: Path, folder: Path, case: int) -> str:
    """Damage a copy of the model in the way of a case, and load it; returns the line that refuses it, or `right`.

    Raises:
        AssertionError: It computes something else than its files say, or is refused in more than a line.
    """
    shutil.copytree(source, folder)
    rng = np.random.default_rng(case)
    CHANGES[case % len(CHANGES)](folder, rng)
    config = ModelConfig(
        str(folder), device="cpu", expert_offload="disk" if rng.random() < 0.3 else "device", dtype="float32"
    )
    try:
        describe_model(config)
        found = _logits(config)
    except UserError as error:
        line = str(error)
        if "\n" in line or str(folder) not in line:
            raise AssertionError(f"not a line that names the file: {line}") from error
        return line
    expected = plain_logits(folder)
    assert torch.allclose(found, expected, atol=1e-4, equal_nan=True), (found - expected).abs().max()
    return "right"


def _logits(config: ModelConfig) -> Tensor:
    if config.expert_offload == "disk":
        resident = ResidentModel.load(config)
        model, tokenizer = resident.model, resident.tokenizer
    else:
        model, tokenizer = load_model(config)
    end_tokens(model, tokenizer, EngineConfig())
    assert tokenizer("w5 w9")["input_ids"]
    with torch.no_grad():
        return model(TOKENS).logits[0]


def plain_logits(folder: Path) -> Tensor:
    """Logits [tokens, vocabulary] of `TOKENS`, from the equations of Qwen3-MoE, config.json and the safetensors files.

    Source: Qwen3 technical report (arXiv 2505.09388), and RoPE (arXiv 2104.09864).
    """
    config = json.loads((folder / "config.json").read_text())
    tensors = _plain_tensors(folder)
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    angles = torch.arange(TOKENS.shape[1])[:, None] * theta ** (-torch.arange(0, size, 2) / size)
    turns = torch.cat([angles, angles], -1)[:, None]

    def norm(values: Tensor, name: str) -> Tensor:
        scale = (values.pow(2).mean(-1, keepdim=True) + config.get("rms_norm_eps", 1e-6)).rsqrt()
        return values * scale * tensors[f"{name}.weight"]

    def turned(values: Tensor) -> Tensor:
        half = torch.cat([-values[..., size // 2 :], values[..., : size // 2]], -1)
        return values * turns.cos() + half * turns.sin()

    def linear(values: Tensor, name: str) -> Tensor:
        return values @ tensors[f"{name}.weight"].T

    hidden = tensors["model.embed_tokens.weight"][TOKENS[0]]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        values = norm(hidden, f"{name}.input_layernorm")
        attention = f"{name}.self_attn"
        query, key, value = (
            linear(values, f"{attention}.{each}_proj").unflatten(-1, (count, size))
            for each, count in (("q", heads), ("k", groups), ("v", groups))
        )
        query, key = turned(norm(query, f"{attention}.q_norm")), turned(norm(key, f"{attention}.k_norm"))
        key, value = (each.repeat_interleave(heads // groups, 1) for each in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(size)
        scores += torch.full(scores.shape[1:], -math.inf).triu(1)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)
        hidden = hidden + linear(mixed, f"{attention}.o_proj")
        values = norm(hidden, f"{name}.post_attention_layernorm")
        hidden = hidden + _mixture(values, f"{name}.mlp", config, linear)
    head = "model.embed_tokens" if config.get("tie_word_embeddings", False) else "lm_head"
    return linear(norm(hidden, "model.norm"), head)


def _mixture(values: Tensor, name: str, config: dict[str, Any], linear: Callable[[Tensor, str], Tensor]) -> Tensor:
    weights, chosen = linear(values, f"{name}.gate").softmax(-1).topk(config.get("num_experts_per_tok", 8))
    if config.get("norm_topk_prob", False):
        weights = weights / weights.sum(-1, keepdim=True)
    result = torch.zeros_like(values)
    for token, (shares, experts) in enumerate(zip(weights, chosen.tolist(), strict=True)):
        for share, expert in zip(shares, experts, strict=True):
            part, one = f"{name}.experts.{expert}", values[token]
            gated = torch.nn.functional.silu(linear(one, f"{part}.gate_proj")) * linear(one, f"{part}.up_proj")
            result[token] += share * linear(gated, f"{part}.down_proj")
    return result


def _plain_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder whose files leave no doubt; others raise an `AssertionError`."""
    files = [folder / SINGLE]
    if (folder / INDEX).is_file():
        places = json.loads((folder / INDEX).read_text())["weight_map"]
        files = [folder / name for name in sorted(set(places.values()))]
        assert not (folder / SINGLE).is_file() or folder / SINGLE in files
    found: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it isn't a dict
                assert name not in found
                found[name] = opened.get_tensor(name).float()
    return _without_prefix(found)


def _without_prefix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names as published; `language_model.` stands in front of those of a multimodal checkpoint's text model."""
    named = {name.removeprefix("language_model."): tensor for name, tensor in tensors.items()}
    return {
        name if name.startswith(("model.", "lm_head.")) else f"model.{name}": tensor for name, tensor in named.items()
    }
