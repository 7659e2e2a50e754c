"""How a demo MoE's accuracy falls when experts are taken away, by task and by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from demo.scoring import accuracy_table, mean_and_spread

Kept = Mapping[int, Sequence[int]]
"""Experts kept, by layer; layers not named keep all."""


@contextmanager
def pruned(model: PreTrainedModel, kept: Kept) -> Iterator[None]:
    """Route among the kept experts only: scores of all experts, top-k of the kept ones, renormalised."""
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
    logits = linear(states.float(), gate.weight.float())
    bias = getattr(gate, "e_score_correction_bias", None)
    scores = (logits.softmax(-1) if bias is None else logits.sigmoid())[:, kept]
    positions = (scores if bias is None else scores + bias[kept]).topk(min(gate.top_k, len(kept)), dim=-1).indices
    values = scores.gather(1, positions)
    return logits, values / values.sum(-1, keepdim=True), kept[positions]


def random_kept(rng: np.random.Generator, layers: Sequence[int], experts: int, count: int) -> dict[int, list[int]]:
    """``count`` random experts of each layer."""
    return {layer: sorted(rng.permutation(experts)[:count].tolist()) for layer in layers}


def knockout_report(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, draws: int = 10, rows: int = 300, seed: int = 0
) -> dict[str, object]:
    """Accuracies of the model with experts taken away, means and standard deviations over draws, by task.

    ``random_n_of_N``: every layer keeps n random experts; ``one_layer_random_n``: only one layer does, by layer.
    Measured on the first ``rows`` of test, on which ``accuracy_<rows>`` is that of the full model.
    """
    rng = np.random.default_rng([seed, 3])
    layers, experts = range(model.config.num_hidden_layers), model.config.num_local_experts

    def random(chosen: Sequence[int], count: int) -> dict[str, dict[str, float]]:
        tables = []
        for _ in range(draws):
            with pruned(model, random_kept(rng, chosen, experts, count)):
                tables.append(accuracy_table(model, tokenizer, "test", rows))
        return mean_and_spread(tables)

    return {
        f"accuracy_{rows}": accuracy_table(model, tokenizer, "test", rows),
        **{f"random_{count}_of_{experts}": random(layers, count) for count in (experts // 2, experts // 4)},
        f"one_layer_random_{experts // 4}": {str(layer): random([layer], experts // 4) for layer in layers},
    }
