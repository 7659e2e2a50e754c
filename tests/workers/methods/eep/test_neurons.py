"""Neurons of kept experts: the choice among all experts' neurons, against plain loops, and the copying of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from edit_checks import Residents, digest, logits
from families import edit_of_kind
from repair_samples import rows_of, sequences_of
from torch import Tensor

from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.methods.eep.neurons import ExpertNeurons, choose_neurons
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings
from moevolve.workers.model.resident import ResidentModel

EXPERTS, RETAINED, WIDTH, HIDDEN, TOKENS = 6, 3, 24, 32, 70
FAMILIES = ("mixtral", "gpt_oss")
UNSEEN = torch.tensor(sequences_of([30] * 4, seed=9))
WHOLE = RepairSettings((0.1,))


def neurons_of(model: ResidentModel, ordinal: int = 1) -> ExpertNeurons:
    return ExpertNeurons(model.layers[ordinal].experts, model.original_experts(ordinal))


def routed(generator: torch.Generator, experts: int) -> tuple[Tensor, Tensor]:
    """Two experts for every token; some weights are negative, as mappings may make them."""
    chosen = torch.rand(TOKENS, experts, generator=generator).topk(2).indices
    return torch.randn(TOKENS, 2, generator=generator), chosen


def activation(module: Any, tensors: Any, expert: int, neuron: int, state: Any) -> tuple[float, Any]:
    """One neuron on one hidden state, and its output weights, from the families' equations in float64."""
    gate_up, down = tensors["gate_up_proj"][expert].double().numpy(), tensors["down_proj"][expert].double().numpy()
    if "gate_up_proj_bias" not in tensors:
        gate, up = gate_up[neuron] @ state, gate_up[WIDTH + neuron] @ state
        return gate / (1 + np.exp(-gate)) * up, down[:, neuron]
    bias = tensors["gate_up_proj_bias"][expert].double().numpy()
    gate, up = (state @ gate_up[:, 2 * neuron + odd] + bias[2 * neuron + odd] for odd in (0, 1))
    gate, up = min(gate, module.limit), np.clip(up, -module.limit, module.limit)
    return gate / (1 + np.exp(-module.alpha * gate)) * (up + 1), down[neuron]


def importance_by_hand(neurons: ExpertNeurons, hidden: Tensor, original: Any, edited: Any) -> Any:
    """Importance of every neuron for every kept expert, summed token by token: [n', n x I]."""
    importance = np.zeros((RETAINED, EXPERTS * WIDTH))
    for token in range(TOKENS):
        state = hidden[token].double().numpy()
        routing = zip(edited[1][token].tolist(), edited[0][token].tolist(), strict=True)
        sent = [(kept, abs(weight)) for kept, weight in routing]
        for expert, weight in zip(original[1][token].tolist(), original[0][token].tolist(), strict=True):
            for neuron in range(WIDTH):
                value, down = activation(neurons.module, neurons.tensors, expert, neuron, state)
                used = (value * weight) ** 2 * (down**2).sum()
                for kept, share in sent:
                    importance[kept, expert * WIDTH + neuron] += share * used
    return importance


def best_by_hand(importance: Any, width: int = WIDTH) -> Any:
    """The neurons of each kept expert, [n', I]; of equal ones the first."""
    taken: list[list[int]] = [[] for _ in importance]
    for kept, neuron in sorted(np.ndindex(*importance.shape), key=lambda pair: (-importance[pair], pair)):
        if len(taken[kept]) < width and not any(neuron in each for each in taken):
            taken[kept].append(neuron)
    return [sorted(each) for each in taken]


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_neurons_are_chosen_by_their_importance_for_a_kept_experts_tokens(family: str, resident: Residents) -> None:
    neurons, generator = neurons_of(resident(family)), torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    original, edited = routed(generator, EXPERTS), routed(generator, RETAINED)
    with torch.inference_mode():
        found = choose_neurons(neurons, hidden, original, edited, RETAINED, WIDTH)
        # A few neurons at a time.
        narrow = choose_neurons(neurons, hidden, original, edited, RETAINED, 7)
    importance = importance_by_hand(neurons, hidden, original, edited)
    assert found.tolist() == best_by_hand(importance)
    assert narrow.tolist() == best_by_hand(importance, 7)
    assert len(set(found.flatten().tolist())) == RETAINED * WIDTH


def test_a_kept_expert_without_tokens_takes_the_first_neurons_and_as_many_as_the_others(resident: Residents) -> None:
    neurons, generator = neurons_of(resident("mixtral")), torch.Generator().manual_seed(3)
    hidden, original = torch.randn(TOKENS, HIDDEN, generator=generator), routed(generator, EXPERTS)
    edited = torch.ones(TOKENS, 1), torch.zeros(TOKENS, 1, dtype=torch.int64)
    with torch.inference_mode():
        found = choose_neurons(neurons, hidden, original, edited, 2, WIDTH)
    first, second = (each.tolist() for each in found)
    others = (neuron for neuron in range(EXPERTS * WIDTH) if neuron not in first)
    assert len(first) == WIDTH and second == list(islice(others, WIDTH))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("width", [7, 40])
def test_exactly_the_named_neurons_are_moved(width: int, family: str, resident: Residents) -> None:
    source = neurons_of(resident(family))
    rng = np.random.default_rng(2)
    ids = np.stack([np.sort(rng.permutation(EXPERTS * WIDTH)[:width]) for _ in range(RETAINED)])
    tensors = {name: torch.full(shape, 7.0) for name, shape in source.shapes(RETAINED, width).items()}
    before = {name: tensor.clone() for name, tensor in source.tensors.items()}
    ExpertNeurons(source.module, tensors).copy_from(source, torch.from_numpy(ids))
    assert all(torch.equal(tensor, before[name]) for name, tensor in source.tensors.items())
    for kept, row in enumerate(ids.tolist()):
        for place, neuron in enumerate(row):
            expert, old = divmod(neuron, WIDTH)
            if family == "mixtral":
                pairs = [("gate_up_proj", (place, old)), ("gate_up_proj", (width + place, WIDTH + old))]
                for name, (to, of) in pairs:
                    assert torch.equal(tensors[name][kept, to], before[name][expert, of])
                assert torch.equal(tensors["down_proj"][kept, :, place], before["down_proj"][expert, :, old])
                continue
            for odd in (0, 1):
                to, of = 2 * place + odd, 2 * old + odd
                assert torch.equal(tensors["gate_up_proj"][kept, :, to], before["gate_up_proj"][expert, :, of])
                assert tensors["gate_up_proj_bias"][kept, to] == before["gate_up_proj_bias"][expert, of]
            assert torch.equal(tensors["down_proj"][kept, place], before["down_proj"][expert, old])
    if family == "gpt_oss":
        assert (tensors["down_proj_bias"] == 7).all(), "output biases belong to the kept expert"


@pytest.mark.parametrize(
    ("family", "kind", "originals", "more"),
    [
        ("gpt_oss", "both", "device", 8),
        ("mixtral", "prune", "host", -8),
    ],
)
def test_a_repair_fills_fits_and_takes_everything_back(
    originals: str, more: int, kind: str, family: str, model_config: Callable[..., ModelConfig]
) -> None:
    model = ResidentModel.load(model_config(family, expert_offload=originals))
    base = replace(edit_of_kind(len(model.layers), EXPERTS, kind, 4, space="logits"), width=WIDTH + more)
    rows, before = rows_of(sequences_of([40] * 5)), digest(model)
    plain = logits(model, None, UNSEEN)
    filled = RepairedEdit(base, replace(WHOLE, neurons=True), rows)
    cut = logits(model, base, UNSEEN)
    found = logits(model, filled, UNSEEN)
    assert not torch.equal(found, logits(model, replace(filled, settings=WHOLE), UNSEEN))
    assert torch.equal(logits(model, None, UNSEEN), plain) and torch.equal(logits(model, base, UNSEEN), cut)
    # Once more what was kept of the first time, and as a worker gives it that has run nothing else.
    assert torch.equal(logits(model, filled, UNSEEN), found)
    fresh = ResidentModel.load(model_config(family, expert_offload=originals))
    assert torch.equal(logits(fresh, filled, UNSEEN), found)
    assert digest(model) == before or originals == "host", "what is shown of host memory comes and goes"
