"""How the demo MoE's accuracy falls when experts are taken away, by task and by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch.nn.functional import linear
from transformers import MixtralForCausalLM, PreTrainedTokenizerFast

from demo.scoring import accuracy_table, majority_class, mean_and_spread

Kept = Mapping[int, Sequence[int]]
"""Experts kept, by layer; layers not named keep all."""


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
    logits = linear(states, gate.weight)
    values, positions = logits.float().softmax(-1)[:, kept].topk(min(gate.top_k, len(kept)), dim=-1)
    return logits, values / values.sum(-1, keepdim=True), kept[positions]


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
        report[f"random_{count}_of_{experts}"] = mean_and_spread(tables)
    one_layer = {}
    for layer in layers:
        tables = []
        for _ in range(draws // 2):
            with pruned(model, random_kept(rng, [layer], experts, experts // 2)):
                tables.append(accuracy_table(model, tokenizer, "dev", limit))
        one_layer[str(layer)] = {task: value["mean"] for task, value in mean_and_spread(tables).items()}
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
