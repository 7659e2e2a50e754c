"""The calibration of FactorLLM genomes: partitions, labels, closed-form routers, principal directions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from dense_edits import HIDDEN, LAYERS, SEQUENCES, seen_by_network
from numpy.typing import NDArray

from moevolve.workers.contract.edits import Calibration
from moevolve.workers.families.layers import DenseLayer
from moevolve.workers.methods.factorllm.balanced_clusters import number_by_first
from moevolve.workers.methods.factorllm.calibrate import calibrate_factorllm
from moevolve.workers.methods.factorllm.edit import FactorLlmMeasurement

MEASUREMENT = FactorLlmMeasurement(
    experts=6,
    active=2,
    routers=1,
    partition="kmeans",
    router_bias=True,
    components=5,
    ridge=1e-3,
    tokens=512,
)


def plain_labels(
    network: DenseLayer,
    x: NDArray[np.float64],
    h: NDArray[np.float64],
    experts: NDArray[Any],
    routers: int,
) -> NDArray[np.float64]:
    """1 for the two slices of every linear layer whose outputs are nearest the whole layer's, [routers, tokens, 6]."""
    down, up = network.down.weight.double().numpy(), x @ network.up.weight.double().numpy().T
    if network.gate is None:
        assert network.up.bias is not None
        branches = [np.maximum(up + network.up.bias.double().numpy(), 0)]
    else:
        gate = x @ network.gate.weight.double().numpy().T
        branches = [gate / (1 + np.exp(-gate)), up]
    whole = [*branches, h @ down.T] if routers > 1 else [h @ down.T]
    labels = np.zeros((routers, len(x), 6))
    for router, outputs in enumerate(whole):
        if router < routers - 1:
            parts = [branches[router] * (experts == expert) for expert in range(6)]
        else:
            parts = [(h * (experts == expert)) @ down.T for expert in range(6)]
        distances = np.stack([((part - outputs) ** 2).mean(axis=1) for part in parts], axis=1)
        np.put_along_axis(labels[router], np.argsort(distances, axis=1)[:, :2], 1, axis=1)
    return labels


@pytest.mark.parametrize(("family", "routers", "bias"), [("llama", 1, True), ("llama", 3, False), ("opt", 2, True)])
def test_routers_are_the_ridge_regression_of_the_nearest_experts(
    family: str, routers: int, bias: bool, resident: Any
) -> None:
    model = resident(family)
    measurement = replace(MEASUREMENT, routers=routers, router_bias=bias)
    start = calibrate_factorllm(model, SEQUENCES, measurement).arrays
    assert start["kmeans_weight"].shape == (LAYERS, routers, 6, HIDDEN)
    for layer in range(LAYERS):
        x, h = seen_by_network(model, layer, SEQUENCES)
        found = start["kmeans_weight"][layer] @ x.T + start["kmeans_bias"][layer][..., None]
        # Ridge by augmented least squares, with the intercept in a column that isn't penalised.
        centred = x - x.mean(axis=0) if bias else x
        penalty = np.sqrt(1e-3 * (centred**2).sum() / HIDDEN)
        columns = np.hstack([centred, np.ones((len(x), 1))]) if bias else centred
        rows = np.vstack([columns, penalty * np.eye(HIDDEN, columns.shape[1])])
        labels = plain_labels(model.dense_layers[layer], x, h, start["kmeans_experts"][layer], routers)
        for logits, own in zip(found, labels, strict=True):
            solution = np.linalg.lstsq(rows, np.vstack([own, np.zeros((HIDDEN, 6))]), rcond=None)[0]
            expected = columns @ solution
            spread = np.sqrt((expected.var(axis=0) if bias else (expected**2).mean(axis=0)).mean())
            np.testing.assert_allclose(logits.T, expected / spread, rtol=0, atol=2e-3)


def test_directions_vary_by_one_and_are_uncorrelated(resident: Any) -> None:
    model = resident("llama")
    start = calibrate_factorllm(model, SEQUENCES, MEASUREMENT).arrays
    x, _ = seen_by_network(model, 2, SEQUENCES)
    products = x @ start["directions"][2].T - start["offsets"][2]
    np.testing.assert_allclose(products.T @ products / len(x), np.eye(5), atol=1e-3)
    np.testing.assert_allclose(products.mean(axis=0), 0, atol=1e-3)


@pytest.mark.parametrize("partition", ["start", "kmeans"])
def test_divisions_are_equal_and_the_same_every_time(partition: Any, resident: Any) -> None:
    measurement = replace(MEASUREMENT, partition=partition)
    first = calibrate_factorllm(resident("llama"), SEQUENCES, measurement)
    for experts in first.arrays[f"{partition}_experts"]:
        assert np.bincount(experts).tolist() == [8] * 6
        assert np.array_equal(number_by_first(experts.astype(np.int64)), experts)
    assert calibrate_factorllm(resident("llama"), SEQUENCES, measurement).to_bytes() == first.to_bytes()
    back = Calibration.from_bytes(first.to_bytes())
    assert {name: array.dtype.name for name, array in back.arrays.items()} == {
        f"{partition}_experts": "uint8",
        "directions": "float32",
        "offsets": "float32",
        f"{partition}_weight": "float32",
        f"{partition}_bias": "float32",
    }
    if partition == "start":
        assert (first.arrays["start_experts"] == np.repeat(np.arange(6), 8)).all(), "the authors' equal slices in order"


def test_neurons_with_the_same_input_weights_come_together(resident: Any) -> None:
    model = resident("opt")
    layer = model.dense_layers[0]
    saved = {name: tensor.clone() for name, tensor in layer.decoder_layer.state_dict().items()}
    try:
        # Six bundles of neurons with the same input weights each, scattered over the network.
        bundle = np.random.default_rng(0).permutation(np.repeat(np.arange(6), 8))
        layer.up.weight.data.copy_(layer.up.weight.data[torch.from_numpy(bundle)])
        layer.up.bias.data.zero_()
        found = calibrate_factorllm(model, SEQUENCES, MEASUREMENT).arrays["kmeans_experts"][0]
        assert np.array_equal(found, number_by_first(bundle))
    finally:
        layer.decoder_layer.load_state_dict(saved)
