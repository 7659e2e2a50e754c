"""What a plan says of a batch against what lives at once in layers of real width, and what is refused of a plan."""

from __future__ import annotations

from collections.abc import Iterator
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
from moevolve.search.running.plan.counts import TokenCounts
from moevolve.search.running.plan.memory import launch_memory
from moevolve.workers.contract import capacity
from moevolve.workers.contract.capacity import NeededMemory, NoRoomError, check_room
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.engine.forward import Forward
from moevolve.workers.profiling.outline import ModelOutline, outline_model

CPU = torch.device("cpu")


@pytest.fixture
def faked() -> Iterator[None]:
    """Tensors of any size that hold nothing, so that nothing can depend on what they hold."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def model_of(name: str, folder: Path) -> tuple[Any, ModelOutline]:
    """A model of a published config, of two layers, the second of which is a mixture."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(find_model(name))
    config.num_hidden_layers = 2
    for attribute in ("layer_types", "mlp_layer_types"):
        if getattr(config, attribute, None) is not None:
            setattr(config, attribute, getattr(config, attribute)[-2:])
    if getattr(config, "first_k_dense_replace", None):
        config.first_k_dense_replace = 1
    config.save_pretrained(folder)
    outline = outline_model(ModelConfig(str(folder), dtype="bfloat16"))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.eval().requires_grad_(False), outline


MANY, LONG = (300, 50), (1000, 2)
"""Tokens and number of prompts."""


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("mixtral-8x7b", MANY),
        ("qwen1.5-moe-a2.7b", MANY),
        ("qwen3-30b-a3b", LONG),
        ("glm-4.5-air", MANY),
        ("deepseek-v3", LONG),
        ("llama-3-8b", MANY),
    ],
)
def test_a_layers_activations_are_what_lives_at_once(
    name: str, sizes: tuple[int, int], tmp_path: Path, faked: None
) -> None:
    model, outline = model_of(name, tmp_path)
    prompt, rows = sizes
    assert measured(model, prompt, rows) == pytest.approx(rows * prompt * outline.layer_bytes, rel=0.1)


@torch.inference_mode()
def measured(model: Any, prompt: int, rows: int) -> int:
    """Peak of a pass over prompts of which only the last state is read."""
    forward = Forward(model, rows * prompt)
    prompts = [(10 + row,) * prompt for row in range(rows)]
    (batch,) = forward.batcher.batches(tuple((each,) for each in prompts))
    with LiveBytes() as live:
        forward.hidden_states(batch.columns, np.array([batch.path(each)[-1] for each in prompts]))
    return live.peak


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
    return launch_memory(config, outline, costs, TokenCounts())


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


HOST: dict[str, Any] = {"model": {"expert_offload": "host"}}
LARGE: dict[str, Any] = {"engine": {"batch_tokens": 131072}}


@pytest.mark.parametrize(
    ("changes", "device", "host", "words"),
    [
        # 93.4 GB of weights and 45.1 of merged experts.
        ({}, 80, 256, ["cuda:0 has 80 GB", "layer's 90.2 GB", "it fits with --set model.expert_offload=host"]),
        ({}, 80, 64, ["it fits with --set model.expert_offload=disk"]),
        (HOST, 80, 64, ["the host has 64 GB", "layer's 103 GB"]),
        (HOST | LARGE, 24, 256, ["it fits with --set engine.batch_tokens=1024"]),
        (HOST, 2, 256, ["none of its settings makes it fit"]),
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
    sized(60, 60)
    with pytest.raises(NoRoomError, match=r"this machine has 60 GB free.*model.expert_offload=disk"):
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
