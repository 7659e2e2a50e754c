"""What a plan says of a worker against what lives at once in one: resident and layer by layer, repaired or not."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live_bytes import LiveBytes
from second_device import second_device
from tiny_models import save_tiny_model

from moevolve.evaluators.types import PreparedSplit
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.registry import costs_of
from moevolve.search.running.plan.counts import TokenCounts
from moevolve.search.running.plan.memory import worker_memory
from moevolve.workers.contract.fitting import FitRows
from moevolve.workers.contract.messages import EvaluationRequest
from moevolve.workers.contract.settings import Device, ExpertOffload
from moevolve.workers.methods.repair.edit import RepairedEdit
from moevolve.workers.profiling.outline import outline_model
from moevolve.workers.profiling.prompts import PromptMeter
from moevolve.workers.worker import EvaluationWorker

WORDS = [f"w{i}" for i in range(996)]
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_experts": 8,
    "num_experts_per_tok": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
}
FITTED, ROW = 2048, 128
"""Tokens of calibration rows, all and of each."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model wide enough that small tensors don't count, and a task that compares with it."""
    made = tmp_path_factory.mktemp("wide")
    save_tiny_model(made, "olmoe", WORDS, seed=1, dtype="float32", **SIZES)
    rng = np.random.default_rng(0)
    rows = [{"text": " ".join(rng.choice(WORDS, 100))} for _ in range(20)]
    (made / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = ["source: {files: {all: words.jsonl}}", "splits: {search: {from: all}, calibration: {from: all}}"]
    (made / "words.yaml").write_text("\n".join([*lines, 'prompt: "{{ text }}"', "fitness: agreement"]))
    return made


def run_of(folder: Path, repair: dict[str, Any] | None) -> RunConfig:
    """A run on a GPU, by which alone the plan tells what takes turns from what stays."""
    phase: dict[str, Any] = {"kind": "prune", "evaluations": 2, "initial": 2}
    if repair is not None:
        phase["repair"] = {"tokens": FITTED, "ridge_lambdas": [0.01]} | repair
    data = {
        "name": "metered",
        "model": {"path": str(folder), "dtype": "float32", "device": "cuda"},
        "tasks": [{"name": str(folder / "words.yaml")}],
        "genome": {"experts": 4, "groups": "per_layer"},
        "phases": [phase],
        "engine": {"batch_tokens": 1024, "threads": 1},
        "workers": {"count": 1, "num_gpus": 1},
    }
    return RunConfig.model_validate(data)


def metered(config: RunConfig, place: ExpertOffload, split: PreparedSplit) -> int:
    """Most bytes that live at once while a worker scores two candidates, beside the model that it loaded.

    Where weights wait elsewhere, the worker has a second device, to which they are copied.
    """
    plain = run_of(Path(config.model.path), None)
    space, rng = plain.space(outline_model(config.model).facts), np.random.default_rng(1)
    ids = rng.integers(4, len(WORDS), FITTED).astype(np.int32)
    lengths = np.full(FITTED // ROW, ROW, dtype=np.int32)
    settings = config.phases[0].repair
    with nullcontext() if place == "device" else second_device():
        device: Device = "cpu" if place == "device" else "cuda"
        worker = EvaluationWorker(replace(config.model, device=device, expert_offload=place), config.engine)
        with LiveBytes() as live:
            for _ in range(2):
                edit: Any = space.sample(rng, plain.phases[0]).genome.express()
                edit = edit if settings is None else RepairedEdit(edit, settings, FitRows(ids, lengths, lengths))
                reply = worker.evaluate(EvaluationRequest(edit, (split.ref,)), (split,))
                assert reply.failure is None
    return live.peak


@pytest.mark.parametrize(
    ("place", "repair", "least"),
    [
        # On a CPU experts run on few tokens at once; the plan counts a batch's as on a GPU.
        ("disk", None, 0.55),
        ("device", {"neurons": True}, 0.9),
        ("disk", {"input_rounds": 1}, 0.9),
    ],
)
def test_a_worker_takes_what_its_plan_says(
    folder: Path, place: ExpertOffload, repair: dict[str, Any] | None, least: float
) -> None:
    config = run_of(folder, repair)
    split = config.tasks[0].prepared("search")
    outline, counts = outline_model(config.model), PromptMeter(config.model, config.engine).counts(split)
    costs = costs_of(config.space(outline.facts), outline)
    memory = worker_memory(config, outline, costs, TokenCounts(counts.longest, counts.tokens, FITTED), place)
    loaded = outline.weight_bytes - (0 if place == "device" else outline.experts_bytes)
    ratio = metered(config, place, split) / (memory.device + memory.host - loaded)
    assert least <= ratio <= 1.1
