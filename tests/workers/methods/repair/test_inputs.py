"""Fits of gate and up projections: against least squares in float64, against differences, and in whole models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dense_edits import divided, masked
from edit_checks import Residents, digest
from families import edit_of_kind
from repair_samples import rows_of, seen_at, sequences_of

from moevolve.workers.contract.card import ExportCard
from moevolve.workers.export.export import export_model
from moevolve.workers.methods.eep.neurons import ExpertNeurons
from moevolve.workers.methods.repair import inputs
from moevolve.workers.methods.repair.apply import RepairApplicator
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings
from moevolve.workers.methods.shared.outputs import Network

SEQUENCES = sequences_of((40, 17, 50, 3, 44, 31, 28, 39, 60, 52, 1, 47))
CHECKED = SEQUENCES[7:8]
"""What a repair keeps out of its fit to check it."""


def linear_network(rng: np.random.Generator, tokens: int = 60) -> Network:
    """An expert of two neurons without an activation, on three inputs, whose output has four dimensions."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape)).float()

    places = torch.arange(0, 2 * tokens, 2)
    factor = draw(tokens, 1).abs()
    return Network(
        places, draw(tokens, 3), factor, draw(2, 3), None, draw(2, 4), torch.arange(2), lambda rows: rows.clone()
    )


@pytest.mark.parametrize(("chunk_bytes", "padding"), [(1 << 30, 0), (2000, 0), (1 << 30, 5), (2000, 5)])
def test_without_an_activation_the_fit_is_weighted_least_squares(
    chunk_bytes: int, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "_CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(inputs, "padded", lambda part, *_: torch.nn.functional.pad(part, (0, padding)))
    monkeypatch.setattr(inputs, "_DAMPING", 0.0)
    rng = np.random.default_rng(3)
    network = linear_network(rng)
    residual = torch.from_numpy(rng.standard_normal((120, 4))).float()
    weights = torch.from_numpy(rng.uniform(0.5, 2, 120)).float()
    checked = torch.zeros(120, dtype=torch.bool)
    checked[:16] = True
    # What the residual has of the network's own kind, so that held-out tokens gain as well.
    wanted = rng.standard_normal((2, 3))
    x, q, down = (each.double().numpy() for each in (network.inputs, network.factor, network.down))
    residual[network.tokens] = 0.1 * residual[network.tokens] + torch.from_numpy(q * (x @ wanted.T @ down)).float()
    before, other = network.weight.double().numpy().copy(), residual[1::2].clone()
    # One column of the design per entry of the weight, tokens and dimensions below each other.
    design = np.stack([(q * x[:, [j]] @ down[[i]]).ravel() for i in range(2) for j in range(3)], axis=1)
    scale = np.repeat(np.sqrt(weights[network.tokens].double().numpy()) * ~checked[network.tokens].numpy(), 4)
    target = residual[network.tokens].double().numpy().ravel()
    solved = np.linalg.lstsq(scale[:, None] * design, scale * target, rcond=None)[0]
    inputs.fit_inputs([network], residual, checked, weights)
    np.testing.assert_allclose(network.weight.double().numpy() - before, solved.reshape(2, 3), rtol=1e-3, atol=1e-4)
    left = target - design @ solved
    np.testing.assert_allclose(residual[network.tokens].double().numpy().ravel(), left, rtol=1e-3, atol=1e-4)
    assert torch.equal(residual[1::2], other), "tokens of other experts"


def test_a_fit_that_held_out_tokens_lose_by_is_not_made() -> None:
    rng = np.random.default_rng(4)
    network, residual = linear_network(rng), torch.from_numpy(rng.standard_normal((120, 4))).float()
    checked = torch.zeros(120, dtype=torch.bool)
    checked[:16] = True
    # Held-out tokens need the opposite of what the others need.
    given = network.factor * (network.inputs @ torch.ones(3, 2) @ network.down)
    residual[network.tokens] = torch.where(checked[network.tokens, None], -given, given)
    weight, before = network.weight.clone(), residual.clone()
    inputs.fit_inputs([network], residual, checked, None)
    assert torch.equal(network.weight, weight) and torch.equal(residual, before)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "nemotron_h", "llama4_text"])
def test_networks_compute_what_experts_do_and_slopes_are_their_derivatives(family: str, resident: Residents) -> None:
    layer = resident(family).layers[-1]
    neurons = ExpertNeurons(layer.experts, {name: each.float() for name, each in layer.expert_tensors().items()})
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(5, neurons.hidden, generator=generator)
    weights, every = torch.rand(5, 1, generator=generator), torch.arange(5)
    network = neurons.network(1, every, hidden, weights)
    expected = neurons.features(1, torch.arange(neurons.width), hidden, weights)
    torch.testing.assert_close(network.factor * network.activated(every), expected)
    slopes = network.slopes(every).double()
    rows = torch.nn.functional.linear(network.inputs.double(), network.weight.double(), None)
    rows = rows if network.bias is None else rows + network.bias.double()
    for row in range(0, len(network.weight), 3):
        moved = rows.clone()
        moved[:, row] += 1e-5
        change: Any = (network.activate(moved) - network.activate(rows)) / 1e-5
        neuron = int(network.neurons[row])
        torch.testing.assert_close(change[:, neuron], slopes[:, row], rtol=1e-3, atol=1e-4)
        assert not change[:, [each for each in range(neurons.width) if each != neuron]].any()


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "nemotron_h", "llama4_text"])
def test_more_is_repaired_and_everything_is_taken_back(
    family: str, resident: Residents, checkpoint: Callable[[str], Path]
) -> None:
    from transformers import AutoModelForCausalLM

    model = resident(family)
    space = "probs" if model.layers[0].rule.has_scores else "logits"
    base = edit_of_kind(len(model.layers), model.layers[0].count, "prune", 4, space=space)
    settings = RepairSettings((0.1, 1.0, 10.0))
    before = digest(model)
    reference = seen_at(AutoModelForCausalLM.from_pretrained(checkpoint(family)).eval(), CHECKED)
    errors = []
    for rounds in (0, 2):
        with model.edited(RepairedEdit(base, replace(settings, input_rounds=rounds), rows_of(SEQUENCES))):
            applicator = model._applicators[RepairedEdit]
            assert isinstance(applicator, RepairApplicator)
            now, last = seen_at(model.model, CHECKED), model.layers[-1].index
            outcome = applicator.outcomes[-1]
            assert outcome is not None and outcome.after < outcome.before
            left = ((reference[last]["behind"] - now[last]["behind"]) ** 2).sum()
            assert left == pytest.approx(outcome.after, rel=2e-3)
            first = applicator.outcomes[0]
            assert first is not None
            errors.append(first.after)
            repaired = digest(model)
    assert errors[1] < errors[0]
    assert digest(model) == before
    # Its layers are in the cache, bit for bit.
    with model.edited(RepairedEdit(base, replace(settings, input_rounds=2), rows_of(SEQUENCES))):
        assert digest(model) == repaired and len(applicator._cache._layers) == 2 * len(model.layers)


def test_exports_have_the_fitted_projections(resident: Residents, tmp_path: Path) -> None:
    model = resident("mixtral")
    base = edit_of_kind(len(model.layers), model.layers[0].count, "prune", 4)
    edit = RepairedEdit(base, RepairSettings((0.1, 1.0), input_rounds=1), rows_of(SEQUENCES))
    report = export_model(model, edit, tmp_path / "out", ExportCard("A model", "someone/base", "f00d"))
    assert report.agreement.holds
    assert "gate and up projections" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


partly = partial(masked, (20, 48, 33))
"""Of which a network stays whole."""


@pytest.mark.parametrize(
    ("family", "edit"), [("llama", masked), ("llama", divided), ("phi", divided), ("phi3", partly), ("gemma2", partly)]
)
def test_networks_of_dense_models_are_fitted_too(
    family: str, edit: Callable[..., Any], resident: Residents, checkpoint: Callable[[str], Path]
) -> None:
    from transformers import AutoModelForCausalLM

    model = resident(family)
    base, before, errors = edit(), digest(model), list[float]()
    reference = seen_at(AutoModelForCausalLM.from_pretrained(checkpoint(family)).eval(), CHECKED)
    for rounds in (0, 2):
        settings = RepairSettings((0.1, 1.0), input_rounds=rounds)
        with model.edited(RepairedEdit(base, settings, rows_of(SEQUENCES))):
            applicator = model._applicators[RepairedEdit]
            assert isinstance(applicator, RepairApplicator)
            now, outcome = seen_at(model.model, CHECKED), applicator.outcomes[-1]
            assert outcome is not None
            if family != "gemma2":  # its error is measured before a norm
                left = ((reference[-1]["behind"] - now[-1]["behind"]) ** 2).sum()
                assert left == pytest.approx(outcome.after, rel=2e-3)
            first = applicator.outcomes[0]
            assert first is not None
            errors.append(first.after)
    assert errors[1] < errors[0]
    assert digest(model) == before
