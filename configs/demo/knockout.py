"""How the demo model's accuracy falls when experts are taken away, by task and by layer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import MixtralForCausalLM, PreTrainedTokenizerFast

from moevolve.evaluators.demo import TASKS, render

DATA = Path(__file__).parent / "data"
Kept = Mapping[int, Sequence[int]]
"""Experts kept, by layer; layers not named keep all."""


def read_split(task: str, split: str, limit: int | None = None) -> list[tuple[str, str]]:
    """Prompt and answer of the first ``limit`` rows of a task split."""
    lines = (DATA / task / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()[:limit]
    rows = [json.loads(line) for line in lines]
    return [(render(task, row), row["answer"]) for row in rows]


@contextmanager
def pruned(model: MixtralForCausalLM, kept: Kept) -> Iterator[None]:
    """Route among the kept experts only: softmax over all experts, top-k of the kept ones, renormalised."""
    gates = {index: model.model.layers[index].mlp.gate for index in kept}
    try:
        for index, gate in gates.items():
            gate.forward = partial(_route, gate, torch.tensor(sorted(kept[index])))
        yield
    finally:
        for gate in gates.values():
            del gate.forward


def _route(gate: torch.nn.Module, kept: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    states = states.reshape(-1, gate.hidden_dim)
    logits = F.linear(states, gate.weight)
    values, positions = logits.float().softmax(-1)[:, kept].topk(min(gate.top_k, len(kept)), dim=-1)
    return logits, values / values.sum(-1, keepdim=True), kept[positions]


@torch.no_grad()
def exact_matches(
    model: MixtralForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Sequence[tuple[str, str]], batch: int = 250
) -> float:
    """Share of rows whose answer and ``<eos>`` greedy decoding gives.

    One teacher-forced pass decides it: greedy decoding writes the answer exactly if every answer token is the arg max
    after the ones before it.
    """
    model.eval()
    right = 0
    for start in range(0, len(rows), batch):
        ids, is_answer = _encode(tokenizer, rows[start : start + batch])
        states = model.model(input_ids=ids, attention_mask=(ids != tokenizer.pad_token_id).long(), use_cache=False)
        where = is_answer[:, 1:]
        wrong = model.lm_head(states.last_hidden_state[:, :-1][where]).argmax(-1) != ids[:, 1:][where]
        missed = torch.zeros(len(ids)).index_add_(0, where.nonzero()[:, 0], wrong.float())
        right += int((missed == 0).sum())
    return right / len(rows)


def _encode(tokenizer: PreTrainedTokenizerFast, rows: Sequence[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids of prompt, answer and ``<eos>``, and where the latter two are."""
    prompts = tokenizer([prompt for prompt, _ in rows])["input_ids"]
    answers = tokenizer([" " + answer for _, answer in rows], add_special_tokens=False)["input_ids"]
    length = max(len(p) + len(a) + 1 for p, a in zip(prompts, answers, strict=True))
    ids = torch.full((len(rows), length), tokenizer.pad_token_id)
    is_answer = torch.zeros(ids.shape, dtype=torch.bool)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer) + 1
        ids[i, :end] = torch.tensor([*prompt, *answer, tokenizer.eos_token_id])
        is_answer[i, len(prompt) : end] = True
    return ids, is_answer


def accuracy_table(
    model: MixtralForCausalLM, tokenizer: PreTrainedTokenizerFast, split: str, limit: int | None = None
) -> dict[str, float]:
    """Accuracy by task."""
    return {task: round(exact_matches(model, tokenizer, read_split(task, split, limit)), 4) for task in TASKS}


def majority_class(split: str) -> dict[str, float]:
    """Share of the most frequent answer by task."""
    table = {}
    for task in TASKS:
        answers = Counter(answer for _, answer in read_split(task, split))
        table[task] = round(max(answers.values()) / sum(answers.values()), 4)
    return table


def random_kept(rng: np.random.Generator, layers: Sequence[int], experts: int, count: int) -> dict[int, list[int]]:
    """``count`` random experts of each layer."""
    return {layer: sorted(rng.permutation(experts)[:count].tolist()) for layer in layers}


def knockout_report(
    model: MixtralForCausalLM, tokenizer: PreTrainedTokenizerFast, draws: int = 10, limit: int = 100, seed: int = 0
) -> dict[str, object]:
    """Accuracies of the full model and of the model with experts taken away.

    ``random_*``: every layer keeps that many random experts, mean over ``draws`` (first 300 test rows).
    ``one_layer_random_4``: only one layer keeps 4 of 8, mean over ``draws`` (first ``limit`` dev rows).
    ``single_expert``: one expert of one layer is dropped (first ``limit`` dev rows), mean over the tasks.
    """
    rng = np.random.default_rng([seed, 3])
    layers, experts = range(model.config.num_hidden_layers), model.config.num_local_experts
    report: dict[str, object] = {
        "accuracy": {split: accuracy_table(model, tokenizer, split) for split in ("dev", "test")},
        "majority": majority_class("test"),
    }
    for count in (6, 4, 2):
        tables = []
        for _ in range(draws):
            with pruned(model, random_kept(rng, layers, experts, count)):
                tables.append(accuracy_table(model, tokenizer, "test", limit=300))
        report[f"random_{count}_of_{experts}"] = _mean_and_spread(tables)
    one_layer = {}
    for layer in layers:
        tables = []
        for _ in range(draws // 2):
            with pruned(model, random_kept(rng, [layer], experts, experts // 2)):
                tables.append(accuracy_table(model, tokenizer, "dev", limit))
        one_layer[str(layer)] = {task: value["mean"] for task, value in _mean_and_spread(tables).items()}
    report["one_layer_random_4"] = one_layer
    report["single_expert"] = {
        str(layer): [_without(model, tokenizer, layer, expert, limit) for expert in range(experts)] for layer in layers
    }
    return report


def _without(
    model: MixtralForCausalLM, tokenizer: PreTrainedTokenizerFast, layer: int, expert: int, limit: int
) -> dict[str, float]:
    kept = [other for other in range(model.config.num_local_experts) if other != expert]
    with pruned(model, {layer: kept}):
        return accuracy_table(model, tokenizer, "dev", limit)


def _mean_and_spread(tables: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    return {
        task: {
            "mean": round(float(np.mean([table[task] for table in tables])), 4),
            "std": round(float(np.std([table[task] for table in tables])), 4),
        }
        for task in TASKS
    }
