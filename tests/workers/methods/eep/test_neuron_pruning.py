"""Pruning neurons by the error of a fit of the others, against fits of all the others in plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from edit_checks import Residents
from family_samples import edit_of_kind
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from repair_samples import rows_of, sequences_of
from torch import Tensor

from moevolve.workers.contract.fitting import NeuronSettings
from moevolve.workers.methods.eep.neuron_pruning import (
    prune_features,
    prune_neurons,
)
from moevolve.workers.methods.eep.neurons import ExpertNeurons
from moevolve.workers.methods.eep.outputs import ExpertOutputs
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings
from moevolve.workers.methods.repair.fits import FitCache
from moevolve.workers.methods.shared import outputs as shared_outputs
from moevolve.workers.methods.shared.outputs import NeuronSelection
from moevolve.workers.model.resident import ResidentModel

EXPERTS, RETAINED, WIDTH, HIDDEN, TOKENS = 6, 3, 24, 32, 240
ROOM = 1 << 30
Floats = NDArray[np.float64]


def fitted(features: Floats, target: Floats, ridge: float) -> tuple[Floats, float]:
    """The ridge regression's solution and its objective, from the stacked least-squares problem."""
    stacked = np.vstack((features, np.sqrt(ridge) * np.eye(features.shape[1])))
    wanted = np.vstack((target, np.zeros((features.shape[1], target.shape[1]))))
    solution = np.linalg.lstsq(stacked, wanted, rcond=None)[0]
    return solution, float(((wanted - stacked @ solution) ** 2).sum())


def system(features: Floats, target: Floats, ridge: float) -> tuple[Tensor, Tensor]:
    gram = features.T @ features + ridge * np.eye(features.shape[1])
    return torch.from_numpy(gram), torch.from_numpy(features.T @ target)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(2, 9), ridge=st.sampled_from([0.01, 1.0, 30.0]))
def test_the_feature_whose_removal_costs_least_is_pruned_first(seed: int, count: int, ridge: float) -> None:
    rng = np.random.default_rng(seed)
    features, target = rng.normal(size=(40, count)), rng.normal(size=(40, 3))
    found = prune_features(*system(features, target, ridge), count - 1)
    assert found is not None
    costs = [fitted(np.delete(features, each, axis=1), target, ridge)[1] for each in range(count)]
    (gone,) = set(range(count)) - set(found[0].tolist())
    assert costs[gone] == pytest.approx(min(costs), rel=1e-9)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 30), left=st.integers(1, 30))
def test_remaining_features_have_the_solution_of_a_fit_without_the_others(seed: int, count: int, left: int) -> None:
    rng = np.random.default_rng(seed)
    features, target = rng.normal(size=(50, count)) @ rng.normal(size=(count, count)), rng.normal(size=(50, 2))
    found = prune_features(*system(features, target, 0.5), left)
    assert found is not None
    stay, solution = found
    assert stay.tolist() == sorted(set(stay.tolist())) and len(stay) == min(left, count)
    assert solution.numpy() == pytest.approx(fitted(features[:, stay.numpy()], target, 0.5)[0], rel=1e-6, abs=1e-8)


def kept_of(source: ExpertNeurons, ids: Tensor) -> ExpertNeurons:
    """Kept experts with these neurons and outputs of zero, as if a fit had found them useless."""
    tensors = {name: tensor[:RETAINED].clone() for name, tensor in source.tensors.items()}
    kept = ExpertNeurons(source.module, tensors)
    kept.copy_from(source, ids)
    tensors["down_proj"].zero_()
    return kept


@pytest.fixture
def lab(resident: Residents, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Kept experts with neurons that do nothing, and a residual made of other neurons, spread over all experts."""
    family = getattr(request, "param", "mixtral")
    model, rng = resident(family), np.random.default_rng(5)
    source = ExpertNeurons(model.layers[1].experts, model.original_experts(1))
    generator = torch.Generator().manual_seed(3)
    hidden = 3 * torch.randn(TOKENS, HIDDEN, generator=generator)
    order = torch.from_numpy(rng.permutation(EXPERTS * WIDTH))
    chosen = torch.rand(TOKENS, RETAINED, generator=generator).topk(1).indices
    weights, scale = 0.5 + torch.rand(2, TOKENS, 1, generator=generator)
    planted = order[: RETAINED * WIDTH].view(RETAINED, WIDTH).sort(dim=1).values
    ids = order[RETAINED * WIDTH :][: RETAINED * WIDTH].view(RETAINED, WIDTH).sort(dim=1).values
    residual = torch.zeros(TOKENS, HIDDEN)
    with torch.inference_mode():
        for expert, row in enumerate(planted):
            at = (chosen[:, 0] == expert).nonzero()[:, 0]
            for neuron in row.tolist():
                inside, outside = (weights[at], 1.0) if family == "llama4_text" else (1.0, weights[at])
                value = source.activations(neuron // WIDTH, torch.tensor([neuron % WIDTH]), inside * hidden[at])
                direction = torch.randn(HIDDEN, generator=generator) / value.norm()
                residual[at] += scale[at] * outside * value * direction
    return {
        "source": source,
        "current": kept_of(source, ids),
        "ids": ids,
        "hidden": hidden,
        "edited": (weights, chosen),
        "scale": scale,
        "residual": residual,
        "planted": planted,
    }


def chosen_in(lab: dict[str, Any]) -> Tensor:
    given = {name: value for name, value in lab.items() if name != "planted"}
    with torch.inference_mode():
        return prune_neurons(**given, ridge_lambda=1e-6, settings=NeuronSettings(EXPERTS), memory=ROOM)


@pytest.mark.parametrize("lab", ["mixtral", "gpt_oss", "llama4_text"], indirect=True)
def test_the_neurons_that_made_the_residual_are_found(lab: dict[str, Any]) -> None:
    found = chosen_in(lab)
    for row, planted in zip(found.tolist(), lab["planted"].tolist(), strict=True):
        # More candidates than a kept expert has tokens: a few others can replace one that is hardly ever active.
        assert len(set(row) & set(planted)) >= WIDTH - 4
        assert row == sorted(set(row))


def test_no_neuron_is_given_to_two_kept_experts(lab: dict[str, Any]) -> None:
    lab["edited"] = (lab["edited"][0], lab["edited"][1] * 0)  # all tokens go to the first: it would take any
    before = lab["ids"].tolist()
    found = chosen_in(lab)
    assert len(set(found.flatten().tolist())) == RETAINED * WIDTH and found[0].tolist() != before[0]
    assert found[1:].tolist() == before[1:], "no tokens, nothing to choose by"


def test_a_repair_takes_what_leaves_less_error(resident: Residents, monkeypatch: pytest.MonkeyPatch) -> None:
    model: ResidentModel = resident("mixtral")
    base, rows = edit_of_kind(len(model.layers), EXPERTS, "prune", 2), rows_of(sequences_of([40] * 20))
    some = NeuronSelection(torch.arange(2 * WIDTH).view(2, WIDTH), None)

    def badly(self: ExpertOutputs, recorded: Any, *given: Any) -> tuple[NeuronSelection, Any]:
        self.use_neurons(some)
        return some, recorded

    def first_layer(candidates: float) -> tuple[float, list[Tensor]]:
        """Squared error on held-out tokens, and all layers' neurons."""
        neurons = NeuronSettings(candidates)
        settings = RepairSettings((0.1,), tokens=len(rows.tokens), neurons=neurons)
        with model.edited(RepairedEdit(base, settings, rows)):
            applicator: Any = model._applicators[RepairedEdit]
            applicator._cache = FitCache()
            return applicator.outcomes[0].after, [each.neurons for each in applicator.selections.values()]

    important = first_layer(1.0)
    asked: list[tuple[int, int]] = []

    def vainly(self: ExpertOutputs, recorded: Any, *given: Any) -> NeuronSelection:
        asked.append((self.layer, len(recorded[0])))
        return some

    with monkeypatch.context() as patched:
        patched.setattr(ExpertOutputs, "prune_neurons", vainly)
        left, neurons = first_layer(2.0)
        assert left == important[0] and all(map(torch.equal, neurons, important[1]))
        assert asked == [(0, len(rows.tokens))], "where it doesn't pay once, it isn't tried again"
        patched.setattr(shared_outputs, "_CHOOSING_TOKENS", len(rows.tokens) // 3)
        chosen_on_some = first_layer(1.0)
        assert first_layer(2.0)[0] == chosen_on_some[0] and asked[1:] == [(0, -(-len(rows.tokens) // 3))]
    monkeypatch.setattr(ExpertOutputs, "select_neurons", badly)
    before, after = first_layer(1.0), first_layer(6.0)
    assert after[0] < before[0] and not torch.equal(after[1][0], some.neurons)
