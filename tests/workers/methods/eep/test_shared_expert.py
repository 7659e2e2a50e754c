"""The shared expert in a repair: its neurons among the features of a layer, against a fit by hand in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edit_checks import Residents, digest
from families import edit_of_kind
from numpy.typing import NDArray
from repair_samples import rows_of, seen_at, sequences_of

from moevolve.workers.methods.repair.apply import RepairApplicator
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings
from moevolve.workers.model.resident import ResidentModel

Floats = NDArray[np.float64]

LENGTHS = (40, 17, 50, 3, 44, 31, 28, 39, 60, 52, 1, 47)
SEQUENCES = sequences_of(LENGTHS)
CHECKED = np.repeat([each == 7 for each in range(len(LENGTHS))], LENGTHS)
UNSEEN = torch.tensor(sequences_of([40] * 2, seed=9))
LAMBDA, SHARED = 1.0, 20


def repaired(model: ResidentModel, **settings: Any) -> RepairedEdit:
    base = edit_of_kind(len(model.layers), 6, "prune", 3)
    return RepairedEdit(base, RepairSettings((LAMBDA,), **settings), rows_of(SEQUENCES))


def swiglu(gate: Floats, up: Floats) -> Floats:
    found: Floats = gate / (1 + np.exp(-gate)) * up
    return found


def features_by_hand(block: Any, kept: Sequence[int], hidden: Floats) -> Floats:
    """Of a pruned Qwen2-MoE block, which takes weights from the softmax over all experts: [tokens, n' x I + shared]."""
    weights = {name: each.detach().double().numpy() for name, each in block.named_parameters()}
    scores = np.exp(hidden @ weights["gate.weight"].T)
    scores /= scores.sum(axis=1, keepdims=True)
    best = np.argsort(-scores[:, kept], axis=1)[:, :2]
    columns = []
    for place, expert in enumerate(kept):
        gate, up = np.split(hidden @ weights["experts.gate_up_proj"][expert].T, 2, axis=1)
        share = scores[:, expert] * (best == place).any(axis=1)
        columns.append(share[:, None] * swiglu(gate, up))
    gate, up = (hidden @ weights[f"shared_expert.{name}_proj.weight"].T for name in ("gate", "up"))
    columns.append(swiglu(gate, up) / (1 + np.exp(-hidden @ weights["shared_expert_gate.weight"].T)))
    return np.concatenate(columns, axis=1)


def test_it_is_fitted_together_with_the_kept_experts(resident: Residents, checkpoint: Callable[[str], Path]) -> None:
    from transformers import AutoModelForCausalLM

    plain, model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen2_moe")).eval(), resident("qwen2_moe")
    edit, before = repaired(model), digest(model)
    seen, block = seen_at(plain, SEQUENCES)[0], plain.model.layers[0].mlp
    kept = edit.base.router_mapping[0].argmax(axis=1).tolist()
    phi = features_by_hand(block, kept, seen["into"])
    down = [block.experts.down_proj[each] for each in kept] + [block.shared_expert.down_proj.weight]
    weights = np.concatenate([each.detach().double().numpy().T for each in down])
    fitted = phi[~CHECKED]
    system = fitted.T @ fitted + LAMBDA * np.mean((fitted**2).sum(axis=0)) * np.eye(phi.shape[1])
    change = np.linalg.solve(system, fitted.T @ (seen["experts"] - phi @ weights)[~CHECKED])
    assert np.abs(change[-SHARED:]).max() > 0.01
    with model.edited(edit):
        found = model.layers[0].block.shared_expert.down_proj.weight.double().numpy()
    np.testing.assert_allclose(found.T, (weights + change)[-SHARED:], atol=2e-4)
    assert digest(model) == before


@pytest.mark.parametrize("family", ["qwen2_moe"])
def test_neurons_are_tried_twice_but_it_is_fitted_once(
    family: str, resident: Residents, checkpoint: Callable[[str], Path]
) -> None:
    """The fit of one choice of neurons is undone before the next: what is said to be left is left."""
    from transformers import AutoModelForCausalLM

    model = resident(family)
    edit = repaired(model, neurons=True)
    reference = seen_at(AutoModelForCausalLM.from_pretrained(checkpoint(family)).eval(), SEQUENCES)
    with model.edited(edit):
        now, applicator = seen_at(model.model, SEQUENCES), model._applicators[RepairedEdit]
    assert isinstance(applicator, RepairApplicator)
    for layer, outcome in zip(model.layers, applicator.outcomes, strict=True):
        assert outcome is not None and outcome.after < outcome.before
        left = reference[layer.index]["behind"] - now[layer.index]["behind"]
        assert (left[CHECKED] ** 2).sum() == pytest.approx(outcome.after, rel=2e-3)
