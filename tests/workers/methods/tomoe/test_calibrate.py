"""The calibration of ToMoE genomes, against the same quantities from all activations at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.methods.shared import input_statistics
from moevolve.workers.methods.tomoe.calibrate import calibrate_tomoe
from moevolve.workers.methods.tomoe.edit import ToMoeMeasurement
from moevolve.workers.model.resident import ResidentModel

LAYERS, HEAD_DIM, EXPERTS, COMPONENTS = 3, 8, 5, 4
MEASUREMENT = ToMoeMeasurement(True, EXPERTS, 0.5, COMPONENTS, sample=25, tokens=1000)
SEQUENCES = [tuple(np.random.default_rng(i).integers(3, 97, 5 + i).tolist()) for i in range(12)]
TOKENS = sum(map(len, SEQUENCES))


@pytest.fixture(scope="module")
def llama(model_config: Callable[..., ModelConfig]) -> ResidentModel:
    return ResidentModel.load(model_config("llama"))


@pytest.fixture(scope="module")
def found(llama: ResidentModel) -> dict[str, NDArray[np.float32]]:
    return dict(calibrate_tomoe(llama, SEQUENCES, MEASUREMENT).arrays)


def seen(model: ResidentModel, layer: int, name: str, *, output: bool = False) -> NDArray[np.float64]:
    """All inputs (or outputs) of a linear layer, [tokens, size]."""
    rows: list[Any] = []
    module = dict(model.model.get_decoder().layers[layer].named_modules())[name]
    handle = module.register_forward_hook(lambda _, args, out: rows.append((out if output else args[0]).flatten(0, -2)))
    with torch.inference_mode():
        for sequence in SEQUENCES:
            model.model(torch.tensor([sequence]))
    handle.remove()
    return torch.cat(rows).double().numpy()


@pytest.mark.parametrize("site", ["network", "head"])
def test_products_with_directions_have_mean_zero_and_size_one(
    llama: ResidentModel, found: dict[str, Any], site: str
) -> None:
    for layer in range(LAYERS):
        inputs = seen(llama, layer, "mlp.up_proj" if site == "network" else "self_attn.q_proj")
        directions = found[f"{site}_directions"][layer].astype(np.float64)
        products = inputs @ directions.T
        if site == "network":
            assert np.linalg.norm(inputs.mean(axis=0)) * np.linalg.norm(directions[0]) == pytest.approx(
                inputs.mean(axis=0) @ directions[0], rel=1e-5
            )
            assert (products[:, 0] ** 2).mean() == pytest.approx(1, rel=1e-5)
            products = products[:, 1:]
        np.testing.assert_allclose(products.mean(axis=0), 0, atol=1e-5)
        np.testing.assert_allclose(products.T @ products / TOKENS, np.eye(COMPONENTS), atol=1e-4)
        # Evenly spaced tokens, as many as asked for at most.
        np.testing.assert_allclose(
            found[f"{site}_sample"][layer][:, -COMPONENTS:], products[:: -(-TOKENS // 25)], atol=1e-4
        )


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
def test_neurons_are_measured_by_what_they_contribute(family: str, model_config: Callable[..., ModelConfig]) -> None:
    model = ResidentModel.load(model_config(family))
    found = calibrate_tomoe(model, SEQUENCES, replace(MEASUREMENT, attention=False)).arrays
    added, factor = "mlp.down_proj", 0.6 if family == "granite" else 1
    for layer in range(LAYERS):
        down = factor * model.dense_layers[layer].down.weight.double().numpy()
        if family == "gemma2":
            added, norm = "post_feedforward_layernorm", model.model.model.layers[layer].post_feedforward_layernorm
            down *= 1 + norm.weight.double().numpy()[:, None]
        contributions = (seen(model, layer, "mlp.down_proj")[:, None, :] * down).transpose(0, 2, 1)
        squares = (contributions**2).sum(axis=2)
        np.testing.assert_allclose(found["neuron_saliency"][layer], squares.mean(axis=0), rtol=1e-5)
        variances = seen(model, layer, "mlp.down_proj").var(axis=0, ddof=1)
        np.testing.assert_allclose(found["neuron_fluctuation"][layer], variances * (down**2).sum(axis=0), rtol=1e-5)
        output, stream = (seen(model, layer, name, output=True) for name in (added, ""))
        share = factor**2 * ((output**2).sum(axis=1) / (stream**2).sum(axis=1)).mean()
        np.testing.assert_allclose(found["network_share"][layer], share, rtol=1e-5)


def test_an_experts_saliency_is_that_of_its_tokens(llama: ResidentModel, found: dict[str, Any]) -> None:
    for layer in range(LAYERS):
        norms = (llama.dense_layers[layer].down.weight.double().numpy() ** 2).sum(axis=0)
        squares = seen(llama, layer, "mlp.down_proj") ** 2 * norms
        shares = squares / squares.sum(axis=1, keepdims=True)
        router = found["expert_rows"][layer] @ found["network_directions"][layer]
        chosen = (seen(llama, layer, "mlp.up_proj") @ router.T.astype(np.float64)).argmax(axis=1)
        for expert, saliency in enumerate(found["expert_saliency"][layer]):
            if (chosen == expert).sum() * EXPERTS * 16 >= TOKENS:
                np.testing.assert_allclose(saliency, shares[chosen == expert].mean(axis=0), rtol=1e-4)


def test_heads_are_measured_by_their_products_and_contributions(llama: ResidentModel, found: dict[str, Any]) -> None:
    for layer in range(LAYERS):
        query, key = (
            (seen(llama, layer, f"self_attn.{name}_proj", output=True) ** 2).mean(axis=0).reshape(-1, HEAD_DIM)
            for name in "qk"
        )
        pairs = np.zeros(HEAD_DIM // 2)
        for head in range(4):
            for i in range(HEAD_DIM // 2):
                of = [each[i] + each[i + HEAD_DIM // 2] for each in (query[head], key[head // 2])]
                pairs[i] += np.sqrt(of[0] * of[1])
        np.testing.assert_allclose(found["pair_saliency"][layer], pairs, rtol=1e-5)
        outputs = (seen(llama, layer, "self_attn.o_proj") ** 2).mean(axis=0).reshape(-1, HEAD_DIM)
        weight = llama.model.get_decoder().layers[layer].self_attn.o_proj.weight.double().numpy()
        values = (outputs * (weight**2).sum(axis=0).reshape(-1, HEAD_DIM)).sum(axis=0)
        np.testing.assert_allclose(found["value_saliency"][layer], values, rtol=1e-5)


def test_measuring_in_parts_changes_nothing(
    llama: ResidentModel, found: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_statistics, "STATISTICS_MEMORY", 1)
    again = calibrate_tomoe(llama, SEQUENCES, MEASUREMENT).arrays
    assert set(again) == set(found)
    assert all(np.array_equal(again[name], found[name]) and found[name].dtype == np.float32 for name in found)
