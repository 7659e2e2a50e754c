"""MoEfication's and CMoE's partitions and routers, against the papers' definitions in plain float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dense_edits import HIDDEN, LAYERS, SEQUENCES, WIDTH, seen_by_network
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from moevolve.workers.methods.factorllm.calibrate_baselines import (
    SHARED_BIAS,
    calibrate_cmoe,
    calibrate_moefication,
    partition_neurons,
)
from moevolve.workers.methods.factorllm.edit import CmoeMeasurement, MoeficationMeasurement

MOEFICATION = MoeficationMeasurement(experts=6, tokens=512)
CMOE = CmoeMeasurement(experts=6, shared=2, firing=7, ridge=1e-3, tokens=512)


def plain_ridge(x: NDArray[np.float64], targets: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fitted values of a ridge regression, by augmented least squares; the intercept isn't penalised."""
    centred = x - x.mean(axis=0)
    penalty = np.sqrt(CMOE.ridge * (centred**2).sum() / HIDDEN)
    columns = np.hstack([centred, np.ones((len(x), 1))])
    rows = np.vstack([columns, penalty * np.eye(HIDDEN, HIDDEN + 1)])
    targets = np.vstack([targets, np.zeros((HIDDEN, targets.shape[1]))])
    return np.asarray(columns @ np.linalg.lstsq(rows, targets, rcond=None)[0])


def activated(h: NDArray[np.float64], firing: int) -> NDArray[np.float64]:
    """1 for the neurons with a token's largest activations, else 0: [tokens, width]."""
    marks = np.zeros(h.shape)
    for token, row in enumerate(np.abs(h)):
        marks[token, sorted(range(len(row)), key=lambda neuron: -row[neuron])[:firing]] = 1
    return marks


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_moefications_routers_are_cosines_with_mean_input_weights(family: str, resident: Any) -> None:
    model = resident(family)
    found = calibrate_moefication(model, SEQUENCES, MOEFICATION).arrays
    assert found["moefication_weight"].shape == (LAYERS, 6, HIDDEN) and not found["moefication_bias"].any()
    for layer in range(LAYERS):
        network, experts = model.dense_layers[layer], found["moefication_experts"][layer]
        weights = (network.up if network.gate is None else network.gate).weight.double().numpy()
        assert np.bincount(experts).tolist() == [WIDTH // 6] * 6
        x, _ = seen_by_network(model, layer, SEQUENCES)
        cosines = np.empty((len(x), 6))
        for expert in range(6):
            centre = weights[experts == expert].mean(axis=0)
            cosines[:, expert] = x @ centre / np.linalg.norm(centre) / np.linalg.norm(x, axis=1)
        logits = x @ found["moefication_weight"][layer].T
        assert np.sqrt(logits.var(axis=0).mean()) == pytest.approx(1, rel=1e-4)
        ratio = logits / (cosines * np.linalg.norm(x, axis=1)[:, None])
        np.testing.assert_allclose(ratio, ratio[0, 0], rtol=1e-3)
        # Neurons of an expert are more alike than others.
        units = weights / np.linalg.norm(weights, axis=1, keepdims=True)
        alike = units @ units.T
        same = experts[:, None] == experts[None]
        assert alike[same & ~np.eye(WIDTH, dtype=bool)].mean() > alike[~same].mean() + 0.02


def test_cmoes_shared_experts_are_those_most_often_activated(resident: Any) -> None:
    model = resident("llama")
    found = calibrate_cmoe(model, SEQUENCES, CMOE).arrays
    for layer in range(LAYERS):
        x, h = seen_by_network(model, layer, SEQUENCES)
        marks, experts = activated(h, CMOE.firing), found["cmoe_experts"][layer]
        rates = marks.sum(axis=0)
        assert np.bincount(experts).tolist() == [WIDTH // 6] * 6
        assert rates[experts < 2].min() >= rates[experts >= 2].max()
        assert (found["cmoe_bias"][layer, :2] == SHARED_BIAS).all() and not found["cmoe_weight"][layer, :2].any()
        # Routed experts' logits are the regression of their representatives' activations, up to scale and shift.
        logits = x @ found["cmoe_weight"][layer, 2:].T + found["cmoe_bias"][layer, 2:]
        assert np.sqrt(logits.var(axis=0).mean()) == pytest.approx(1, rel=1e-3) and np.abs(logits).max() < SHARED_BIAS
        representatives = [plain_representative(marks, np.flatnonzero(experts == expert)) for expert in range(2, 6)]
        fitted = plain_ridge(x, np.abs(h[:, representatives]))
        np.testing.assert_allclose(
            logits - logits.mean(), (fitted - fitted.mean()) / np.sqrt(fitted.var(axis=0).mean()), atol=2e-3
        )


def plain_representative(marks: NDArray[np.float64], members: NDArray[np.int64]) -> int:
    """The member nearest the cluster's centre in L1."""
    centre = marks[:, members].mean(axis=1)
    return int(members[np.argmin([np.abs(marks[:, neuron] - centre).sum().round(9) for neuron in members])])


@given(seed=st.integers(0, 2**32 - 1), shared=st.integers(0, 2), experts=st.sampled_from([3, 4]))
def test_clusters_are_balanced_and_have_a_representative(seed: int, shared: int, experts: int) -> None:
    rng = np.random.default_rng(seed)
    marks = (rng.random((30, 12)) < rng.uniform(0.05, 0.9, 12)).astype(np.float64)
    labels, representatives = partition_neurons(marks.T @ marks, experts, shared)
    assert np.bincount(labels, minlength=experts).tolist() == [12 // experts] * experts
    rates = marks.sum(axis=0)
    routed = np.flatnonzero(labels >= shared)
    assert not shared or rates[labels < shared].min() >= rates[routed].max()
    clusters = [np.flatnonzero(labels == expert) for expert in range(shared, experts)]
    for members, representative in zip(clusters, representatives, strict=True):
        distances = np.abs(marks[:, members] - marks[:, members].mean(axis=1, keepdims=True)).sum(axis=0)
        assert representative in members
        assert distances[members == representative][0] == pytest.approx(distances.min())
