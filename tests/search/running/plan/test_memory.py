"""What a plan says of memory against what lives at once where models of real width run, and what is refused of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from live_bytes import LiveBytes
from torch._subclasses.fake_tensor import FakeTensorMode

from moevolve.search.config.files import find_model
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.registry import costs_of
from moevolve.search.running.plan.memory import _activations, _cached, launch_memory
from moevolve.workers.contract import capacity
from moevolve.workers.contract.capacity import NeededMemory, NoRoomError, check_room
from moevolve.workers.contract.settings import LARGE_BLOCK, ModelConfig
from moevolve.workers.engine.forward import Forward
from moevolve.workers.profiling.outline import ModelOutline, outline_model
from moevolve.workers.profiling.passes import Pass, SplitTokens, passes_of

CPU = torch.device("cpu")


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors of any size that hold nothing, so that nothing can depend on what they hold."""
    monkeypatch.setattr(Forward, "logits", Forward._run)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def model_of(name: str, folder: Path) -> tuple[Any, ModelOutline]:
    """A model of a published config, of two layers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(find_model(name))
    config.num_hidden_layers = 2
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:2]
    config.save_pretrained(folder)
    outline = outline_model(ModelConfig(str(folder), dtype="bfloat16"))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.eval().requires_grad_(False), outline


@torch.inference_mode()
def measured(model: Any, prompt: int, rows: int, read: int) -> tuple[int, int]:
    """Peaks of a pass over prompts, and of a step behind it."""
    forward = Forward(model, rows * prompt)
    forward._steps = None  # GPUs take no steps in blocks
    prompts = [(10 + row,) * prompt for row in range(rows)]
    (batch,) = forward.batcher.batches(tuple((each,) for each in prompts))
    paths = [batch.path(each) for each in prompts]
    column = torch.zeros(rows, 1, dtype=torch.int64)
    mask = torch.ones(rows, prompt + 1, dtype=torch.int64)
    with LiveBytes() as meter:
        cache = forward.new_cache()
        logits = forward.logits(batch.columns, np.concatenate([path[-read:] for path in paths]), cache)
        first = meter.peak
        del logits
        meter.peak = 0
        forward.step(column, mask, column + prompt, forward.rows_of(cache, np.stack(paths)))
    return first, meter.peak


MANY, LONG, READ = (300, 50, 1), (1000, 2, 1), (40, 100, 30)
"""Large batches, long prompts, and many positions whose logits are read: tokens and number of prompts, positions."""


@pytest.mark.parametrize(
    ("name", "sizes"), [("mixtral-8x7b", MANY), ("qwen1.5-moe-a2.7b", READ), ("qwen3-30b-a3b", LONG)]
)
def test_activations_and_caches_are_what_lives_at_once(
    name: str, sizes: tuple[int, int, int], tmp_path: Path, faked: None
) -> None:
    model, outline = model_of(name, tmp_path)
    prompt, rows, read = sizes
    first, second = measured(model, prompt, rows, read)
    split = SplitTokens.of_lengths("generate", (prompt - read + 1,) * rows, (read - 1,) * rows, (), 2)
    found = passes_of(split, rows * prompt, outline.layout)
    (sure,), (step,) = found.required, found.decoding
    assert first == pytest.approx(_cached(outline, sure) + _activations(outline, [sure], on_gpu=True), rel=0.1)
    # Rows of one length need no mask, so keys and values aren't repeated.
    unmasked = replace(outline, repeated_bytes=0)
    assert second == pytest.approx(_cached(outline, step) + _activations(unmasked, [step], on_gpu=True), rel=0.1)


def test_on_a_cpu_large_logits_come_on_top_of_what_layers_freed(tmp_path: Path, faked: None) -> None:
    _, outline = model_of("llama-3-8b", tmp_path)
    small, large = Pass(512, None, 0, False, 0, 512), Pass(16384, None, 0, False, 0, 512)
    layers = 512 * (outline.attention_bytes + outline.network_bytes)
    freed = _activations(outline, [small], on_gpu=False) - layers
    logits = _activations(outline, [small], on_gpu=True) - 512 * 2 * outline.hidden * outline.facts.dtype_bytes
    assert freed == logits > LARGE_BLOCK
    # Tensors of so many tokens go back to the system at once.
    assert _activations(outline, [large], on_gpu=False) == _activations(outline, [large], on_gpu=True)


def needed(name: str, dtype: str = "bfloat16", device: str = "cuda", **changes: Any) -> NeededMemory:
    data: dict[str, Any] = {
        "name": "lab",
        "model": {"path": find_model(name), "dtype": dtype, "device": device},
        "tasks": [{"name": "boolq"}],
        "genome": {"experts": 4, "groups": 1},
        "phases": [{"kind": "prune", "evaluations": 40}, {"kind": "merge", "evaluations": 10}],
        "workers": {"count": 1, "num_gpus": 1},
    }
    for key, value in changes.items():
        data[key] = data.get(key, {}) | value if isinstance(value, dict) else value
    config = RunConfig.model_validate(data)
    outline = outline_model(config.model)
    costs = costs_of(config.space(outline.facts), outline)
    return launch_memory(config, outline, costs)


class Card:
    """A GPU as `check_room` asks for it."""

    type, index = "cuda", 0

    def __str__(self) -> str:
        return "cuda:0"


@pytest.fixture
def sized(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what there is, in GB: of the device, and of the host."""

    def have(device: float, host: float) -> Any:
        monkeypatch.setattr(capacity, "free_bytes", lambda device_: int(device * 1e9))
        monkeypatch.setattr(capacity, "available_host_bytes", lambda: int(host * 1e9))
        return Card()

    return have


@pytest.mark.parametrize(
    ("changes", "device", "host", "words"),
    [
        # 93.4 GB of weights and 45.1 of merged experts.
        ({}, 80, 256, ["cuda:0 has 80 GB", "original experts 90.2 GB", "it fits with --set model.expert_offload=host"]),
        ({}, 80, 64, ["workers.num_gpus=2 --set model.device_map=balanced"]),
        ({"model": {"expert_offload": "host"}}, 80, 64, ["the host has 64 GB", "original experts 103 GB"]),
        ({"model": {"expert_offload": "host"}, "engine": {"batch_tokens": 131072}}, 24, 256, ["engine.batch_tokens="]),
        ({"model": {"expert_offload": "host"}}, 2, 256, ["none of its settings makes it fit"]),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(
    changes: dict[str, Any], device: float, host: float, words: list[str], sized: Any
) -> None:
    with pytest.raises(NoRoomError) as refused:
        check_room(needed("mixtral-8x7b", **changes), sized(device, host))
    message = str(refused.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_cpu_has_one_memory(sized: Any) -> None:
    found = needed("qwen1.5-moe-a2.7b", genome={"experts": 30}, dtype="float32", device="cpu")
    sized(1000, 60)
    with pytest.raises(NoRoomError, match=r"this machine has 60 GB free.*model.dtype=bfloat16"):
        check_room(found, CPU)
    sized(1000, 200)
    check_room(found, CPU)


def test_limits_of_a_container_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    (tmp_path / "memory.stat").write_text("anon 600000\ninactive_file 300000\nactive_file 100000\n")
    assert capacity.available_host_bytes() == 2400000
    (tmp_path / "memory.max").write_text("max\n")
    assert capacity.available_host_bytes() > 3000000
    monkeypatch.setenv(capacity.CAPACITY, "0.002")
    assert capacity.free_bytes(CPU) == 2000000
